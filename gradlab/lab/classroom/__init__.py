"""A classroom: one server for all visitors' labs, and workers that train their runs
(`make app`)."""

import json
import os
import pathlib
import threading
import time
from typing import Any

from IPython.display import HTML, display

from gradlab.lab.classroom.limits import Limits

LIMITS = "GRADLAB_LIMITS"  # the environment variable with the limits, by which a lab finds them
STYLE = pathlib.Path(__file__).with_name("page.css")
LOOK_SECONDS = 10  # between two looks at whether the lab is used
GOODBYE_SECONDS = 2  # in which the page gets the last sentence


def lab(**preset: Any) -> Any:
    """An `AccumulationLab` whose runs the classroom's workers make; outside of a classroom, one
    that trains here."""
    import gradlab
    from gradlab.lab.experiments.jobs.cluster import DASK, cluster_at

    written = os.environ.get(LIMITS)
    if written is None:
        gradlab.setup(towers=2, seed=0)
        return gradlab.AccumulationLab(**preset)
    limits = Limits(**json.loads(written))
    cluster = cluster_at(os.environ[DASK])
    cluster.check = limits.check
    display(HTML(f"<style>{STYLE.read_text(encoding='utf-8')}</style>"))
    made = gradlab.AccumulationLab(**preset)

    def release_when_idle() -> None:
        """Ends this process, which only this visitor uses."""
        while cluster.idle_seconds < limits.idle:
            time.sleep(min(LOOK_SECONDS, limits.idle))
        made.say(
            f"released after {limits.idle / 60:g} minutes without a run: reload the page to go on"
        )
        time.sleep(GOODBYE_SECONDS)
        os._exit(0)

    threading.Thread(target=release_when_idle, name="gradlab-idle", daemon=True).start()
    return made
