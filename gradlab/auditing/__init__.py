"""The audit: which accumulation bug does a training loop have? It needs NumPy only, so it can audit
any framework."""
