"""Metrics of a window that is computed in micro-batches. What `compute_metrics` does comes in,
traced once."""
