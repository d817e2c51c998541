"""Use an AccumulationLab as a reader of the page does: find its widgets by their CSS classes, and watch its threads."""

import threading

from events import wait_until

from gradlab import AccumulationLab
from gradlab.lab.widget.live_run import State


def widgets(lab: AccumulationLab, name: str) -> list:
    """The widgets on the page that have the CSS class "gradlab-" followed by the name."""
    found, waiting = [], [lab.view]
    while waiting:
        widget = waiting.pop(0)
        if f"gradlab-{name}" in widget._dom_classes:
            found.append(widget)
        waiting[:0] = getattr(widget, "children", ())
    return found


def widget(lab: AccumulationLab, name: str):
    """The only widget with that name."""
    [found] = widgets(lab, name)
    return found


def click(lab: AccumulationLab, name: str) -> None:
    """Press a button."""
    widget(lab, name).click()


def updates_made(lab: AccumulationLab) -> int:
    """The number of updates of the first seed in the current run."""
    result = lab.result
    return 0 if result is None else int(result.updates[0])


def run_to_the_end(lab: AccumulationLab, **changes) -> None:
    """Run the lab with these changes, and wait until the run is finished and shown."""
    lab.run(**changes)
    assert lab.wait() is State.FINISHED


def wait_for_pause(lab: AccumulationLab, narration: str = "") -> None:
    """Wait until the run waits for a step, and until the page shows this part of a narration."""
    wait_until(lambda: narration in lab.narration and lab.state is State.PAUSED)


def lab_threads() -> list[str]:
    """The names of the threads of all labs."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gradlab")]
