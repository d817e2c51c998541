"""Published results, run again: one module for each, with the rules that judge it."""
