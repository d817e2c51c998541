"""A classroom: one server for all visitors' labs, and trainers that they share (`make app`)."""

from typing import Any

from gradlab.lab.classroom.visitor import executor


def lab(**preset: Any) -> Any:
    """An `AccumulationLab` whose runs the classroom's trainers make; outside of a classroom, one that trains here."""
    import gradlab

    shared = executor()
    if shared is None:
        gradlab.setup(towers=2, seed=0)
    return gradlab.AccumulationLab(executor=shared, downloads=shared is not None, **preset)
