"""The classroom under load."""
