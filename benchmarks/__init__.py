"""gradlab beside what a user would take instead: `make bench`."""
