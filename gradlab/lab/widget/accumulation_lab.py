"""AccumulationLab: controls that rerun a real training, and views that follow it.

The browser and two threads share the work, so that the notebook never freezes and an old run is
never drawn over a new one:

    the browser                draws the views, and asks for new numbers when it can draw them
                               (charts.js)
    the kernel's main thread   reacts to the controls, decides which run is the current one
                               (lab_controller.py), and answers the browser (page_messages.py);
                               JupyterLab delivers messages on other threads beside it
    the worker thread          trains the current run and stores its updates; it touches no widget
                               (runner.py)

A run that is no longer the current one is cancelled, and its remaining updates are not shown.
"""

import pathlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from gradlab import _checks, runtime
from gradlab.lab.experiments.experiment import Experiment
from gradlab.lab.experiments.jobs.cluster import cluster_of
from gradlab.lab.experiments.result import Result
from gradlab.lab.figures.shown import VIEWS, X_AXES
from gradlab.lab.widget import controls, pins, presets, runner, saved_page
from gradlab.lab.widget.lab_controller import LabController
from gradlab.lab.widget.live_run import State

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class AccumulationLab:
    """Controls that rerun a real training whenever they change, with live views of loss, noise,
    accuracy and cost.

    Args:
        seed: the first of the seeds. The same seed repeats the same run.
        hide: names of controls, buttons and views to hide.
        lock: names of controls that cannot be changed.
        rerun: whether a changed control starts a new run at once, and whether the first run starts
            when the page shows the lab. Otherwise runs start with the button Run.
        against: the horizontal axis of the accuracy plot at first: "updates", "examples" or
            "seconds".
        executor: a Dask client, whose workers train the runs; the updates come here as they are
            made, and this process never imports TensorFlow. None: train in this process, or on the
            cluster that `gradlab lab --dask ADDRESS` named.
        **preset: any field of `Experiment`, as the initial value of its control.

    Attributes:
        view: the widgets, as one ipywidgets box.

    Raises:
        ValueError: a preset is not a field of `Experiment`, or its value is not allowed; or
            `executor` is no Dask client.

    Example:
        >>> lab = AccumulationLab(accumulation_steps=10, updates=3, seeds=2, hide=("toy",))
        >>> lab
        AccumulationLab: microbatched, dense on mnist, effective batch 1 x 10 x 20 = 200
        >>> lab.run()
        >>> lab.wait().value
        'finished'
        >>> lab.result.losses.shape     # seed, update, micro-batch
        (2, 3, 10)
        >>> AccumulationLab(**lab.to_dict()).experiment == lab.experiment
        True
    """

    def __init__(
        self,
        seed: int = 0,
        hide: Sequence[str] = (),
        lock: Sequence[str] = (),
        rerun: bool = True,
        against: str = "updates",
        executor: Any = None,
        **preset: Any,
    ):
        cluster = cluster_of(executor)
        experiment = presets.experiment(seed, preset)
        self._hide, self._lock = presets.names(hide, lock)
        _checks.one_of("against", against, X_AXES)
        if cluster is None and experiment.towers > 1:  # there always is one device
            runtime.tower_devices(experiment.towers)
        self._seed = seed
        self._controller = LabController(
            experiment, seed, self._hide, self._lock, rerun, against, cluster
        )
        self._controller.connect(
            {
                "run": self.run,
                "stop": self.stop,
                "step_microbatch": self.step,
                "step_update": lambda: self.step(update=True),
                "reset": self.reset,
                "pin": self.pin,
                "csv": lambda: self._download("gradlab-runs.csv", self._csv),
                "png": lambda: self._download("gradlab-views.png", self._png),
            }
        )
        charts = self._controller.layout.charts
        waits = rerun and charts.shown and cluster is None and "tensorflow" not in sys.modules
        if waits and not saved_page.needs_kernel(experiment):
            # Two seeds leave processors for what the kernel loads
            few = replace(experiment, seeds=experiment.seed_numbers[:2])
            charts.preview = saved_page.trained(few)
            self._controller.hold()
        self.view = self._controller.layout.view
        runner.end_at_exit(self._controller)

    @property
    def experiment(self) -> Experiment:
        """The experiment that the controls describe."""
        return self._controller.experiment

    @property
    def result(self) -> Result | None:
        """The result of the current run so far, or None before its first update."""
        return self._controller.result

    @property
    def state(self) -> State:
        """The state of the current run, or `State.IDLE` without one."""
        return self._controller.state

    @property
    def status(self) -> str:
        """The status line as plain text, such as "finished: 5 seeds, update 300 of 300, ..."."""
        self._controller.show()
        status = self._controller.layout.status
        return f"{status.state}: {status.sentence}"

    @property
    def narration(self) -> str:
        """The current sentence of slow motion or of a step, or ""."""
        self._controller.show()
        return self._controller.layout.narration

    @property
    def figure(self) -> "Figure":
        """The views that are not hidden as one matplotlib figure, drawn from the present numbers.
        Its label (`get_label()`) describes them in words."""
        return self._controller.figure()

    @property
    def pinned(self) -> list[tuple[str, Result]]:
        """(name, result) of the pinned runs."""
        return self._controller.pins.runs

    def run(self, **changes: Any) -> None:
        """Train what the controls describe, from the beginning. A run under way is cancelled.

        Args:
            **changes: fields of `Experiment`, to which the controls are set first.
        """
        if changes:
            if set(changes) & set(controls.BUDGETS):
                # A new budget replaces the old one
                changes = dict.fromkeys(controls.BUDGETS) | changes
            self._controller.write(replace(self.experiment, **changes))
        self._controller.start()

    def stop(self) -> None:
        """Stop the run within a micro-batch. Its plots stay."""
        self._controller.stop()

    def pause(self, paused: bool = True) -> None:
        """Pause the run before its next update, or resume it.

        Args:
            paused: False resumes the run.
        """
        self._controller.layout.switches["pause"].value = paused

    def step(self, update: bool = False) -> None:
        """Show one more micro-batch, then pause. If there is no run, start one.

        Args:
            update: whether to show the rest of the window instead of one micro-batch.
        """
        self._controller.step(update)

    def reset(self) -> None:
        """Stop the run, restore the controls and plots to their initial state, and train that
        again if `rerun` is chosen. Pinned runs stay."""
        self._controller.reset()

    def pin(self, name: str | None = None) -> None:
        """Keep the run in the plots and in the table, for comparison with later runs.

        Args:
            name: its name there. None: k, b, and the fields that differ from the preset.
        """
        result = self.result
        if result is None:
            self.say("there is no run to pin yet: press Run")
            return
        self._controller.pin(
            name or presets.name(result.experiment, self._controller.preset), result
        )

    def say(self, sentence: str) -> None:
        """Show a sentence on the status line, after the state."""
        self._controller.say(sentence)

    def to_csv(self, folder: str | pathlib.Path = ".") -> pathlib.Path:
        """Write every micro-batch of this run and of the pinned runs to a new CSV file, and return
        its path.

        Raises:
            ValueError: there is no run yet.
        """
        return pins.write_new_file(pathlib.Path(folder), "gradlab-runs", "csv", self._csv())

    def to_png(self, folder: str | pathlib.Path = ".") -> pathlib.Path:
        """Write a picture of the views to a new PNG file, and return its path."""
        return pins.write_new_file(pathlib.Path(folder), "gradlab-views", "png", self._png())

    def _csv(self) -> bytes:
        if not self._controller.runs:
            raise ValueError(
                "there is nothing to write yet: press Run. Received: a lab without a run"
            )
        return pins.csv(self._controller.runs).encode()

    def _png(self) -> bytes:
        from gradlab.lab.figures.style import to_small_png  # here: see figures/shown.py

        return to_small_png(self.figure)

    def _download(self, name: str, content: Callable[[], bytes]) -> None:
        """Give the page a file, which the browser saves, or say why there is none."""
        try:
            self._controller.layout.charts.send({"download": name}, [content()])
            self.say(f"downloaded: {name}")
        except ValueError as error:
            self.say(f"not downloaded: {error}")

    def code(self) -> str:
        """The Python code that repeats what the controls describe."""
        return pins.code(self.experiment)

    def to_dict(self) -> dict[str, Any]:
        """The lab as a preset: `AccumulationLab(**lab.to_dict())` starts with the present
        values."""
        layout = self._controller.layout
        values = {
            name: value for name, value in asdict(self.experiment).items() if value is not None
        }
        values |= {"seeds": len(self.experiment.seed_numbers), "seed": self._seed}
        own = {"hide": list(self._hide), "lock": list(self._lock)}
        return values | own | {"rerun": layout.rerun.value, "against": layout.against.value}

    def wait(self, timeout: float = 600) -> State:
        """Wait until the run is over and shown, and return its state.

        Args:
            timeout: the most seconds to wait.

        Raises:
            RuntimeError: there is no run.
        """
        if self.state is State.IDLE:
            raise RuntimeError("AccumulationLab.wait needs a run: call run() first")
        self._controller.wait(timeout)
        return self.state

    def close(self) -> None:
        """Stop the run, wait for its threads to end, and remove the widgets from the page."""
        self._controller.end()
        self._controller.join()
        self._controller.layout.close()

    def __repr__(self) -> str:
        e = self.experiment
        return (
            f"AccumulationLab: {e.method}, {e.model} on {e.dataset}, effective batch {e.towers} x "
            f"{e.accumulation_steps} x {e.microbatch_size} = {e.effective_batch}"
        )

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widgets, and a picture and a table for pages without widgets, such as a saved
        notebook."""
        bundle = dict(self.view._repr_mimebundle_(**kwargs))
        if runs := self._controller.runs:
            table = pins.table(runs)
            picture, page = self._drawn(table)
            text = f"{self!r}\n\n{table}"
        elif set(VIEWS).difference(self._hide) == {"toy"}:  # which needs no run
            picture, still = self._drawn()
            page = self._page(without_scripts=still)
            text = repr(self)
        else:
            recorded = saved_page.recorded()
            picture, page = saved_page.recorded_picture(), self._page()
            text = f"{self!r}\n\n{recorded['sentence']}\n{recorded['table']}"
        return bundle | {"text/html": page, "image/png": picture, "text/plain": text}

    def _page(self, without_scripts: str | None = None) -> str:
        """The lab as a page that trains in the browser."""
        against = self._controller.layout.against.value
        return saved_page.page(
            self.experiment, self._hide, self._lock, against, without_scripts=without_scripts
        )

    def _drawn(self, table: str = "") -> tuple[bytes, str]:
        """The figure of the lab as PNG, and as HTML with a table of its runs."""
        from gradlab.lab.figures.style import for_any_ground, to_small_png

        figure = self.figure
        picture = to_small_png(for_any_ground(figure))
        return picture, saved_page.still(picture, str(figure.get_label()), repr(self), table)
