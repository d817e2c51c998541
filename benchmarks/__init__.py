"""gradlab beside what a user would take instead: `make bench`."""

from gradlab import runtime

with runtime.without_startup_noise():
    import tensorflow  # noqa: F401
