"""Experiments: data, models, methods, training runs and their results."""
