"""JavaScript files as one module."""

import pathlib
import re

FOLDER = pathlib.Path(__file__).parent


def module(*names: str) -> str:
    """Join files of this folder, given without their ending, into one module, as anywidget wants
    it.

    Their imports of one another are left out, so no two of the files may use the same name, and so
    are lines that are only a comment, because saved pages carry the module. The default export is
    that of the last file.
    """
    files = [(FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in names]
    files[:-1] = [
        re.sub(r"^export default .*\n", "", file, flags=re.MULTILINE) for file in files[:-1]
    ]
    joined = "".join(
        re.sub(r"^import .*?;\n", "", file, flags=re.MULTILINE | re.DOTALL) for file in files
    )
    return re.sub(r"^ *(//.*|/\*\*.*\*/)\n", "", joined, flags=re.MULTILINE)


def script(*names: str) -> str:
    """Files of this folder as one without exports, as a classic worker runs it.

    Chromium lets no page of a file start a worker that is a module.
    """
    return re.sub(r"^export ", "", module(*names), flags=re.MULTILINE)
