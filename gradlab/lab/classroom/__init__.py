"""A classroom: one server for all visitors' labs, and trainers that they share (`make app`)."""

import os
import pathlib
import time
from typing import Any

from IPython.display import HTML, display

from gradlab.lab.classroom.visitor import executor

STYLE = pathlib.Path(__file__).with_name("page.css")
GOODBYE_SECONDS = 2  # in which the page gets the last sentence


def lab(**preset: Any) -> Any:
    """An `AccumulationLab` whose runs the classroom's trainers make; outside of a classroom, one
    that trains here."""
    import gradlab

    shared = executor()
    if shared is None:
        gradlab.setup(towers=2, seed=0)
        return gradlab.AccumulationLab(**preset)
    display(HTML(f"<style>{STYLE.read_text(encoding='utf-8')}</style>"))
    made = gradlab.AccumulationLab(executor=shared, downloads=True, **preset)

    def release(seconds: float) -> None:
        """Ends this process, which only this visitor uses."""
        made.say(f"released after {seconds / 60:g} minutes without a run: reload the page to go on")
        time.sleep(GOODBYE_SECONDS)
        os._exit(0)

    shared.on_idle = release
    return made
