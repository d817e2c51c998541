"""BugLab: a game of finding the bug in an accumulation loop. Each round hides one of eight."""

import html
from dataclasses import fields
from typing import Any

import ipywidgets as widgets
import numpy as np

from gradlab import _checks
from gradlab.lab.figures.style import to_small_png
from gradlab.lab.widget import saved_page
from gradlab.lab.widget.course.bug_code import listing
from gradlab.lab.widget.course.bug_figures import draw, draw_large, rows, table, verdict
from gradlab.lab.widget.course.bug_loops import Evidence, experiment, is_clear
from gradlab.lab.widget.course.bugs import (
    BUGS,
    EVERYTHING,
    MEASURES,
    OPTIMIZERS,
    STEPS,
    SWITCHES,
    Bug,
    Settings,
)
from gradlab.lab.widget.page import Page, close, live_beside_cells

# Points for a bug that is found with one experiment; each further experiment costs one, down to one
# point
BEST = 5

_HELP = {
    "optimizer": "Rule by which a gradient changes the weight.",
    "k": "Micro-batches of a full window.",
    "measure": "What the experiment records: the weight after each window, or the texts in memory.",
    "ragged": "The last window of each epoch is short, and its last micro-batch has one text.",
    "unequal": "Texts have one to eight tokens, and not four each.",
    "clipping": "Gradients above 3 are shortened to 3.",
    "schedule": "The learning rate falls to 0 during the training.",
    "normalization": "Inputs are normalized by the mean and the variance of the batch.",
}
_INTRODUCTION = (
    "Choose what the next experiment switches on, and run it. Each experiment after the first "
    "costs a point."
)
_CSS = """<style>
.gradlab-bugs :focus-visible { outline: 2px solid #0072B2; outline-offset: 1px; }
.gradlab-bugs .widget-html-content { line-height: 1.5; }
.gradlab-bugs table { border-collapse: collapse; margin: 0.3em 0; }
.gradlab-bugs th, .gradlab-bugs td { padding: 0 0.7em; text-align: right; border-bottom: 1px solid #8888; }
.gradlab-bugs pre { margin: 0; padding: 4px 8px; line-height: 1.35; border: 1px solid #8888; border-radius: 4px; }
.gradlab-bugs pre :is(mark, b) { background: #D55E00; color: #ffffff; }
.gradlab-bugs .gradlab-beside { display: flex; flex-wrap: wrap; gap: 0 1.5em; align-items: center; }
.gradlab-bugs .gradlab-beside img { max-width: 100%; }
</style>"""


def points(experiments: int) -> int:
    """The points for a right answer after so many experiments.

    >>> [points(number) for number in (1, 2, 5, 9)]
    [5, 4, 1, 1]
    """
    _checks.positive_integer("experiments", experiments)
    return max(1, BEST + 1 - experiments)


class Game:
    """The rounds of the game, without widgets.

    Args:
        seed: the same seed hides the same bugs in the same order.

    Attributes:
        round: the number of this round, from 1.
        score: the points so far.
        hidden: the bug of this round. A player does not look.
        data_seed: the seed of this round's data.
        tried: the outcomes of this round's experiments. An experiment that is repeated counts once.
        answer: the bug that was named in this round, or None.
    """

    def __init__(self, seed: int = 0):
        _checks.natural_number("seed", seed)
        self._rng = np.random.default_rng(seed)
        self.round = 0
        self.score = 0
        self.hidden = ""
        self.data_seed = 0
        self.tried: dict[tuple[Settings, str], Evidence] = {}
        self.answer: str | None = None
        self.next_round()

    def next_round(self) -> None:
        """Hide a bug, other than that of the last round, in a loop with new data."""
        self.hidden = str(self._rng.choice([bug for bug in BUGS if bug != self.hidden]))
        self.data_seed = int(self._rng.integers(2**31))
        while not is_clear(self.data_seed):
            self.data_seed += 1
        self.round += 1
        self.tried = {}
        self.answer = None

    def experiment(self, settings: Settings, measure: str = "weight") -> Evidence:
        """Train the loop with the hidden bug and the large batch.

        Args:
            settings: what is switched on.
            measure: "weight" or "memory".
        """
        if self.answer is not None or (settings, measure) in self.tried:
            return experiment(settings, measure, self.hidden, self.data_seed)
        return self.tried.setdefault(
            (settings, measure), experiment(settings, measure, self.hidden, self.data_seed)
        )

    def name(self, bug: str) -> str:
        """Name the hidden bug, which ends the round, and return what is said to the player.

        Raises:
            ValueError: there is no such bug, no experiment was run yet, or the round is over.
        """
        _checks.one_of("bug", bug, BUGS)
        if self.answer is not None or not self.tried:
            rule = "bug must be named once in a round, after an experiment"
            raise ValueError(f"{rule}. Received: {bug!r} after {len(self.tried)} experiments")
        self.answer = bug
        hidden = BUGS[self.hidden]
        if bug == self.hidden:
            won = points(len(self.tried))
            self.score += won
            many = f"{len(self.tried)} experiment{'s' * (len(self.tried) > 1)}"
            said = f"Right, {_spoken(hidden)}: {won} point{'s' * (won > 1)} for {many}."
        else:
            said = f"No, not {_spoken(BUGS[bug])}: this loop has {_spoken(hidden)}."
        return f"{said} {hidden.does} {hidden.found}"


def _spoken(bug: Bug) -> str:
    """A bug's name inside a sentence: "bug 7, batch normalization"."""
    return f"bug {bug.name.replace('. ', ', ')}"


class BugLab:
    """A game: each round hides one of eight bugs in a training loop, and you find it by
    experiments.

    Args:
        seed: the same seed hides the same bugs in the same order.

    Attributes:
        game: the rounds and the score.
        controls: the widgets by name: "optimizer", "k", "measure", the switches, "run", "bug",
            "name" and "next".
        view: all widgets in one box.
        said: the last sentence that the player was told.

    Raises:
        ValueError: the seed is not an integer of 0 or more.
    """

    def __init__(self, seed: int = 0):
        self.game = Game(seed)
        self._seed = seed
        self.controls: dict[str, Any] = _settings_controls() | _game_controls()
        self._header, self._result, self._said, self._tried = (widgets.HTML() for _ in range(4))
        self._code = widgets.HTML()
        self.controls["run"].on_click(lambda _: self.run())
        self.controls["name"].on_click(lambda _: self.name())
        self.controls["next"].on_click(lambda _: self.next_round())
        self.controls["bug"].observe(lambda _: self._show_code(), names="value")
        self.view = self._layout()
        live_beside_cells(self.view)
        self._shown: Evidence | None = None
        self._begin()

    def run(self) -> Evidence:
        """Run the experiment that the controls describe, and show it."""
        settings = Settings(
            **{field.name: self.controls[field.name].value for field in fields(Settings)}
        )
        self._shown = self.game.experiment(settings, self.controls["measure"].value)
        self._result.value = f'<div class="gradlab-beside">{_html(self._shown)}</div>'
        self._say(f"{settings}: {verdict(self._shown)}")
        return self._shown

    def name(self) -> str:
        """Name the chosen bug, and show whether it is right."""
        bug = self.controls["bug"].value
        if not bug:
            self._say("Choose one of the eight bugs first.")
        elif self.game.answer is not None:
            self._say("This round is over. Press Next round.")
        elif not self.game.tried:
            self._say("Run at least one experiment before you name the bug.")
        else:
            self._say(self.game.name(bug))
            self._show_code()
        return self.said

    def next_round(self) -> None:
        """Begin the next round. A round without an answer brings no points."""
        self.game.next_round()
        self._shown = None
        self.controls["bug"].value = ""
        self._begin()

    def close(self) -> None:
        """Remove all widgets from the page and from the kernel."""
        close(self.view)

    def _begin(self) -> None:
        large = experiment(Settings(), seed=self.game.data_seed)
        self._result.value = draw_large(large)._repr_mimebundle_()["text/html"]
        self._say(_INTRODUCTION)
        self._show_code()

    def _show_code(self) -> None:
        """Show the right loop, with the line of the chosen bug marked; after the answer, with the
        line that was wrong."""
        hidden = self.game.hidden if self.game.answer is not None else ""
        where = "with its bug" if hidden else "as it should be; one line differs in yours"
        self._code.value = f"The loop {where}:{listing(self.controls['bug'].value, hidden)}"

    def _say(self, sentence: str) -> None:
        self.said = sentence
        self._said.value = f'<div role="status">{html.escape(sentence)}</div>'
        game = self.game
        self._header.value = (
            f"<b>Round {game.round}</b> · score <b>{game.score}</b> · experiments {len(game.tried)}"
        )
        seen = "".join(
            f"<li>{html.escape(str(settings))}, {measure}: {html.escape(_short(evidence))}</li>"
            for (settings, measure), evidence in game.tried.items()
        )
        self._tried.value = f"Experiments of this round:<ol>{seen}</ol>" if seen else ""

    def _layout(self) -> widgets.Widget:
        controls = self.controls
        parts = [
            widgets.HTML(_CSS),
            Page(layout={"display": "none"}),
            self._header,
            _row([controls[name] for name in ("optimizer", "k", "measure")]),
            _row([controls[name] for name in SWITCHES]),
            _row([controls["run"]]),
            self._result,
            self._said,
            self._tried,
            _row([controls[name] for name in ("bug", "name", "next")]),
            self._code,
        ]
        return widgets.VBox(parts).add_class("gradlab-lab").add_class("gradlab-bugs")

    def __repr__(self) -> str:
        game = self.game
        return f"BugLab: round {game.round}, score {game.score}, experiments {len(game.tried)}, seed {self._seed}"

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widgets, and the last experiment for pages without widgets: before the first one, an
        example."""
        evidence = self._shown or Game(self._seed).experiment(EVERYTHING)
        sentence = f"{self!r}. Experiment: {evidence.settings}. {verdict(evidence)}"
        picture = draw(evidence)
        content = to_small_png(picture.figure)
        page = saved_page.still(content, picture.alt, sentence, table(evidence))
        text = f"{sentence}\n\n{table(evidence)}\n\nRun the notebook to play."
        bundle = dict(self.view._repr_mimebundle_(**kwargs))
        return bundle | {"text/html": page, "image/png": content, "text/plain": text}


def _settings_controls() -> dict[str, Any]:
    lists: dict[str, tuple] = {"optimizer": OPTIMIZERS, "k": STEPS, "measure": MEASURES}
    made: dict[str, Any] = {
        name: widgets.Dropdown(options=options) for name, options in lists.items()
    }
    made |= {name: widgets.Checkbox(False, indent=False) for name in SWITCHES}
    for name, widget in made.items():
        widget.description = SWITCHES.get(name, name)
        widget.tooltip = _HELP[name]
        widget.style = {"description_width": "initial"}
        widget.layout = {"width": "auto", "margin": "2px 12px 2px 2px"}
        widget.add_class(f"gradlab-{name}")
    made["k"].value = Settings().k
    return made


def _game_controls() -> dict[str, Any]:
    bugs = widgets.Dropdown(
        options=[("choose one of eight", ""), *((bug.name, name) for name, bug in BUGS.items())]
    )
    bugs.description = "the bug is"
    bugs.style = {"description_width": "initial"}
    bugs.tooltip = "Your answer."
    made: dict[str, Any] = {"bug": bugs}
    buttons = {
        "run": ("Run experiment", "flask", "Train the loop and the large batch."),
        "name": ("Name the bug", "bug", "Give your answer, which ends the round."),
        "next": ("Next round", "step-forward", "Hide another bug."),
    }
    for name, (label, icon, tooltip) in buttons.items():
        made[name] = widgets.Button(
            description=label, icon=icon, tooltip=tooltip, layout={"width": "auto"}
        )
    for name, widget in made.items():
        widget.add_class(f"gradlab-{name}")
    return made


def _row(children: list) -> widgets.Widget:
    return widgets.Box(children, layout={"flex_flow": "row wrap", "align_items": "center"})


def _short(evidence: Evidence) -> str:
    if evidence.measure == "memory":
        return f"at most {evidence.loop.max()} texts"
    return "equal" if evidence.equal else "different"


def _html(evidence: Evidence) -> str:
    """An experiment's picture and table."""
    cells = rows(evidence)
    tags = ["th", *["td"] * len(cells)]
    lines = [
        "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
        for tag, row in zip(tags, cells)
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"{draw(evidence)._repr_mimebundle_()['text/html']}<table>{body}</table>"
