"""Where the tests find the project."""

import pathlib

SUPPORT = pathlib.Path(__file__).resolve().parent
ROOT = SUPPORT.parent.parent
