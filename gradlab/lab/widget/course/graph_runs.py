"""What happens in runs of a static graph: which boxes run when, what passes between them, and how
variables change."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from gradlab.drawing.graph_boxes import Box, changed_inputs
from gradlab.lab.widget.course import graph_layout


@dataclass(frozen=True)
class FilmStep:
    """What one step of a run shows.

    Attributes:
        run: what the run is called.
        number, of: the step of the run, from 1, and how many it has.
        now: the boxes that run in this step.
        done: the boxes that ran before it.
        fed: what Python gives to boxes, as text, by the box.
        passed: what the arrows of the run carry so far, as text, by the boxes (from, to).
        fetched: what Python gets from boxes.
        variables: the values of the variables after this step.
        written: the variables that boxes of this step change.
        arrows: the arrows to the boxes of this step, and from them to variables, as (from, to).
    """

    run: str
    number: int
    of: int
    now: list[str]
    done: list[str]
    fed: Mapping[str, str]
    passed: Mapping[tuple[str, str], str]
    fetched: Mapping[str, str]
    variables: Mapping[str, str]
    written: list[str]
    arrows: set[tuple[str, str]]

    @property
    def words(self) -> str:
        """The step as a sentence or two."""
        said = [f"{self.run}, step {self.number} of {self.of}: {_listed(self.now)}"]
        said += [
            f"Python feeds {name} {'of' if value.startswith('shape') else '='} {value}"
            for name, value in self.fed.items()
            if name in self.now
        ]
        said += [f"{name} is now {self.variables[name]}" for name in self.written]
        said += [
            f"Python gets {value} from {name}"
            for name, value in self.fetched.items()
            if name in self.now or (name in self.variables and self.number == self.of)
        ]
        return ". ".join(said) + "."


class FilmedSession:
    """A session, with the boxes of its graph and their variables.

    Args:
        session: the session.
        boxes: the boxes that are drawn, by name.

    Raises:
        ValueError: boxes that `GraphFilm` refuses.
    """

    def __init__(self, session: tf.compat.v1.Session, boxes: Mapping[str, Box]):
        self._session = session
        self._boxes = boxes
        self._home = {op.name: name for name, box in boxes.items() for op in box.operations}
        graph = session.graph
        if any(op.graph is not graph for box in boxes.values() for op in box.operations):
            raise ValueError("expand must name scopes: a film shows no loop and no function inside")
        known = {
            each.op.name: each
            for key in graph.collections
            for each in graph.get_collection(key)
            if isinstance(each, tf.Variable)
        }
        self._variables = {}
        for name, box in boxes.items():
            if "variable" not in box.types:
                continue
            if name not in known or len(box.types) > 1:
                raise ValueError(
                    "each variable must be in a collection and have a box of its own: expand its "
                    f"scope. Received: {name!r} with {box.kind}"
                )
            self._variables[name] = known[name]

    def steps(self, run: str, fetches: Any, feed: Mapping | None) -> list[FilmStep]:
        """Make a run, and say what each of its steps shows."""
        graph = self._session.graph
        elements = [
            graph.as_graph_element(each)
            for each in tf.nest.flatten(fetches, expand_composites=True)
        ]
        fed = {graph.as_graph_element(each): value for each, value in (feed or {}).items()}
        part = RunPart(self._home, self._variables, elements, {tensor.name for tensor in fed})
        for name in part.written_by:
            if len(part.written_by[name]) > 1:
                raise ValueError(
                    "each variable must be written by one box of a run: make several runs. Received: "
                    f"{name} in {run!r}, written by {', '.join(part.written_by[name])}"
                )
        levels = {name: part.levels[name] for name in self._boxes if name in part.levels}
        if not levels:
            raise ValueError(f"a run must run a box that is drawn. Received: {run!r}")
        before = self._values()
        _, passed, results = self._session.run(
            [elements, part.passed, _by_box(self._home, elements)], feed
        )
        after = self._values()
        given: dict[str, list] = {}
        for tensor, value in fed.items():
            if tensor.op.name in self._home:
                given.setdefault(self._home[tensor.op.name], []).append(value)
        last = max(levels.values())
        variables, steps = before, []
        for level in range(last + 1):
            now = [name for name in levels if levels[name] == level]
            seen = [name for name in levels if levels[name] <= level]
            written = [
                name for name in self._variables if {*part.written_by.get(name, ())} & {*now}
            ]
            variables = variables | {name: after[name] for name in written}
            if level == last:  # also what boxes that are not drawn have written
                variables = after
                seen += self._variables
            steps.append(
                FilmStep(
                    run=run,
                    number=level + 1,
                    of=last + 1,
                    now=now,
                    done=[name for name in levels if levels[name] < level],
                    fed={name: _several(given[name]) for name in seen if name in given},
                    passed={
                        arrow: _several(found)
                        for arrow, found in passed.items()
                        if arrow[0] in levels and levels[arrow[0]] <= level and found
                    },
                    fetched={name: _several(results[name]) for name in seen if results.get(name)},
                    variables=variables,
                    written=written,
                    arrows={
                        (source, target)
                        for source, target in part.arrows
                        if (source if target in self._variables else target) in now
                    },
                )
            )
        return steps

    def _values(self) -> dict[str, str]:
        """The values of the variables, as text."""
        try:
            values = self._session.run(self._variables)
        except tf.errors.FailedPreconditionError:
            names = ", ".join(self._variables)
            raise ValueError(
                "all variables must be initialized before the runs. Received: one that is not, among "
                f"{names}"
            ) from None
        return {name: _short(value) for name, value in values.items()}


class RunPart:
    """The part of a graph that a run needs.

    Args:
        home: the box of each operation, by their names. The others are not drawn.
        variables: the boxes that are variables.
        fetched: the tensors and operations that are asked for.
        fed: the names of the tensors that Python gives.

    Attributes:
        levels: for each box that runs or is fed, how many run before it, one after the other.
        written_by: for each variable, the boxes that change it.
        passed: for each arrow (from, to) between two boxes, the tensors that it carries.
        arrows: all arrows that are used, those from and to variables included.
    """

    def __init__(
        self, home: Mapping[str, str], variables: Mapping[str, Any], fetched: list, fed: set[str]
    ):
        self._home = home
        self._variables = variables
        self._fed = fed
        self.written_by: dict[str, list[str]] = {}
        self.passed: dict[tuple[str, str], list[tf.Tensor]] = {}
        self.arrows: set[tuple[str, str]] = set()
        needed = self._needed(fetched)
        before: dict[str, dict[str, None]] = {
            home[tensor.op.name]: {}
            for op in needed
            for tensor in op.inputs
            if tensor.name in fed and tensor.op.name in home
        }
        for op in needed:
            if (name := home.get(op.name)) is None or name in variables or op.type == "Const":
                continue
            before.setdefault(name, {}).update(dict.fromkeys(self._boxes_before(op)))
            before[name].pop(name, None)
            self._arrows_to(op, name)
        self.levels = graph_layout.longest({name: [*others] for name, others in before.items()})

    def _needed(self, fetched: list) -> list[tf.Operation]:
        """All operations that run: those that are asked for, and what these need. What is fed needs
        nothing."""
        new = [getattr(each, "op", each) for each in fetched if each.name not in self._fed]
        found: dict[str, tf.Operation] = {}
        while new:
            op = new.pop()
            if op.name not in found:
                found[op.name] = op
                new += [tensor.op for tensor in op.inputs if tensor.name not in self._fed]
                new += op.control_inputs
        return list(found.values())

    def _boxes_before(self, op: tf.Operation) -> list[str]:
        """The boxes that an operation waits for, also through operations without a box."""
        found: dict[str, None] = {}
        seen = {op.name}
        new = [op]
        while new:
            op = new.pop()
            for tensor in op.inputs:
                if tensor.name in self._fed and tensor.op.name in self._home:
                    found[self._home[tensor.op.name]] = None
            others = [tensor.op for tensor in op.inputs if tensor.name not in self._fed]
            for other in [*others, *op.control_inputs]:
                name = self._home.get(other.name)
                if name is not None and name not in self._variables and other.type != "Const":
                    found[name] = None
                elif other.name not in seen:
                    seen.add(other.name)
                    new.append(other)
        return list(found)

    def _arrows_to(self, op: tf.Operation, name: str) -> None:
        """Note what an operation of a box takes in and writes."""
        changed = changed_inputs(op)
        for number, tensor in enumerate(op.inputs):
            source = self._home.get(tensor.op.name)
            if source is None or source == name:
                continue
            if number in changed:
                self.written_by[source] = [*dict.fromkeys([*self.written_by.get(source, []), name])]
                self.arrows.add((name, source))
                continue
            self.arrows.add((source, name))
            carried = self.passed.setdefault((source, name), [])
            is_new = tensor.name not in {each.name for each in carried}
            if is_new and tensor.dtype not in (tf.resource, tf.variant):
                carried.append(tensor)


def _by_box(home: Mapping[str, str], elements: list) -> dict[str, list[tf.Tensor]]:
    """The tensors among what is asked for, each once, by their boxes."""
    found: dict[str, list[tf.Tensor]] = {}
    for each in {each.name: each for each in elements if isinstance(each, tf.Tensor)}.values():
        if each.op.name in home:
            found.setdefault(home[each.op.name], []).append(each)
    return found


def _several(values: list) -> str:
    return ", ".join(map(_short, values)) if len(values) < 3 else f"{len(values)} tensors"


def _short(value: Any) -> str:
    """A value in a few characters: up to three numbers, else the shape."""
    array = np.asarray(value)
    if array.size > 3:
        return f"shape {array.shape}"
    if array.ndim:
        return f"[{' '.join(_short(each) for each in array)}]"
    if array.dtype.kind == "f":
        return f"{array:.4g}"
    return tf.compat.as_str_any(array.item())


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
