"""Records the picture and the table of `saved_page`: python -m gradlab.lab.widget.record"""

import json
import pathlib

import gradlab
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.jobs.run import run
from gradlab.lab.figures.curves import Point
from gradlab.lab.figures.lab_figure import lab_views
from gradlab.lab.figures.shown import Shown
from gradlab.lab.figures.style import for_any_ground, to_small_png
from gradlab.lab.widget import pins, presets

STEPS = (1, 2, 5, 10, 20, 50)  # k of the runs


def experiment(steps: int) -> Experiment:
    """The lab's default experiment with this k."""
    return presets.experiment(0, {"accumulation_steps": steps})


def write(folder: pathlib.Path) -> None:
    """Train the runs, and write recorded.json and recorded.png to a folder."""
    results = [run(experiment(steps)) for steps in STEPS]
    default = results[STEPS.index(5)]
    e = default.experiment
    recorded = {
        "sentence": f"Recorded runs: {e.model} on {e.dataset}, {e.optimizer}, "
        f"{len(default.seeds)} seeds, {e.updates} updates. Run the notebook to train your own.",
        "table": pins.table(
            [(f"recorded, k = {r.experiment.accumulation_steps}", r) for r in results]
        ),
    }
    text = json.dumps(recorded, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    (folder / "recorded.json").write_text(text + "\n", encoding="utf-8")
    earlier = [Point.of(result) for result in results if result is not default]
    shown = Shown(e, "recorded: k = 5, b = 20", default, points=earlier)
    picture = to_small_png(for_any_ground(lab_views(shown)), colors=48)
    (folder / "recorded.png").write_bytes(picture)


if __name__ == "__main__":
    gradlab.setup(seed=0)
    write(pathlib.Path(__file__).parent)
