"""Losses as sums and divisors, which micro-batches add up, and losses over the whole batch. A loss
comes in as `compile` takes it."""
