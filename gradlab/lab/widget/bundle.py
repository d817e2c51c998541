"""JavaScript files as one module."""

import pathlib

FOLDER = pathlib.Path(__file__).parent


def module(*names: str) -> str:
    """Join files of this folder, given without their ending, into one module, as anywidget wants it.

    Their imports of one another, a line each, are left out, so no two of the files may use the same name.
    """
    files = ((FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in names)
    return "".join(line for file in files for line in file.splitlines(keepends=True) if not line.startswith("import "))
