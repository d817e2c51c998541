"""Audit: the result of an audit, for a terminal, an issue thread, a notebook or a program."""

import html
import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TOLD = (
    "Not audited, because these differ from the large batch wherever micro-batches are computed one "
    "by one: batch normalization, which uses the statistics of each, and dropout, which draws a "
    "mask for each. Of a contrastive loop, whether both passes draw the same masks is audited."
)


@dataclass(frozen=True)
class Difference:
    """Where a bug shows.

    Attributes:
        probe: the name of the training.
        update: the first update after which the weights differ, counted from 1.
        distance: the distance from the large batch's weights, relative to how far those moved from
            the start; NaN if one of them is not there or not finite.
        distance_with_bug: the same for the weights that a loop with the bugs named so far has; None
            if none is known.
        weights, right, with_bug: the weights after each update as vectors: those of the loop, of
            the large batch, and of a loop with the bugs. Where masks are random, the nearest ones
            that a loop can have that is right, or has the bug.
    """

    probe: str
    update: int
    distance: float
    distance_with_bug: float | None
    weights: list[np.ndarray] = field(repr=False, compare=False)
    right: list[np.ndarray] = field(repr=False, compare=False)
    with_bug: list[np.ndarray] = field(repr=False, compare=False)

    def __str__(self) -> str:
        where = f'In the probe "{self.probe}"'
        found = len(self.weights)
        expected = len(self.right)
        if self.update > min(found, expected):
            return f"{where} the loop makes {found} updates, and the large batch {expected}."
        if not math.isfinite(self.distance):
            return f"{where}, the weights are not finite after update {self.update}."
        words = f"{where}, after update {self.update}: {self.distance:.2g} from the weights of the large batch"
        if self.distance_with_bug is not None:
            near = (
                "less than 1e-6"
                if self.distance_with_bug < 1e-6
                else f"{self.distance_with_bug:.1g}"
            )
            words += f", {near} from those of a loop with this bug"
        return f"{words} (relative to how far the correct weights moved)."


@dataclass(frozen=True)
class FoundBug:
    """A bug that was found.

    Attributes:
        bug: its name, a key of `gradlab.auditing.bugs.BUGS`; "ambiguous" if the probes cannot tell
            candidates apart, "unknown" if the weights are wrong and no known bug or pair of bugs
            explains them.
        sentence: what the loop does.
        evidence: the `Difference`; its text says where the bug shows, in numbers.
        fix: what to change; empty if the bug is not known.
        section: where the course explains it: a notebook and the heading of a section.
        candidates: for "ambiguous", the names, those of pairs joined by "and".
    """

    bug: str
    sentence: str
    evidence: Difference
    fix: str = ""
    section: str = ""
    candidates: tuple[str, ...] = ()

    @property
    def link(self) -> str:
        """The address of the section, below the folder of gradlab; empty if the bug is not
        known."""
        notebook, _, heading = self.section.partition(", ")
        return f"{notebook}#{heading.replace(' ', '-')}" if notebook else ""

    def summary(self) -> dict[str, Any]:
        """The finding for JSON."""
        evidence = self.evidence
        numbers = {"probe": evidence.probe, "update": evidence.update, "text": str(evidence)}
        for name in ("distance", "distance_with_bug"):
            value = getattr(evidence, name)
            numbers[name] = None if value is None or not math.isfinite(value) else value
        return {
            "bug": self.bug,
            "sentence": self.sentence,
            "evidence": numbers,
            "fix": self.fix,
            "section": self.section,
            "link": self.link,
            "candidates": list(self.candidates),
        }


@dataclass(frozen=True, repr=False)
class Audit:
    """What an audit found.

    Attributes:
        findings: the bugs, each a `FoundBug`.
        skipped: for each probe that did not run, why.
        notes: what the loop does that is not wrong, but good to know.
        clean: whether no bug was found.
    """

    findings: tuple[FoundBug, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether no bug was found in the probes that ran."""
        return not self.findings

    @property
    def _title(self) -> str:
        count = len(self.findings)
        found = "no bug found" if self.clean else f"{count} bug{'s' * (count > 1)} found"
        return f"gradlab audit: {found}"

    def text(self) -> str:
        """The report for a terminal."""
        lines = [self._title]
        for number, one in enumerate(self.findings, 1):
            lines += ["", f"{number}. {one.bug}: {one.sentence}", f"   {one.evidence}"]
            lines += [
                f"   {name}: {words}"
                for name, words in (("Fix", one.fix), ("See", one.section))
                if words
            ]
        lines += ["", *self._remarks()]
        return "\n".join(lines)

    def markdown(self) -> str:
        """The report for an issue thread."""
        lines = [f"**{self._title}**", ""]
        if self.findings:
            lines += ["| bug | what the loop does | numbers | fix |", "| --- | --- | --- | --- |"]
            lines += [
                f"| `{one.bug}` | {one.sentence} | {one.evidence} | {one.fix} |"
                for one in self.findings
            ]
            explained = [one for one in self.findings if one.section]
            lines += [
                "",
                *(
                    f"- `{one.bug}` is explained in [{one.section}]({one.link})"
                    for one in explained
                ),
                "",
            ]
        return "\n".join([*lines, *(f"- {remark}" for remark in self._remarks())])

    def json(self) -> str:
        """The report for a program: an object with clean, findings, skipped and notes."""
        findings = [one.summary() for one in self.findings]
        found = {
            "clean": self.clean,
            "findings": findings,
            "skipped": self.skipped,
            "notes": list(self.notes),
        }
        return json.dumps(found, indent=1)

    def plot(self, number: int = 0) -> Any:
        """Draws the weight that shows a finding best, after each update: of the loop, and as it
        should be.

        Args:
            number: the number of the finding, counted from 0.

        Returns:
            A matplotlib figure.
        """
        from gradlab.auditing.trajectory_plot import figure

        if not 0 <= number < len(self.findings):
            raise ValueError(
                f"number must be that of a finding, below {len(self.findings)}. Received: {number}"
            )
        return figure(self.findings[number].bug, self.findings[number].evidence)

    def _remarks(self) -> list[str]:
        names: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            names.setdefault(reason, []).append(f'"{name}"')
        skipped = [f"Skipped {', '.join(each)}: {reason}." for reason, each in names.items()]
        return [*self.notes, *skipped, TOLD]

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        """The report as a table in a notebook."""
        left = "style='text-align: left; vertical-align: top'"
        rows = []
        for one in self.findings:
            named = (("Fix", one.fix), ("See", one.section))
            words = [html.escape(one.sentence), html.escape(str(one.evidence))]
            words += [f"<b>{name}</b>: {html.escape(text)}" for name, text in named if text]
            rows.append(
                f"<tr><td {left}><code>{one.bug}</code></td><td "
                f"{left}>{'<br>'.join(words)}</td></tr>"
            )
        table = f"<table class='gradlab-audit'>{''.join(rows)}</table>" if rows else ""
        remarks = "".join(f"<li>{html.escape(remark)}</li>" for remark in self._remarks())
        return f"<b>{self._title}</b>{table}<ul>{remarks}</ul>"
