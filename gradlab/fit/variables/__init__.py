"""The variables that a forward pass assigns: random seeds, counters, moving averages. They come in
as a trace has recorded them."""
