"""predict: a question before a result. The reader chooses an answer, and only then sees the result
and the reason."""

import contextlib
import functools
import html
import pathlib
import textwrap
import threading
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.getipython import get_ipython
from IPython.display import display
from IPython.utils.capture import CapturedIO, capture_output

from gradlab import _checks

# In command mode, JupyterLab takes the keys that open a choice, unless the element that has the
# focus says otherwise.
SUPPRESS = "data-lm-suppress-shortcuts"
_STYLE = """<style>
.gradlab-predict { max-width: 50em; margin: 0.5em 0; padding: 0.5em 0.8em; border-left: 4px solid #0072B2; }
.gradlab-predict summary { cursor: pointer; padding: 0.1em 0.3em; }
.gradlab-predict:has(details[open]) details:not([open]) { opacity: 0.6; }
.gradlab-predict img { max-width: 100%; }
</style>"""


def predict(name: str) -> contextlib.AbstractContextManager[None]:
    """Asks a question of the course, as `ask` does. Its answer is in the folder predictions, so no
    notebook shows it.

    Args:
        name: the name of the question.

    Raises:
        ValueError: there is no question of this name.
    """
    questions = _questions()
    _checks.one_of("name", name, questions)
    asked = questions[name]
    return ask(asked["question"], *asked["choices"], right=asked["right"], why=asked["why"])


@functools.cache
def _questions() -> dict[str, dict]:
    found: dict[str, dict] = {}
    for file in sorted((pathlib.Path(__file__).parent / "predictions").glob("*.toml")):
        found |= tomllib.loads(file.read_text(encoding="utf-8"))
    return found


@contextlib.contextmanager
def ask(question: str, *choices: str, right: str, why: str) -> Iterator[None]:
    """Asks for a prediction, and shows what the block prints and displays only after the reader has
    chosen.

    The block runs when the cell runs, so its variables can be used in later cells. The choices are
    HTML that works without a kernel and without scripts, by mouse and by keyboard. Where there is
    no HTML, the question, the result and the reason are text.

    Args:
        question: what to predict.
        *choices: two or more answers.
        right: the choice that the result shows to be right.
        why: the reason, in a sentence.

    Raises:
        ValueError: there are fewer than two choices, two are equal, or `right` is none of them.

    Example:
        >>> with ask("What is 7 times 6?", "13", "42", right="42", why="Seven sixes are 42."):
        ...     print(7 * 6)
        Predict: What is 7 times 6?
            13 / 42
        Result:
            42
        Answer: 42. Seven sixes are 42.
    """
    if len(set(choices)) != len(choices) or len(choices) < 2:
        raise ValueError(f"choices must be two or more different answers. Received: {choices}")
    _checks.one_of("right", right, choices)
    seen = CapturedIO(None, None)
    try:
        with _captured() as seen:
            yield
    except BaseException:
        seen.show()  # what came before the fault helps to find it
        raise
    display(Prediction(question, choices, right, why, seen))


@contextlib.contextmanager
def _captured() -> Iterator[CapturedIO]:
    """Captures what the block prints and displays, while the kernel goes on to answer the page."""
    shell: Any = get_ipython()
    real = None if shell is None else shell.display_pub
    with capture_output(stderr=False) as seen:
        if shell is not None:
            shell.display_pub = _Publisher(real, shell.display_pub.outputs)
        yield seen


class _Publisher(CapturingDisplayPublisher):
    """Keeps what one thread displays. The kernel's own publisher does everything else.

    While a cell runs, JupyterLab's kernel handles messages of widgets on other threads. For each
    message, it calls methods of its publisher that IPython's capturing one does not have, and would
    lose the message.

    Args:
        real: the kernel's own publisher.
        outputs: the list for what this thread displays.
    """

    def __init__(self, real: Any, outputs: list):
        super().__init__()
        self._real = real
        self._thread = threading.get_ident()
        self.outputs = outputs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # also while `_real` is not set yet
        return getattr(self._real, name)

    def publish(self, *arguments: Any, **more: Any) -> None:
        if threading.get_ident() == self._thread:
            super().publish(*arguments, **more)
        else:
            self._real.publish(*arguments, **more)


class Prediction:
    """A question with its choices, the result and the reason."""

    def __init__(
        self, question: str, choices: Sequence[str], right: str, why: str, seen: CapturedIO
    ) -> None:
        self._question = question
        self._choices = choices
        self._right = right
        self._why = why
        self._seen = seen

    def _results(self) -> list[dict[str, Any]]:
        """What was printed and displayed, each as a dictionary by MIME type."""
        printed = [{"text/plain": self._seen.stdout.rstrip("\n")}] if self._seen.stdout else []
        return printed + [output.data for output in self._seen.outputs]

    def _said(self, choice: str) -> str:
        """What is said first to a reader who chose this, as HTML."""
        right = (
            "This is right."
            if choice == self._right
            else f"The result is: <b>{html.escape(self._right)}</b>."
        )
        return f"You said: <b>{html.escape(choice)}</b>. {right}"

    def __repr__(self) -> str:
        results = "\n".join(result["text/plain"] for result in self._results())
        return (
            f"Predict: {self._question}\n{_indented(' / '.join(self._choices))}\n"
            f"Result:\n{_indented(results)}\n"
            f"Answer: {self._right}. {self._why}"
        )

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        results = "".join(map(_html, self._results()))
        why = html.escape(self._why)
        parts = [
            f"<details {SUPPRESS}><summary {SUPPRESS}>{html.escape(choice)}</summary>"
            f"<p>{self._said(choice)}</p>{results}<p>{why}</p></details>"
            for choice in self._choices
        ]
        question = f"<p><b>Predict, then choose:</b> {html.escape(self._question)}</p>"
        return {
            "text/html": f'<div class="gradlab-predict">{question}{"".join(parts)}</div>{_STYLE}',
            "text/plain": repr(self),
        }


def _indented(text: str) -> str:
    return textwrap.indent(text, "    ")


def _html(result: dict[str, Any]) -> str:
    """One result as HTML."""
    if "text/html" in result:
        return result["text/html"]
    if "image/png" in result:
        alternative = html.escape(result["text/plain"], quote=True)
        return f'<img alt="{alternative}" src="data:image/png;base64,{result["image/png"]}">'
    return f"<pre>{html.escape(result['text/plain'])}</pre>"
