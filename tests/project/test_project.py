"""What a newcomer meets first: make, the lists of dependencies."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LAB = ("lab", "app", "cluster")  # what make lab installs
EXTRAS = (*LAB, "docs", "dev")  # what make test and environment.yml install


def wanted_of(*extras: str) -> list[Requirement]:
    """What the core and these extras require. An extra may name another one, as in
    "gradlab[lab]"."""
    found = [Requirement(line) for line in PROJECT["dependencies"]]
    left, done = list(extras), set()
    while left:
        extra = left.pop(0)
        if extra not in done:
            done.add(extra)
            wanted = [Requirement(line) for line in PROJECT["optional-dependencies"][extra]]
            found += [each for each in wanted if each.name != "gradlab"]
            left += [other for each in wanted if each.name == "gradlab" for other in each.extras]
    return found


def pinned(file: str) -> dict[str, list[str]]:
    """Each package of a lock file -> its versions, one for each range of Python versions."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / file).read_text().splitlines():
        if re.match(r"[A-Za-z0-9]", line):
            requirement = Requirement(line.rstrip(" \\"))
            [specifier] = requirement.specifier
            assert specifier.operator == "==", line
            found.setdefault(canonicalize_name(requirement.name), []).append(specifier.version)
    return found


@pytest.mark.parametrize(
    ("file", "extras"), [("requirements.txt", LAB), ("requirements-dev.txt", EXTRAS)]
)
def test_requirements_pin_every_dependency_within_its_bounds(file, extras):
    found = pinned(file)
    for wanted in wanted_of(*extras):
        for version in found[canonicalize_name(wanted.name)]:
            assert wanted.specifier.contains(version), wanted.name


def test_the_lab_has_what_make_needs_and_the_versions_of_the_whole():
    lab, whole = pinned("requirements.txt"), pinned("requirements-dev.txt")
    assert {"setuptools", "uv"} < set(lab) < set(whole)
    assert all(set(versions) <= set(whole[name]) for name, versions in lab.items())


def test_the_lowest_requirements_pin_every_lower_bound():
    found = pinned("requirements-lowest.txt")
    for wanted in wanted_of("test"):
        [bound] = [each.version for each in wanted.specifier if each.operator == ">="]
        [version] = found[canonicalize_name(wanted.name)]
        # The lowest release that exists may be a little above the bound, such as 77.0.1 for >=77.
        assert Version(version).release[: len(Version(bound).release)] == Version(bound).release, (
            wanted.name
        )


def test_make_lock_names_the_extras_that_make_installs():
    recipe = (ROOT / "Makefile").read_text()
    [lab] = re.findall(r"^LAB +:= (.*)", recipe, flags=re.MULTILINE)
    assert tuple(re.findall(r"--extra (\w+)", lab)) == LAB
    for file, extras in (("-dev", "$(LAB) --extra docs --extra dev"), ("", "$(LAB)")):
        assert re.search(rf"\$\(LOCK\).* {re.escape(extras)} .*requirements{file}\.txt\n", recipe)
    [line] = re.findall(r".*--output-file requirements-lowest\.txt", recipe)
    assert re.findall(r"--extra (\w+)", line) == ["test"] and "--resolution lowest-direct" in line


@pytest.mark.parametrize(
    ("file", "least"),
    [("requirements.txt", 100), ("requirements-dev.txt", 150), ("requirements-lowest.txt", 40)],
)
def test_every_requirement_has_hashes(file, least):
    text = (ROOT / file).read_text()
    entries = re.split(r"\n(?=[A-Za-z0-9])", text.split("\n", 2)[2])
    assert len(entries) > least
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "http" not in re.sub(r"httpcore|httpx", "", text)  # no index is named


def test_environment_yml_agrees_with_pyproject():
    text = (ROOT / "environment.yml").read_text()
    environment = yaml.safe_load(text)
    assert environment["channels"] == ["conda-forge"]
    lines = [line for line in environment["dependencies"] if isinstance(line, str)]
    [by_pip] = [line["pip"] for line in environment["dependencies"] if isinstance(line, dict)]
    lines += [line for line in by_pip if not line.startswith("-")]
    conda = {Requirement(line).name: Requirement(line).specifier for line in lines}
    assert len(conda) == len(lines)  # none is listed twice
    assert conda.pop("python") == Requirement("python" + PROJECT["requires-python"]).specifier
    conda.pop("pip")
    assert conda == {wanted.name: wanted.specifier for wanted in wanted_of(*EXTRAS)}
    for line in text[text.index("dependencies:") :].splitlines()[1:]:
        assert "#" in line or line.strip() in ("- pip", "- pip:"), f"no reason beside: {line}"


def make(*arguments, folder, **environment) -> subprocess.CompletedProcess:
    # make test runs this under make: what that make tells its children is not for this one.
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env=variables | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def checkout(tmp_path):
    for name in ("Makefile", "pyproject.toml", "requirements.txt", "requirements-dev.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def pretend(folder, program: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o755)
    return f"PYTHON={path}"


def ready_environment(checkout) -> pathlib.Path:
    """A file with the arguments of each call of Python in the environment, which is there."""
    called = checkout / "called"
    stand_in = checkout / ".venv" / "bin" / "python"
    stand_in.parent.mkdir(parents=True)
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> {called}\n')
    stand_in.chmod(0o755)
    (checkout / ".venv" / "ready").touch()
    return called


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
class TestMake:
    def test_a_missing_python_gets_one_sentence(self, checkout):
        done = make("lab", "PYTHON=python-that-is-not", folder=checkout)
        assert done.returncode == 2 and not (checkout / ".venv").exists()
        assert done.stderr.startswith(
            "gradlab: no 'python-that-is-not' found: install Python 3.11 to 3.13"
        )

    @pytest.mark.parametrize(("version", "text"), [((3, 10), "3.10"), ((3, 14), "3.14")])
    def test_another_python_gets_one_sentence(self, checkout, version, text):
        # An interpreter that says it is of another version, and is otherwise real.
        program = f"""[ "$1" = --version ] && {{ echo "Python {text}.0"; exit; }}
shift; exec {sys.executable} -c "import sys; sys.version_info = {(*version, 0)}; exec(sys.argv[1])" "$@" """
        done = make("test", pretend(checkout, program), folder=checkout)
        assert done.returncode == 2 and not (checkout / ".venv").exists()
        assert (
            f"gradlab: needs Python 3.11 to 3.13, but '{checkout}/python' is Python {text}.0: "
            "install" in done.stderr
        )

    def test_a_python_without_venv_gets_one_sentence(self, checkout):
        program = f"""case "$2" in *ensurepip*) exit 1;; esac; exec {sys.executable} "$@" """
        done = make("lab", pretend(checkout, program), folder=checkout)
        assert done.returncode == 2 and not (checkout / ".venv").exists()
        assert (
            "has no venv module: install it, on Debian and Ubuntu with apt install python3-venv"
            in done.stderr
        )

    def test_a_ready_environment_is_used_at_once(self, checkout):
        called = ready_environment(checkout)
        done = make("lab", "PORT=9001", "BROWSER=no", "PYTHON=python-that-is-not", folder=checkout)
        assert done.returncode == 0, done.stderr
        command = called.read_text()
        assert "-m jupyterlab --ip=127.0.0.1 --port=9001 --ServerApp.port_retries=0" in command
        assert f"--ServerApp.root_dir={checkout}/notebooks" in command and "--no-browser" in command
        assert "/lab/tree/00_start_here.ipynb" in command
        called.write_text("")
        make("lab", folder=checkout)
        assert "--no-browser" not in called.read_text() and "port_retries" not in called.read_text()

    def test_only_what_needs_more_than_the_lab_installs_more(self, checkout):
        called = ready_environment(checkout)
        for target in ("lab", "app"):
            assert make(target, folder=checkout).returncode == 0
        assert "requirements" not in called.read_text()
        called.write_text("")
        for _ in range(2):
            assert make("test", folder=checkout).returncode == 0
        install, first, second = called.read_text().splitlines()
        assert install.startswith("-m uv pip install") and "-r requirements-dev.txt" in install
        assert first == second and first.startswith("-m pytest")

    def test_a_stale_environment_is_made_again(self, checkout):
        (checkout / ".venv").mkdir()
        (checkout / ".venv" / "ready").touch()
        os.utime(checkout / ".venv" / "ready", (0, 0))
        done = make("lab", "PYTHON=python-that-is-not", folder=checkout)
        assert "no 'python-that-is-not' found" in done.stderr
