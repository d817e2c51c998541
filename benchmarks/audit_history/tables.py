"""The tables of audits: what today's releases do, and which bug the audit names in releases around
a public report."""

import json

from benchmarks.audit_history.releases import HISTORY, Release
from benchmarks.report import ROOT, between_markers

JSON = ROOT / "data" / "results" / "audit.json"
PAGE = ROOT / "docs" / "comparison.md"

NAMES = {
    "keras_option": "Keras' option",
    "torch_loop": "PyTorch by hand",
    "accelerate": "Accelerate",
    "transformers": "Transformers",
    "lightning": "Lightning",
    "deepspeed": "DeepSpeed",
    "optax_multisteps": "optax MultiSteps",
    "optax_microbatching": "optax microbatching",
    "jax_scan": "JAX by hand",
    "fastai_callback": "fastai",
    "microbatched": "`gradlab.microbatched`",
    "trainer": "`gradlab.Trainer`",
}
# A column for each rule: the bugs that break it, and the probe without which it is not known.
RULES: dict[str, tuple[tuple[str, ...], str]] = {
    "full windows": (
        (
            *(
                "sum_for_mean",
                "first_only",
                "last_only",
                "not_reset",
                "step_per_microbatch",
                "scaled_twice",
            ),
            "low_precision_sum",
        ),
        "full windows",
    ),
    "ragged tail": (("tail_dropped", "tail_carried", "divided_by_k"), "a short window"),
    "tokens, sizes": (("mean_of_means",), "texts of different lengths"),
    "clipping": (("clipped_per_microbatch",), "clipping"),
    "schedule": (
        ("schedule_per_microbatch", "schedule_stretched", "schedule_restarts", "off_by_one"),
        "a schedule",
    ),
    "Adam, decay": (("bias_correction_per_microbatch", "decay_per_microbatch"), "Adam"),
    "replicas": ((), "two replicas"),
}
NAN = {
    "A NaN in a micro-batch reaches the weights, as it does with the large batch.": "reaches the "
    "weights",
    "A window with a NaN is left out.": "its window is left out",
    "A micro-batch with a NaN is left out.": "its micro-batch is left out",
}


def bugs_of(row: dict) -> list[str]:
    """The names of the bugs that an audit found, candidates included."""
    return [
        name for one in row["audit"]["findings"] for name in (one["candidates"] or [one["bug"]])
    ]


def today_as_table(rows: list[dict]) -> str:
    """Writes a row for each library, and a column for each rule that not all of them keep."""
    audited = [row for row in rows if "audit" in row]
    cells = {rule: [_cell(row, *how) for row in audited] for rule, how in RULES.items()}
    kept = [rule for rule, found in cells.items() if set(found) <= {"right"}]
    shown = {rule: found for rule, found in cells.items() if rule not in kept} | {
        "a NaN": [_nan(row) for row in audited]
    }
    lines = [f"| | {' | '.join(shown)} |", "| --- |" + " --- |" * len(shown)]
    for row, *found in zip(audited, *shown.values()):
        lines.append(f"| {NAMES[row['adapter']]} {row['version']} | {' | '.join(found)} |")
    lines += ["", f"Right in all of them: {'; '.join(kept) or '-'}."] if audited else []
    left = [
        f"{NAMES[row['adapter']]} {row['version']} ({row['error']})"
        for row in rows
        if "error" in row
    ]
    return "\n".join(lines) + (f"\n\nCould not be audited: {'; '.join(left)}." if left else "")


def _cell(row: dict, bugs: tuple[str, ...], probe: str) -> str:
    unknown = [one for one in row["audit"]["findings"] if one["bug"] == "unknown"]
    if any(one["evidence"]["probe"] == probe for one in unknown):
        return "`unknown`"
    if probe in row["audit"]["skipped"]:
        return "-"
    found = [name for name in bugs_of(row) if any(bug in name.split(" and ") for bug in bugs)]
    return ", ".join(f"`{name}`" for name in found) or "right"


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
        verdict = (
            ", ".join(f"`{name}`" for name in dict.fromkeys(bugs_of(row))) or "no bug"
            if "audit" in row
            else row["error"]
        )
        number = release.report.rpartition("/")[2]
        report = f"[{release.library}#{number}]({release.report}): {release.reported}"
        lines.append(f"| {row['library']} {row['version']} | {verdict} | {report} |")
    return "\n".join(lines)


def release_of(row: dict) -> Release:
    """The release of the history that a row is about."""
    return next(
        one
        for one in HISTORY
        if (one.library, one.version, one.adapter)
        == (row["library"], row["version"], row["adapter"])
    )


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
