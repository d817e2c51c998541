"""Writes the measurements as JSON, as a figure, and as the tables between the markers in RESULTS.md."""

import json
import pathlib
import re

from benchmarks import growth, memory, speed

ROOT = pathlib.Path(__file__).resolve().parent.parent
JSON = ROOT / "data" / "results" / "bench.json"
FIGURE = ROOT / "data" / "results" / "bench.png"
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
MARKERS = "<!-- bench -->", "<!-- /bench -->"
TITLES = {
    "lenet": "LeNet with dropout, 100 examples an update",
    "dense": "Dense 784-128-10, 100 examples an update",
    "vgg16": "VGG-16 at 64x64, 32 examples an update",
}


def environment() -> dict:
    """Where the figures come from."""
    from gradlab.lab.experiments.environment import describe

    return describe()


def read() -> dict:
    """What an earlier run wrote; empty where there was none."""
    return json.loads(JSON.read_text()) if JSON.exists() else {}


def write(found: dict) -> None:
    """Writes the JSON, the figure and the tables in RESULTS.md."""
    JSON.write_text(json.dumps(found, indent=1) + "\n")
    if "speed" in found:
        from gradlab.lab.figures import plots, style

        FIGURE.write_bytes(style.to_png(plots.speed(found["speed"]["cells"]), compression=9))
    RESULTS.write_text(between_markers(RESULTS.read_text(), as_markdown(found)))


def between_markers(text: str, tables: str) -> str:
    """A text with the tables in place of what stood between the markers.

    >>> between_markers("a <!-- bench -->old<!-- /bench --> b", "new")
    'a <!-- bench -->\\nnew\\n<!-- /bench --> b'
    """
    first, last = MARKERS
    if first not in text or last not in text:
        raise ValueError(f"RESULTS.md must contain the markers {first} and {last}. Received: a text without them")
    return re.sub(f"{first}.*?{last}", lambda _: f"{first}\n{tables}\n{last}", text, flags=re.S)


def as_markdown(found: dict) -> str:
    """All tables that were measured."""
    parts = []
    if "speed" in found:
        cells = found["speed"]["cells"]
        for network in speed.SHAPES:
            if any(cell["network"] == network for cell in cells):
                parts += [f"**{TITLES[network]}**", speed.as_table(cells, network)]
        if found["speed"]["missing"]:
            parts.append(f"Left out, because not installed: {', '.join(found['speed']['missing'])}.")
    if "memory" in found:
        parts += ["**Peak memory of an update, VGG-16 at 64x64, k x b**", memory.as_table(found["memory"])]
        parts.append(
            f"Of each figure the weights take {found['memory']['weights']:.0f} and Adam's averages twice that; one "
            f"example alone needs {found['memory']['one example']:.0f} in all."
        )
    if "growth" in found:
        parts += ["**How time and memory grow**", growth.as_table(found["growth"])]
    if "training" in found:
        rows = found["training"]
        parts.append(
            f"**Whole trainings**: the published experiment, 20 x 5, is {rows['placeholders over microbatched']:.1f} "
            f"times faster by `microbatched` than by placeholders; five seeds of the dense network together take "
            f"{rows['5 seeds over 1']:.2f} times as long as one."
        )
    return "\n\n".join(parts)
