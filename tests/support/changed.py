"""Runs the tests of the files that have changed since a commit, the last one unless another is
named.

    make test-changed
    python tests/support/changed.py [COMMIT]

tests/ is laid out like gradlab/, so the tests of gradlab/a/b.py are tests/a/test_b.py, or all of
tests/a/ if there is no such file, or those of the folder around it. A changed test module runs
itself, a module of tests/support/ runs the test modules that use it, and a changed notebook is
compared with its outputs. Everything else is left to `make test`.
"""

import re
import subprocess
import sys

from paths import ROOT


def changed_files(commit: str) -> list[str]:
    """The files that differ from a commit, new ones included, as paths from the root."""
    listed = []
    for command in (
        ["diff", "--name-only", commit],
        ["ls-files", "--others", "--exclude-standard"],
    ):
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"COMMIT must be a commit of this repository. Received: {commit}")
        listed += done.stdout.splitlines()
    return sorted(file for file in set(listed) if (ROOT / file).exists())


def targets_of(file: str, test_files: list[str]) -> list[str]:
    """What pytest has to run for a changed file.

    Args:
        file: its path from the root.
        test_files: the paths of all test modules from the root.
    """
    folder, _, name = file.rpartition("/")
    stem = name.removesuffix(".py").strip("_")
    if file in test_files or file.endswith(".ipynb"):
        return [file]
    if folder == "tests/support":
        uses = re.compile(rf"^(?:from|import) {stem}\b", re.MULTILINE)
        return [each for each in test_files if uses.search((ROOT / each).read_text())]
    if not file.startswith("gradlab/"):
        return []
    layout = folder.replace("gradlab", "tests", 1)
    if f"{layout}/test_{stem}.py" in test_files:
        return [f"{layout}/test_{stem}.py"]
    # The helper's own folder is the root of all tests: there, a module without a test module has
    # none of its own.
    while layout != "tests":
        found = [each for each in test_files if each.startswith(f"{layout}/")]
        if found:
            return found
        layout = layout.rpartition("/")[0]
    return []


def main(commit: str = "HEAD") -> int:
    """Runs the tests, and returns pytest's exit status."""
    test_files = [
        path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))
    ]
    files = changed_files(commit)
    targets = dict.fromkeys(target for file in files for target in targets_of(file, test_files))
    if not targets:
        print(f"gradlab: no tests belong to what has changed: {', '.join(files) or 'nothing'}")
        return 0
    print(f"gradlab: {len(files)} files have changed; running {', '.join(targets)}", flush=True)
    options = ["-m", "not slow", "--nbval", "--nbval-sanitize-with", "tests/nbval_sanitize.cfg"]
    return subprocess.run([sys.executable, "-m", "pytest", *options, *targets], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
