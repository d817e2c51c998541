"""Predictions: the result is hidden until a choice is made, the block's variables stay, and faults
are not hidden."""

import re
import threading

import pytest
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import HTML, display
from IPython.utils.capture import capture_output

from gradlab.lab.figures.picture import Picture, figure
from gradlab.lab.widget.course.predict import ask, predict

FACTORS = ("How much?", "by 10", "by 100")
WAY = dict(right="by 10", why="Noise falls by √k & no faster.")


@pytest.fixture
def shell():
    """An IPython, as in a notebook: without one, nothing is displayed."""
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def shown(block) -> dict:
    """What a cell displays whose block is the function."""
    with capture_output() as seen, ask(*FACTORS, **WAY):
        block()
    [output] = seen.outputs
    assert seen.stdout == ""
    return output.data


def test_the_result_is_inside_each_choice_and_nowhere_else(shell):
    page = shown(lambda: print("it fell < by 10.0"))["text/html"]
    choices = re.findall(
        r"<details[^>]*><summary[^>]*>(.*?)</summary>(.*?)</details>", page, flags=re.S
    )
    assert [name for name, _ in choices] == ["by 10", "by 100"]
    for _, inside in choices:
        assert (
            "<pre>it fell &lt; by 10.0</pre>" in inside
            and "Noise falls by √k &amp; no faster." in inside
        )
    assert "This is right." in choices[0][1] and "The result is: <b>by 10</b>." in choices[1][1]
    outside = re.sub(r"<details.*</details>", "", page, flags=re.S)
    assert "How much?" in outside and "fell" not in outside and "Noise" not in outside
    assert "<script" not in page and "open>" not in page


def test_figures_and_values_are_results_too(shell):
    def block():
        drawn, axes = figure()
        axes.plot([1, 2])
        display(Picture(drawn, alt="a line that rises"))
        display(HTML("<table><tr><td>7</td></tr></table>"))
        display(13)

    data = shown(block)
    assert data["text/html"].count('<img alt="a line that rises"') == 2
    assert (
        data["text/html"].count("<td>7</td>") == 2 and data["text/html"].count("<pre>13</pre>") == 2
    )
    assert "a line that rises" in data["text/plain"] and "13" in data["text/plain"]


def test_the_text_has_it_all(shell):
    assert shown(lambda: print("10.0"))["text/plain"] == (
        "Predict: How much?\n    by 10 / by 100\nResult:\n    10.0\nAnswer: by 10. Noise falls by "
        "√k & no faster."
    )


def test_a_fault_is_raised_after_what_came_before_it(capsys):
    with pytest.raises(ZeroDivisionError), ask(*FACTORS, **WAY):
        print("so far")
        1 / 0  # noqa: B018
    assert capsys.readouterr().out == "so far\n"


class KernelsPublisher(DisplayPublisher):
    """What a kernel asks of its publisher for each message, beside what IPython's own one does."""

    def __init__(self):
        super().__init__()
        self.heard, self.published = [], []

    def set_parent(self, parent):
        self.heard.append(parent)

    def publish(self, data, **more):
        self.published.append(data)


def test_while_a_block_runs_the_kernel_handles_messages(shell, monkeypatch):
    """A message on another thread reaches the kernel's own publisher, and what it displays is no
    part of the result."""
    real = KernelsPublisher()
    monkeypatch.setattr(shell, "display_pub", real)

    def handle():
        shell.display_pub.set_parent("a message")
        shell.display_pub.publish({"text/plain": "of the message"})

    with ask(*FACTORS, **WAY):
        message = threading.Thread(target=handle)
        message.start()
        message.join()
        display("of the block")
    assert real.heard == ["a message"] and shell.display_pub is real
    of_the_message, result = real.published
    assert of_the_message == {"text/plain": "of the message"}
    assert "of the block" in result["text/plain"] and "message" not in result["text/plain"]


def test_warnings_are_not_hidden(capsys):
    import sys

    with ask(*FACTORS, **WAY):
        print("careful", file=sys.stderr)
    assert "careful" in capsys.readouterr().err


@pytest.mark.parametrize(
    "choices, right, sentence",
    [
        (("one",), "one", r"choices must be two or more different answers. Received: \('one',\)"),
        (("one", "one"), "one", "choices must be two or more different answers"),
        (("one", "two"), "three", "right must be one of .*Received: 'three'"),
    ],
)
def test_bad_input_gets_a_sentence_before_the_block_runs(choices, right, sentence):
    with pytest.raises(ValueError, match=sentence), ask("?", *choices, right=right, why=""):
        raise AssertionError("it ran")


def test_a_question_of_the_course_is_found_by_its_name():
    with pytest.raises(ValueError, match="name must be one of .*Received: 'unknown'"):
        predict("unknown")
