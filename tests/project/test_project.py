"""What a newcomer meets first: make, the lists of dependencies."""

import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("lab", "app", "cluster", "docs", "dev")  # what make and environment.yml install
LINES = PROJECT["dependencies"] + [line for extra in EXTRAS for line in PROJECT["optional-dependencies"][extra]]
WANTED = [wanted for wanted in map(Requirement, LINES) if wanted.name != "gradlab"]  # an extra may name another one


def pinned() -> dict[str, list[Requirement]]:
    found: dict[str, list[Requirement]] = {}
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if re.match(r"[A-Za-z0-9]", line):
            requirement = Requirement(line.rstrip(" \\"))
            found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


def test_requirements_pin_every_dependency_within_its_bounds():
    found = pinned()
    for wanted in WANTED:
        pins = found[canonicalize_name(wanted.name)]
        for pin in pins:
            [specifier] = pin.specifier
            assert specifier.operator == "==" and wanted.specifier.contains(specifier.version), wanted.name


def test_make_lock_names_the_extras_that_make_installs():
    recipe = (ROOT / "Makefile").read_text()
    assert tuple(re.findall(r"--extra (\w+)", recipe)) == EXTRAS


def test_every_requirement_has_hashes():
    text = (ROOT / "requirements.txt").read_text()
    entries = re.split(r"\n(?=[A-Za-z0-9])", text.split("\n", 2)[2])
    assert len(entries) > 100
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
    assert conda.pop("python") == Requirement("python" + PROJECT["requires-python"]).specifier
    conda.pop("pip")
    assert conda == {wanted.name: wanted.specifier for wanted in WANTED}
    assert len(lines) == len(WANTED) + 2  # none is listed twice
    for line in text[text.index("dependencies:") :].splitlines()[1:]:
        assert "#" in line or line.strip() in ("- pip", "- pip:"), f"no reason beside: {line}"


def make(*arguments, folder, **environment) -> subprocess.CompletedProcess:
    # make test runs this under make: what that make tells its children is not for this one.
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *arguments], cwd=folder, env=variables | environment, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def checkout(tmp_path):
    for name in ("Makefile", "pyproject.toml", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def pretend(folder, program: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o755)
    return f"PYTHON={path}"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
class TestMake:
    def test_a_missing_python_gets_one_sentence(self, checkout):
        done = make("lab", "PYTHON=python-that-is-not", folder=checkout)
        assert done.returncode == 2 and not (checkout / ".venv").exists()
        assert done.stderr.startswith("gradlab: no 'python-that-is-not' found: install Python 3.11 to 3.13")

    @pytest.mark.parametrize(("version", "text"), [((3, 10), "3.10"), ((3, 14), "3.14")])
    def test_another_python_gets_one_sentence(self, checkout, version, text):
        # An interpreter that says it is of another version, and is otherwise real.
        program = f"""[ "$1" = --version ] && {{ echo "Python {text}.0"; exit; }}
shift; exec {sys.executable} -c "import sys; sys.version_info = {(*version, 0)}; exec(sys.argv[1])" "$@" """
        done = make("test", pretend(checkout, program), folder=checkout)
        assert done.returncode == 2 and not (checkout / ".venv").exists()
        assert f"gradlab: needs Python 3.11 to 3.13, but '{checkout}/python' is Python {text}.0: install" in done.stderr

    def test_a_python_without_venv_gets_one_sentence(self, checkout):
        program = f"""case "$2" in *ensurepip*) exit 1;; esac; exec {sys.executable} "$@" """
        done = make("lab", pretend(checkout, program), folder=checkout)
        assert done.returncode == 2 and not (checkout / ".venv").exists()
        assert "has no venv module: install it, on Debian and Ubuntu with apt install python3-venv" in done.stderr

    def test_a_ready_environment_is_used_at_once(self, checkout):
        (checkout / ".venv" / "bin").mkdir(parents=True)
        called = checkout / "called"
        stand_in = checkout / ".venv" / "bin" / "python"
        stand_in.write_text(f'#!/bin/sh\necho "$@" > {called}\n')
        stand_in.chmod(0o755)
        (checkout / ".venv" / "ready").touch()
        done = make("lab", "PORT=9001", "BROWSER=no", "PYTHON=python-that-is-not", folder=checkout)
        assert done.returncode == 0, done.stderr
        command = called.read_text()
        assert "-m jupyterlab --ip=127.0.0.1 --port=9001 --ServerApp.port_retries=0" in command
        assert f"--ServerApp.root_dir={checkout}/notebooks" in command and "--no-browser" in command
        assert "/lab/tree/00_start_here.ipynb" in command
        make("lab", folder=checkout)
        assert "--no-browser" not in called.read_text() and "port_retries" not in called.read_text()

    def test_a_stale_environment_is_made_again(self, checkout):
        (checkout / ".venv").mkdir()
        (checkout / ".venv" / "ready").touch()
        os.utime(checkout / ".venv" / "ready", (0, 0))
        done = make("lab", "PYTHON=python-that-is-not", folder=checkout)
        assert "no 'python-that-is-not' found" in done.stderr
