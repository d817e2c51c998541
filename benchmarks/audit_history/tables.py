"""The tables of audits: what today's releases do, and which bug the audit names in releases around a public report."""

import json

from benchmarks.audit_history.releases import HISTORY, Release
from benchmarks.report import ROOT, between_markers

JSON = ROOT / "data" / "results" / "audit.json"
PAGE = ROOT / "docs" / "comparison.md"

NAMES = {
    "keras_option": "Keras, `gradient_accumulation_steps`",
    "torch_loop": "PyTorch, by hand",
    "accelerate": "Accelerate",
    "transformers": "Transformers' Trainer",
    "lightning": "Lightning",
    "deepspeed": "DeepSpeed",
    "optax_multisteps": "optax, MultiSteps",
    "optax_microbatching": "optax, microbatching",
    "jax_scan": "JAX, `lax.scan` by hand",
    "fastai_callback": "fastai, GradientAccumulation",
    "microbatched": "`gradlab.microbatched`",
    "trainer": "`gradlab.Trainer`",
}
TAIL = ("tail_dropped", "tail_carried")
# A row for each rule: the bugs that break it, the bugs with which the case never occurs, and the probe that shows it.
RULES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "full windows give the large batch's update": (
        ("sum_for_mean", "first_only", "last_only", "not_reset", "step_per_microbatch", "scaled_twice"),
        (),
        "full windows",
    ),
    "the ragged tail is applied": (TAIL, (), "a short window"),
    "a short window is divided by what it holds": (("divided_by_k",), TAIL, "a short window"),
    "micro-batches weigh as much as they have examples": (("mean_of_means",), (), "a short micro-batch"),
    "averages over tokens": (("mean_of_means",), (), "texts of different lengths"),
    "clips once, the mean": (("clipped_per_microbatch",), (), "clipping"),
    "schedules count updates": (("schedule_per_microbatch", "schedule_stretched", "off_by_one"), (), "a schedule"),
    "Adam counts updates": (("bias_correction_per_microbatch",), (), "Adam"),
    "weight decay once per update": (("decay_per_microbatch",), (), "AdamW"),
    "sums keep their digits": (("low_precision_sum",), (), "a long window"),
    "replicas share a window": ((), (), "two replicas"),
}
NAN = {
    "A NaN in a micro-batch reaches the weights, as it does with the large batch.": "reaches the weights",
    "A window with a NaN is left out.": "its window is left out",
    "A micro-batch with a NaN is left out.": "its micro-batch is left out",
}


def bugs_of(row: dict) -> list[str]:
    """The names of the bugs that an audit found, candidates included."""
    return [name for one in row["audit"]["findings"] for name in (one["candidates"] or [one["bug"]])]


def today_as_table(rows: list[dict]) -> str:
    """Writes a row for each rule and a column for each library; a cell is "yes", or the names of bugs."""
    audited = [row for row in rows if "audit" in row]
    heads = [NAMES[row["adapter"]] + (f" {row['version']}" if row["version"] else "") for row in audited]
    lines = ["| | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(audited)]
    for rule, how in RULES.items():
        lines.append(f"| {rule} | " + " | ".join(_cell(row, *how) for row in audited) + " |")
    lines.append("| a NaN in a micro-batch | " + " | ".join(_nan(row) for row in audited) + " |")
    left = [f"{NAMES[row['adapter']]} {row['version']} ({row['error']})" for row in rows if "error" in row]
    return "\n".join(lines) + (f"\n\nCould not be audited: {'; '.join(left)}." if left else "")


def _cell(row: dict, bugs: tuple[str, ...], never: tuple[str, ...], probe: str) -> str:
    known, unknown = bugs_of(row), [one for one in row["audit"]["findings"] if one["bug"] == "unknown"]
    if any(one["evidence"]["probe"] == probe for one in unknown):
        return "`unknown`"
    if probe in row["audit"]["skipped"] or set(never) & set(known):
        return "-"
    found = [name for name in known if any(bug in name.split(" and ") for bug in bugs)]
    return " or ".join(f"`{name}`" for name in found) or "yes"


def _nan(row: dict) -> str:
    notes = row["audit"]["notes"]
    raises = [note.rpartition(" ")[2].rstrip(".") for note in notes if "raises" in note]
    if "nonfinite_poisons" in bugs_of(row):
        return "`nonfinite_poisons`"
    return raises[0] if raises else next((NAN[note] for note in notes if note in NAN), "-")


def history_as_table(rows: list[dict]) -> str:
    """Writes a row for each release around a public report."""
    lines = ["| release | verdict | the public report |", "| --- | --- | --- |"]
    for row in rows:
        release = release_of(row)
        verdict = ", ".join(f"`{name}`" for name in bugs_of(row)) or "no bug" if "audit" in row else row["error"]
        number = release.report.rpartition("/")[2]
        report = f"[{release.library}#{number}]({release.report}): {release.reported}"
        lines.append(f"| {row['library']} {row['version']} | {verdict} | {report} |")
    return "\n".join(lines)


def release_of(row: dict) -> Release:
    """The release of the history that a row is about."""
    return next(one for one in HISTORY if (one.library, one.version) == (row["library"], row["version"]))


def page(found: dict[str, list[dict]], text: str) -> str:
    """The page with the tables of these audits."""
    for name, table in (("today", today_as_table), ("history", history_as_table)):
        markers = f"<!-- {name} -->", f"<!-- /{name} -->"
        text = between_markers(text, table(found[name]), markers)
    return text


def write(found: dict[str, list[dict]]) -> None:
    """Writes the JSON and the tables."""
    JSON.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(page(found, PAGE.read_text()))
