"""Where and when experiments are trained: here or through Dask, one or many of them, anew or out of
the cache."""
