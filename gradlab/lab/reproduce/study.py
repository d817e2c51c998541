"""The form of a reproduced study: a paper's claims, the rules that judge them, what was found, and
its files.

A module of a study decides its protocol and its rules in its docstring and constants, and says what
had been tried by then. They are committed before the first whole run, and a claim that its rule does
not confirm is printed like the others.
"""

import csv
import dataclasses
import io
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from gradlab.lab.experiments import environment
from gradlab.lab.experiments.result_file import replacing
from gradlab.lab.figures import plots


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement of a paper and how it came out.

    Attributes:
        text: what the paper says.
        rule: what had to come out here, decided before the run.
        found: what came out.
        holds: whether that satisfies the rule.
    """

    text: str
    rule: str
    found: str
    holds: bool


@dataclasses.dataclass(frozen=True)
class Study:
    """The outcome of a study.

    Attributes:
        name: the name on the command line, such as "noise-scale".
        paper: authors, year, title and arXiv number.
        claims: the paper's statements, judged.
        rows: the numbers behind them, one dictionary for each row of the CSV file, all with the
            same keys.
        figure: the numbers as a figure; its label is the text alternative.
        quick: whether this is the small version, whose numbers are too noisy to be judged.
        seconds: how long the study took.
    """

    name: str
    paper: str
    claims: Sequence[Claim]
    rows: Sequence[Mapping[str, Any]]
    figure: Figure
    quick: bool
    seconds: float

    def text(self) -> str:
        """Format the claims for a terminal."""
        lines = [self.paper, ""]
        if self.quick:
            lines.insert(
                1, "A small version: too small to be judged. These are the numbers that it found."
            )
        for claim in self.claims:
            verdict = "not judged" if self.quick else "agrees" if claim.holds else "DOES NOT AGREE"
            lines += [
                f"{verdict}: {claim.text}",
                f"    rule:  {claim.rule}",
                f"    found: {claim.found}",
            ]
        return "\n".join(lines)

    def summary(self) -> list[dict[str, Any]]:
        """Return the claims as dictionaries; `holds` is None in the small version."""
        return [
            dataclasses.asdict(c) | {"holds": None if self.quick else bool(c.holds)}
            for c in self.claims
        ]

    def write(self, folder: str | os.PathLike) -> list[pathlib.Path]:
        """Write the numbers (CSV), the claims with the environment (JSON), and the figure (PNG).

        Args:
            folder: where to write; created if it does not exist.

        Returns:
            The paths of the files.

        Raises:
            OSError: a file could not be written.
        """
        about = {
            "paper": self.paper,
            "quick": self.quick,
            "seconds": round(self.seconds, 1),
            "claims": self.summary(),
            "figure": self.figure.get_label(),
            "environment": environment.describe(),
        }
        contents = {
            f"{self.name}.csv": csv_of(self.rows),
            f"{self.name}.json": json_of(about),
            f"{self.name}.png": plots.to_png(self.figure),
        }
        return write_files(folder, contents)


def write_files(folder: str | os.PathLike, contents: Mapping[str, bytes]) -> list[pathlib.Path]:
    """Write files into a folder, which is created if it does not exist, and return their paths.

    Args:
        folder: where to write.
        contents: the content of each file, by its name.

    Raises:
        OSError: a file could not be written.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        with replacing(folder / name) as file:
            file.write(content)
    return [folder / name for name in contents]


def json_of(value: Any) -> bytes:
    """A value as the content of a JSON file.

    Example:
        >>> json_of({"k": 1})
        b'{\\n "k": 1\\n}\\n'
    """
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def csv_of(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Rows with the same keys as the content of a CSV file.

    Example:
        >>> csv_of([{"k": 1, "mean": 0.5}, {"k": 2, "mean": 0.25}])
        b'k,mean\\n1,0.5\\n2,0.25\\n'
    """
    content = io.StringIO()
    writer = csv.DictWriter(content, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return content.getvalue().encode()
