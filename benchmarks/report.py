"""Writes the measurements: as JSON, as a figure, and as the tables between the markers in
RESULTS.md."""

import json
import pathlib
import re

from benchmarks import (
    first_update,
    growth,
    memory,
    plan_error,
    six_models,
    speed,
    tokens,
    training,
    whole_batch,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent
JSON = ROOT / "data" / "results" / "bench.json"
FIGURE = ROOT / "data" / "results" / "bench.png"
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
SIX_MODELS = ROOT / "docs" / "guides" / "one_gibibyte.md"
MARKERS = "<!-- bench -->", "<!-- /bench -->"
# The ways in the figure, which would be hard to read with all of them.
DRAWN = (
    "gradlab in fit",
    "Keras option in fit",
    "gradlab in your function, two in flight",
    "placeholders (post)",
    "variables (post)",
    "tf.function a micro-batch",
    "PyTorch loop",
    "optax MultiSteps",
    "optax microbatching",
)
TITLES = {
    "lenet": "LeNet with dropout, 100 examples per update",
    "dense": "Dense 784-128-10, 100 examples per update",
    "vgg16": "VGG-16 at 64x64, 32 examples per update",
    "transformer": "Transformer of two blocks, texts of 8 to 64 tokens padded to 64, 64 texts per "
    "update",
    "resnet": "Two residual blocks with group normalization, images of 32x32, 64 examples per "
    "update",
}


def environment() -> dict:
    """The versions, the machine and the commit that the figures come from."""
    from gradlab.lab.experiments.environment import describe

    return describe()


def read() -> dict:
    """The measurements that an earlier run wrote; empty if there are none."""
    return json.loads(JSON.read_text()) if JSON.exists() else {}


def write(found: dict) -> None:
    """Writes the JSON, the figure, and the tables in RESULTS.md.

    Args:
        found: the result of each table's `measure`, by the table's name.
    """
    JSON.write_text(json.dumps(found, indent=1) + "\n")
    if "speed" in found:
        from gradlab.lab.figures import plots, style

        drawn = [cell for cell in found["speed"]["cells"] if cell["way"] in DRAWN]
        FIGURE.write_bytes(style.to_png(plots.speed(drawn), compression=9))
    RESULTS.write_text(between_markers(RESULTS.read_text(), as_markdown(found)))
    if "six" in found:
        SIX_MODELS.write_text(
            between_markers(SIX_MODELS.read_text(), six_models.as_table(found["six"]))
        )


def between_markers(text: str, tables: str, markers: tuple[str, str] = MARKERS) -> str:
    """Replaces what stands between two markers of a text.

    Args:
        text: a text that contains the markers.
        tables: what to put between them.
        markers: the first and the last marker.

    Returns:
        The new text.

    Raises:
        ValueError: a marker is missing.

    Example:
        >>> between_markers("a <!-- bench -->old<!-- /bench --> b", "new")
        'a <!-- bench -->\\nnew\\n<!-- /bench --> b'
    """
    first, last = markers
    if first not in text or last not in text:
        raise ValueError(
            f"The page must contain the markers {first} and {last}. Received: a text without them"
        )
    return re.sub(f"{first}.*?{last}", lambda _: f"{first}\n{tables}\n{last}", text, flags=re.S)


def as_markdown(found: dict) -> str:
    """Writes all tables that were measured.

    Args:
        found: the result of each table's `measure`, by the table's name.
    """
    parts = []
    if "speed" in found:
        cells = found["speed"]["cells"]
        for network in speed.SHAPES:
            if any(cell["network"] == network for cell in cells):
                parts += [f"**{TITLES[network]}**", speed.as_table(cells, network)]
        if found["speed"]["missing"]:
            parts.append(
                f"Left out, because they are not installed: {', '.join(found['speed']['missing'])}."
            )
    if "memory" in found:
        parts += [
            "**Peak memory of an update, VGG-16 at 64x64, k x b**",
            memory.as_table(found["memory"]),
        ]
        one = [
            f"{figure:.0f} MiB ({way})"
            for way, figure in found["memory"]["one example"].items()
            if figure
        ]
        parts.append(
            f"Each figure includes {found['memory']['weights']:.0f} MiB for the weights and twice "
            f"that for Adam's averages. One example at once needs {' and '.join(one)} in all."
        )
    if "curve" in found:
        title = "Peak memory of the whole process, residual network at 32x32, and what trains in 1, 2 and 4 GiB"
        parts += [f"**{title}**", memory.curve_as_table(found["curve"])]
    if "first" in found:
        parts += [
            "**Time to the first update**, micro-batches of 2",
            first_update.as_table(found["first"]),
        ]
    if "whole" in found:
        parts += ["**A loss over the whole batch**, in fit", whole_batch.as_table(found["whole"])]
    if "tokens" in found:
        parts += [
            "**Texts of any length**, 256 per update, at most 2048 tokens at once",
            tokens.as_table(found["tokens"]),
        ]
    if "plan" in found:
        parts += [
            "**Planned memory of `fit` with Adam**, over what was measured",
            plan_error.as_table(found["plan"]),
        ]
    if "growth" in found:
        parts += ["**Growth of time and memory**", growth.as_table(found["growth"])]
    if "training" in found:
        parts.append(training.as_sentence(found["training"]))
    if "environment" in found:
        parts += ["**Where each table comes from**", origins_as_table(found["environment"])]
    return "\n\n".join(parts)


def origins_as_table(origins: dict[str, dict]) -> str:
    """Writes which tables come from which commit, day, versions and processor.

    Args:
        origins: what `environment` returned when a part was measured, by the part's name: that of a
            network of the speed table, or of another table.
    """
    parts_of: dict[tuple, list[str]] = {}
    for part, found in origins.items():
        where = (
            found["commit"][:10],
            found["date"][:10],
            found["tensorflow"],
            found["keras"],
            found["processor"],
        )
        parts_of.setdefault(where, []).append(part)
    lines = [
        "| tables | commit | day | TensorFlow | Keras | processor |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [f"| {', '.join(parts)} | {' | '.join(where)} |" for where, parts in parts_of.items()]
    return "\n".join(lines)
