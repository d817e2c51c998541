"""Matplotlib figures of results, and pictures with a text alternative for notebooks."""
