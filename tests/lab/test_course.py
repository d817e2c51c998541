"""Copies of the course: complete, never over a file that the user changed, opened in JupyterLab."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from distributed import LocalCluster
from paths import ROOT

from gradlab.lab import course

NOTEBOOK = course.FIRST_NOTEBOOK
NEW = "00_start_here.new.ipynb"


@pytest.fixture
def edition(tmp_path, monkeypatch):
    """Pretends that gradlab has this edition of a course with two files."""
    source = tmp_path / "source"
    (source / "solutions").mkdir(parents=True)
    monkeypatch.setattr(course, "course_folder", lambda: source)

    def of(text: str) -> None:
        (source / NOTEBOOK).write_text(f"{text} notebook")
        (source / "solutions" / NOTEBOOK).write_text(f"{text} solution")

    of("first")
    return of


@pytest.fixture
def copy(edition, tmp_path):
    """Copies the course and returns the names of the files that were written."""
    return lambda: [
        str(path.relative_to(tmp_path / "copy")) for path in course.copy_course(tmp_path / "copy")
    ]


def content(tmp_path) -> dict[str, str]:
    folder = tmp_path / "copy"
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name != course.MANIFEST
    )
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_the_whole_course_is_copied_once(tmp_path):
    written = course.copy_course(tmp_path / "a" / "copy")
    names = [str(path.relative_to(tmp_path / "a" / "copy")) for path in written]
    notebooks = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert len(notebooks) == 17 and names[:17] == notebooks
    assert names[17:] == [*(f"solutions/{name}" for name in notebooks), "app/lab.ipynb"]
    for name, path in zip(names, written):
        assert path.read_bytes() == (ROOT / "notebooks" / name).read_bytes()
    assert course.copy_course(tmp_path / "a" / "copy") == []


def test_links_in_the_copy_resolve_unless_they_leave_the_course(tmp_path):
    """And no code cell opens a file by a path that exists in a checkout only."""
    for path in course.copy_course(tmp_path / "copy"):
        for cell in json.loads(path.read_text())["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code":
                assert not re.search(r"""["']\.\.?/""", source), (path.name, source)
                continue
            for address in re.findall(r"""\]\(([^)#]+?)(?:#[^)]*)?\)|src=["']([^"']+)""", source):
                target = path.parent / "".join(address)
                if (
                    not "".join(address).startswith("http")
                    and tmp_path / "copy" in target.resolve().parents
                ):
                    assert target.exists(), (path.name, target)


def test_a_missing_file_is_written_again(copy, tmp_path):
    copy()
    (tmp_path / "copy" / NOTEBOOK).unlink()
    assert copy() == [NOTEBOOK]


def test_an_unchanged_file_of_an_older_edition_is_replaced(copy, edition, tmp_path):
    copy()
    edition("second")
    assert copy() == [NOTEBOOK, f"solutions/{NOTEBOOK}"]
    assert content(tmp_path) == {
        NOTEBOOK: "second notebook",
        f"solutions/{NOTEBOOK}": "second solution",
    }
    assert copy() == []


def test_a_changed_file_stays_and_a_newer_edition_is_written_beside_it_once(
    copy, edition, tmp_path
):
    copy()
    (tmp_path / "copy" / NOTEBOOK).write_text("mine")
    assert copy() == []  # there is nothing newer
    edition("second")
    assert copy() == [NEW, f"solutions/{NOTEBOOK}"]
    assert content(tmp_path)[NOTEBOOK] == "mine" and content(tmp_path)[NEW] == "second notebook"
    assert copy() == []
    edition("third")
    assert copy() == [NEW, f"solutions/{NOTEBOOK}"]  # the user has not changed it
    assert content(tmp_path)[NOTEBOOK] == "mine" and content(tmp_path)[NEW] == "third notebook"
    (tmp_path / "copy" / NEW).unlink()
    assert copy() == []  # it was offered already


def test_a_changed_newer_edition_stays_too(copy, edition, tmp_path):
    copy()
    (tmp_path / "copy" / NOTEBOOK).write_text("mine")
    edition("second")
    copy()
    (tmp_path / "copy" / NEW).write_text("also mine")
    edition("third")
    assert copy() == [f"solutions/{NOTEBOOK}"]
    assert content(tmp_path)[NOTEBOOK] == "mine" and content(tmp_path)[NEW] == "also mine"


def test_the_newer_edition_may_take_the_place_of_the_changed_file(copy, edition, tmp_path):
    copy()
    (tmp_path / "copy" / NOTEBOOK).write_text("mine")
    edition("second")
    copy()
    (tmp_path / "copy" / NEW).replace(tmp_path / "copy" / NOTEBOOK)
    assert copy() == []
    edition("third")
    assert NOTEBOOK in copy() and NEW not in content(tmp_path)


@pytest.mark.parametrize("manifest", [None, "", "{}", "[]", '{"files": 3}', '{"files": {"x": 1}}'])
def test_a_file_of_unknown_origin_counts_as_changed(copy, tmp_path, manifest):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / NOTEBOOK).write_text("mine")
    if manifest is not None:
        (tmp_path / "copy" / course.MANIFEST).write_text(manifest)
    assert copy() == [NEW, f"solutions/{NOTEBOOK}"]
    assert content(tmp_path)[NOTEBOOK] == "mine"


def test_the_notebooks_of_a_checkout_are_left_alone(edition, tmp_path):
    before = sorted((tmp_path / "source").rglob("*"))
    assert course.copy_course(tmp_path / "source") == []
    assert sorted((tmp_path / "source").rglob("*")) == before


def test_a_folder_that_is_a_file_is_refused(copy, tmp_path):
    (tmp_path / "copy").write_text("")
    with pytest.raises(
        NotADirectoryError,
        match=r"folder must be a folder, or not exist yet. Received: the file .*copy",
    ):
        copy()


PRETENDED = """
import os, pathlib, signal, sys, time
config = [p for p in os.environ["JUPYTER_CONFIG_PATH"].split(":") if "gradlab" in p][0]
assert "fetchNews" in pathlib.Path(config, "labconfig", "default_setting_overrides.json").read_text()
pathlib.Path("arguments").write_text("\\n".join(sys.argv[1:]))
pathlib.Path("cluster").write_text(os.environ.get("GRADLAB_DASK", ""))
if not pathlib.Path("stay").exists():
    sys.exit(7)
def stop(*_):
    for each in (signal.SIGTERM, signal.SIGINT):  # a second signal does not change the exit status
        signal.signal(each, signal.SIG_IGN)
    sys.exit(0)
for each in (signal.SIGTERM, signal.SIGINT):
    signal.signal(each, stop)
pathlib.Path("ready").touch()
time.sleep(600)
"""


@pytest.fixture
def pretended_jupyterlab(tmp_path, monkeypatch):
    """A Python that writes down the arguments of JupyterLab, and stays until a signal comes if
    there is a file stay."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/pretended.py "$@"\n')
    python.chmod(0o755)
    (tmp_path / "pretended.py").write_text(PRETENDED)
    monkeypatch.chdir(tmp_path)
    return str(python)


def test_open_course_copies_says_so_and_runs_jupyterlab(
    copy, edition, pretended_jupyterlab, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "executable", pretended_jupyterlab)
    folder = tmp_path / "copy"
    assert course.open_course(folder) == 7
    assert capsys.readouterr().out == f"gradlab: the course is in {folder}: 2 files copied\n"
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[:4] == ["-m", "jupyterlab", "--ip=127.0.0.1", "--port=8888"]
    assert f"--ServerApp.root_dir={folder}" in arguments
    assert "--LabApp.default_url=/lab/tree/00_start_here.ipynb" in arguments
    assert ("--allow-root" in arguments) == (os.geteuid() == 0)
    assert "--no-browser" not in arguments and "--ServerApp.port_retries=0" not in arguments

    (folder / NOTEBOOK).write_text("mine")
    assert course.open_course(folder, port=9001, browser=False) == 7
    said = f"gradlab: the course is in {folder}: no file had to be copied; 1 file with your changes kept\n"
    assert capsys.readouterr().out == said
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert {"--port=9001", "--ServerApp.port_retries=0", "--no-browser"} <= set(arguments)

    edition("second")
    course.open_course(folder)
    said = f"2 files copied; 1 file with your changes kept; newer editions of these are in {NEW}\n"
    assert capsys.readouterr().out.endswith(said)


@pytest.mark.slow
def test_labs_of_the_course_train_on_a_cluster(
    copy, edition, pretended_jupyterlab, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "executable", pretended_jupyterlab)
    nobody = "tcp://127.0.0.1:1"
    with pytest.raises(
        ConnectionError, match=f"^there must be a Dask scheduler at {nobody}: it does not answer"
    ):
        course.open_course(tmp_path / "copy", dask=nobody)
    assert not (tmp_path / "copy").exists()
    with LocalCluster(n_workers=0, processes=False, dashboard_address=None) as cluster:
        assert course.open_course(tmp_path / "copy", dask=cluster.scheduler_address) == 7
        assert (tmp_path / "cluster").read_text() == cluster.scheduler_address


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("to_all", [True, False], ids=["to_all", "to_gradlab"])
def test_a_signal_ends_jupyterlab_too(pretended_jupyterlab, tmp_path, sent, to_all):
    """A terminal sends Ctrl-C to all processes; a supervisor signals gradlab alone. No process is
    left either way."""
    (tmp_path / "stay").touch()
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from gradlab.lab import course\n"
    program += f"sys.executable = {pretended_jupyterlab!r}; sys.exit(course.open_course('copy'))"
    job = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, start_new_session=True)
    try:
        while not (tmp_path / "ready").exists():
            assert job.poll() is None
            time.sleep(0.02)
        (os.killpg if to_all else os.kill)(job.pid, sent)
        assert job.wait(timeout=60) == 0
        with pytest.raises(ProcessLookupError):
            os.killpg(job.pid, 0)
    finally:
        job.kill()


def test_the_port_must_be_a_positive_integer(tmp_path):
    with pytest.raises(ValueError, match=r"port must be a positive integer. Received: 0"):
        course.open_course(tmp_path / "copy", port=0)
    with pytest.raises(ValueError, match=r"^port must be at most 65535. Received: 99999$"):
        course.open_course(tmp_path / "copy", port=99_999)
    assert not (tmp_path / "copy").exists()


def test_without_jupyterlab_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError, match=r'needs the extra "lab": pip install "gradlab\[lab\]"'
    ):
        course.open_course(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
