"""Benchmarks of gradlab and its alternatives, run with `make bench`."""
