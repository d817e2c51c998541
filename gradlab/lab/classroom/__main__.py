"""Serve the lab to a classroom: python -m gradlab.lab.classroom."""

from gradlab.lab.classroom.server import main

if __name__ == "__main__":
    main()
