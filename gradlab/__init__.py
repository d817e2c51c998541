"""gradlab: gradient averaging and gradient accumulation in TensorFlow, to learn and to use.

The public names are listed in `__init__.pyi`, where type checkers read them too. Each one is
imported when it is first used, so `import gradlab` is quick and starts nothing. Call
`gradlab.setup()` first if you want several towers, a fixed number of threads or repeatable runs.
"""

from typing import Any as _Any

import lazy_loader as _lazy

from gradlab.runtime import without_startup_noise as _without_startup_noise

__version__ = "0.2.0"

_load, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)


def __getattr__(name: str) -> _Any:
    if name not in __all__:
        raise AttributeError(f"gradlab has {', '.join(__all__)}. Received: {name!r}")
    with _without_startup_noise():
        try:
            value = _load(name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing in ("", "gradlab", "tensorflow", "keras", "numpy"):  # no extra brings these
                raise
            raise ModuleNotFoundError(
                f'gradlab.{name} needs the extra "lab": pip install "gradlab[lab]". Received: no '
                f"module named {missing}",
                name=error.name,
            ) from error
    globals()[name] = value  # the next use finds it without coming here
    return value
