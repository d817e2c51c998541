"""JavaScript files as one module."""

import pathlib

FOLDER = pathlib.Path(__file__).parent


def module(*names: str) -> str:
    """Join files of this folder, given without their ending, into one module, as anywidget wants it.

    Their imports of one another, a line each, are left out, so no two of the files may use the same name. What the last
    one exports by default, the module does.
    """
    left_out, lines = ("import ", "export default "), []
    for name in names:
        file = (FOLDER / f"{name}.js").read_text(encoding="utf-8").splitlines(keepends=True)
        lines += [line for line in file if not line.startswith(left_out[:1] if name == names[-1] else left_out)]
    return "".join(lines)
