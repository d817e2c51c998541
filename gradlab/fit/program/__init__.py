"""One update as a program: what one trace of the model shows, the pass over a window, and the one
place that assigns."""
