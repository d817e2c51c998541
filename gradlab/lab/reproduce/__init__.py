"""Published results, run again: one module for each, with the rules that were decided before the first run."""
