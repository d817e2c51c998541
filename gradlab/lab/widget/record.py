"""Records the runs of `saved_page`: python -m gradlab.lab.widget.record"""

import base64
import json
import pathlib

import numpy as np

import gradlab
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.jobs.run import run
from gradlab.lab.experiments.result import Result
from gradlab.lab.figures import toy
from gradlab.lab.figures.curves import Point
from gradlab.lab.figures.lab_figure import Shown, lab_views
from gradlab.lab.figures.style import to_small_png
from gradlab.lab.widget import one_update, page_messages, pins, presets
from gradlab.lab.widget.chart_rows import COLUMNS, ChartRows

STEPS = (1, 2, 5, 10, 20, 50)  # k of the runs
UNIT = 2.0**-12  # of the losses that are drawn as dots
MISSING = 2**16 - 1  # a dot that is not there: the last window of an epoch may be short
KEPT = ("loss", "lossDeviation", "accuracy", "accuracyDeviation", "noiseScale")  # of the columns


def experiment(steps: int) -> Experiment:
    """The lab's default experiment with this k."""
    return presets.experiment(0, {"accumulation_steps": steps})


def described(result: Result) -> dict:
    """A run as recorded.js reads it."""
    chart_rows = ChartRows.of(result)
    rows = chart_rows.rows(0)[:, [COLUMNS.index(name) for name in KEPT]]
    dots = chart_rows.dots(0)
    units = np.where(np.isfinite(dots), np.rint(dots / UNIT).clip(0, MISSING - 1), MISSING)
    return page_messages.facts(result.experiment) | {
        "counts": list(chart_rows.counts),
        "perUpdate": dots.shape[1],
        "rows": _base64(rows.astype("<f4")),
        "dots": _base64(units.astype("<u2")),
        "point": page_messages.plain(Point.of(result)),
    }


def write(folder: pathlib.Path) -> None:
    """Train the runs, and write recorded.json and recorded.png to a folder."""
    results = [run(experiment(steps)) for steps in STEPS]
    default = results[STEPS.index(5)]
    e = default.experiment
    view = one_update.OneUpdate()
    most = max(STEPS)
    noise = toy.draws()[:, :most]
    recorded = {
        "sentence": f"Recorded runs: {e.model} on {e.dataset}, {e.optimizer}, "
        f"{len(default.seeds)} seeds, {e.updates} "
        "updates. Run the notebook to train your own.",
        "table": pins.table(
            [(f"recorded, k = {r.experiment.accumulation_steps}", r) for r in results]
        ),
        "columns": list(KEPT),
        "unit": UNIT,
        "runs": [described(result) for result in results],
        "missing": MISSING,
        "toy": {
            "noise": _base64(noise.astype("<i2")),
            "constants": view.constants | {"most": most},
            "start": view.start,
            "looked_at": view.looked_at,
        },
    }
    text = json.dumps(recorded, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    (folder / "recorded.json").write_text(text + "\n", encoding="utf-8")
    earlier = [Point.of(result) for result in results if result is not default]
    shown = Shown(e, "recorded: k = 5, b = 20", default, points=earlier)
    (folder / "recorded.png").write_bytes(to_small_png(lab_views(shown), colors=48))


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


if __name__ == "__main__":
    gradlab.setup(seed=0)
    write(pathlib.Path(__file__).parent)
