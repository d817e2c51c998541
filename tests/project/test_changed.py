"""make test-changed: which tests belong to a changed file."""

import subprocess

import changed
import pytest
from paths import ROOT

TEST_FILES = [
    path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))
]


@pytest.mark.parametrize(
    ("file", "targets"),
    [
        ("gradlab/window.py", ["tests/test_window.py"]),
        ("gradlab/measure/noise.py", ["tests/measure/test_noise.py"]),
        ("gradlab/lab/experiments/training.py", ["tests/lab/experiments/test_training.py"]),
        ("tests/test_tokens.py", ["tests/test_tokens.py"]),
        ("notebooks/00_start_here.ipynb", ["notebooks/00_start_here.ipynb"]),
        ("README.md", []),
    ],
)
def test_a_file_has_its_tests(file, targets):
    assert changed.targets_of(file, TEST_FILES) == targets


def test_a_module_without_a_test_module_has_those_of_its_folder():
    found = changed.targets_of("gradlab/drawing/a_module_without_one.py", TEST_FILES)
    assert found == [file for file in TEST_FILES if file.startswith("tests/drawing/")] != []
    found = changed.targets_of("gradlab/drawing/a_room_without_tests/a_module.py", TEST_FILES)
    assert found == [file for file in TEST_FILES if file.startswith("tests/drawing/")]


def test_support_has_the_tests_that_use_it():
    found = changed.targets_of("tests/support/planted_loops.py", TEST_FILES)
    assert "tests/auditing/test_audit.py" in found and "tests/test_window.py" not in found


def test_changed_and_new_files_are_found(tmp_path, monkeypatch, capsys):
    """In a repository of its own: an edit, a new file and a deletion."""

    def git(*arguments):
        settings = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(
            ["git", *settings, *arguments], cwd=tmp_path, check=True, capture_output=True
        )

    for name in ("edited", "same", "deleted"):
        (tmp_path / name).write_text("before")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    (tmp_path / "edited").write_text("after")
    (tmp_path / "new").write_text("new")
    (tmp_path / "deleted").unlink()
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    assert changed.changed_files("HEAD") == ["edited", "new"]
    with pytest.raises(
        SystemExit, match=r"^COMMIT must be a commit of this repository. Received: nothing$"
    ):
        changed.changed_files("nothing")
    assert changed.main() == 0
    assert capsys.readouterr().out == "gradlab: no tests belong to what has changed: edited, new\n"
