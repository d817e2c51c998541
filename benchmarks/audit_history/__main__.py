"""Audits releases of public libraries, each in an environment of its own, and writes the tables.

    python -m benchmarks.audit_history                      prints the verdicts of all releases
    python -m benchmarks.audit_history --only keras==3.4.1  of one release
    python -m benchmarks.audit_history --write              keeps them in data/results/audit.json and in the docs

Each release is installed with pip into a new environment, which takes minutes and gigabytes; with
--folder, environments are kept and used again.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import venv

from benchmarks.audit_history.releases import HISTORY, TODAY, Release
from benchmarks.audit_history.tables import JSON, PAGE, page, write

ROOT = pathlib.Path(__file__).resolve().parents[2]
HELPER = ("numpy", "lazy-loader")  # what the audit itself needs
NAMED = {
    "keras",
    "tensorflow",
    "tensorflow-cpu",
    "torch",
    "accelerate",
    "transformers",
    "lightning",
    "deepspeed",
    "optax",
    "sentence-transformers",
}
NAMED |= {"jax", "fastai", "numpy"}  # the packages whose versions are kept
SECONDS = 1800


def audit(release: Release, folder: pathlib.Path) -> dict:
    """Installs a release and audits it.

    Args:
        release: the release.
        folder: where environments are kept.

    Returns:
        {"library", "version", "adapter", "packages", "seconds"}, and either the "audit", as
        `gradlab.Audit.json` has it, or the last line of the "error".
    """
    found: dict = {
        "library": release.library,
        "version": release.version,
        "adapter": release.adapter,
    }
    python = folder / f"{release.library}-{release.version}" / "bin" / "python"
    if release.library == "gradlab":
        python = pathlib.Path(sys.executable)
    try:
        if not python.exists():
            venv.create(python.parents[1], with_pip=True)
            wanted = [f"{release.library}=={release.version}", *release.packages, *HELPER]
            _run([python, "-m", "pip", "install", "--quiet", *wanted])
        installed = _run([python, "-m", "pip", "freeze", "--exclude-editable"]).stdout.split()
        found["packages"] = [one for one in installed if one.partition("==")[0].lower() in NAMED]
        own = (pathlib.Path(__file__).parent / f"{release.adapter}.py").exists()
        adapter = f"{'benchmarks.audit_history' if own else 'gradlab.auditing.adapters'}.{release.adapter}:train"
        began = time.perf_counter()
        done = _run([python, "-m", "gradlab", "audit", adapter, "--json"], statuses=(0, 1))
        found["seconds"] = round(time.perf_counter() - began, 1)
        lines = done.stdout.splitlines()  # a library may print what it likes before the JSON
        if "{" not in lines:  # Python's own status for an error is 1, too
            raise subprocess.CalledProcessError(
                done.returncode, done.args, done.stdout, done.stderr
            )
        found["audit"] = json.loads("\n".join(lines[lines.index("{") :]))
    except subprocess.TimeoutExpired:
        found["error"] = f"it took longer than {SECONDS} s"
    except subprocess.CalledProcessError as error:
        said = (error.stderr or str(error)).strip().splitlines()
        found["error"] = said[-1] if said else type(error).__name__
    return found


def _run(command: list, statuses: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess:
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **quiet}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    if done.returncode not in statuses:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done


def main() -> None:
    """Runs the command above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", metavar="LIBRARY==VERSION", help="audit only these releases"
    )
    parser.add_argument("--folder", type=pathlib.Path, help="keep the environments in this folder")
    parser.add_argument("--write", action="store_true", help="write the verdicts of all releases")
    asked = parser.parse_args()
    if asked.only and asked.write:
        parser.error("--write must be used without --only. Received: both")
    if asked.write:
        page({"today": [], "history": []}, PAGE.read_text())  # the markers are there
    found: dict[str, list[dict]] = {"today": [], "history": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (asked.folder or pathlib.Path(temporary)).resolve()
        for table, releases in (("today", TODAY), ("history", HISTORY)):
            for release in releases:
                if asked.only and f"{release.library}=={release.version}" not in asked.only:
                    continue
                row = audit(release, folder)
                found[table].append(row)
                bugs = (
                    [one["bug"] for one in row["audit"]["findings"]]
                    if "audit" in row
                    else row["error"]
                )
                print(f"{release.library} {release.version}, {release.adapter}: {bugs}", flush=True)
    if asked.write:
        write(found)
        print(f"written: {JSON}", file=sys.stderr)


if __name__ == "__main__":
    main()
