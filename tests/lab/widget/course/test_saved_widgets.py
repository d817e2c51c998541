"""Memory bars and timelines on pages without a kernel: what their JavaScript draws, against Python."""

import json
import pathlib
import random
import re
import subprocess
import sys

import pytest

from gradlab.lab.widget.course import memory_bars, timeline
from gradlab.lab.widget.course.memory_bars import CHOICES, LIMITS, PARAMETERS, MemoryBars
from gradlab.lab.widget.course.memory_count import PRESETS
from gradlab.lab.widget.course.schedules import NAMES
from gradlab.lab.widget.course.timeline import Timeline

COURSE = pathlib.Path(memory_bars.__file__).parent
DENO = pathlib.Path(sys.executable).with_name("deno")
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


def drawn(module: str, call: str, cases: list, facts: dict) -> list[str]:
    """What a function of a file returns for each case, in a JavaScript engine."""
    program = (
        f'import * as page from "file://{COURSE / module}";\n'
        f"const facts = {json.dumps(facts)};\n"
        f"console.log(JSON.stringify({json.dumps(cases)}.map((each) => page.{call})));\n"
    )
    command = [DENO, "run", "--allow-read", "-"]
    done = subprocess.run(command, input=program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_same(page: str, python: str, unit: float) -> None:
    """The same words, shapes and colors, and each number to a unit of its last digit: Python
    rounds a half to even, and JavaScript rounds it up."""
    assert NUMBER.sub("#", page) == NUMBER.sub("#", python)
    for found, wanted in zip(NUMBER.findall(page), NUMBER.findall(python)):
        found, wanted = (float(each.replace(",", "")) for each in (found, wanted))
        assert abs(found - wanted) <= unit * (1 + 1e-9), (found, wanted)


@pytest.fixture(scope="module")
def draw():
    return random.Random(0)


def test_the_bars_are_those_of_python(draw):
    some = []
    for _ in range(150):
        preset = draw.choice(list(PRESETS))
        settings = {name: draw.choice(choices) for name, choices in CHOICES.items()}
        settings |= {
            "parameters": draw.choice(PARAMETERS),
            "checkpointing": draw.random() < 0.5,
        }
        some.append(MemoryBars(preset, draw.choice(LIMITS), **settings))
    some += [MemoryBars(preset, limit) for preset in PRESETS for limit in LIMITS]
    cases = [[memory_bars.asdict(bars.training), bars.limit] for bars in some]
    pages = drawn("memory_bars.js", "memoryPage(...each, facts)", cases, memory_bars.facts())
    endings = set()
    for page, bars in zip(pages, some):
        assert_same(page, memory_bars.page(bars.training, bars.limit), 1)
        endings.add(page.split(". ")[-1][:12])
    assert len(endings) >= 5  # several kinds of advice
    assert sum("measured" in page for page in pages) == len(LIMITS)


def test_the_timelines_are_those_of_python(draw):
    cases = []
    for _ in range(150):
        cases.append({
            "schedule": draw.choice(list(NAMES)), "devices": draw.randint(1, 16),
            "microbatches": draw.randint(1, 32), "backward": draw.choice([0.5, 1, 1.5, 2, 4]),
            "megabytes": draw.choice([10, 400, 2000]), "gigabits": draw.randint(1, 100),
        })  # fmt: skip
    pages = drawn("timeline.js", "timelinePage(each, facts)", cases, timeline.facts())
    for page, case in zip(pages, cases):
        widget = Timeline(**case)
        python = f"<div>{widget._drawing.value}{widget._words.value}</div>"
        assert_same(page, python, 0.1)


@pytest.mark.parametrize("widget", [MemoryBars(), Timeline("1f1b")])
def test_the_controls_of_a_saved_page_are_those_of_the_widget(widget):
    page = widget._repr_mimebundle_()["text/html"]
    [facts] = re.findall(r"show\w+\(root, (\{.*\})\);", page)
    told = {each["name"]: each for each in json.loads(facts)["controls"]}
    assert told.keys() == widget.controls.keys()
    for name, control in widget.controls.items():
        values = [value for _, value in told[name]["options"]]
        assert told[name]["value"] == control.value and control.value in values
        assert told[name]["label"] == control.description
        if hasattr(control, "max"):
            assert (values[0], values[-1]) == (control.min, control.max)
    assert len(page) < 60_000 and "http" not in page.replace("http://www.w3.org/2000/svg", "")
