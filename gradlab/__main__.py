"""The command line: `gradlab COMMAND`, or `python -m gradlab COMMAND`. `gradlab --help` lists the
commands.

With --json, a command prints one JSON value in place of text:

- run, sweep: a list with one object per experiment, with the keys that `gradlab.Result.summary`
  describes;
- reproduce: a list with one object per row of the table, or for the other studies one per claim;
- doctor: a list with one object per check: name, good, found, fix;
- plot, devices, audit: one object.
"""

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gradlab import _checks, cluster, runtime
from gradlab._parser import OPTIONS, parser

INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended, as shells report it
TRAINING = ("run", "sweep", "reproduce")  # the commands that cache what is finished

# The packages of each extra. A command that needs one of them names the extra.
EXTRAS = {
    "lab": (
        *(
            "IPython",
            "PIL",
            "anywidget",
            "cloudpickle",
            "ipywidgets",
            "jupyter_client",
            "jupyter_core",
            "jupyterlab",
        ),
        *("matplotlib", "packaging", "pandas", "pygments", "tqdm", "traitlets"),
    ),
    "cluster": ("dask", "distributed"),
    "app": ("jupyter_server", "tornado", "voila"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the command and its options. None: those of this process.

    Returns:
        The exit status: 0 for success, 1 if something failed, 2 for invalid input, 130 after
        Ctrl-C.
    """
    prog = "python -m gradlab" if __name__ == "__main__" else "gradlab"
    try:
        chosen = parser(prog).parse_args(arguments)
    except SystemExit as end:  # argparse has printed the help, the version or an error
        return int(end.code or 0)
    try:
        return COMMANDS[chosen.command](chosen)
    except ValueError as error:
        return _failed(str(error), 2)
    except ModuleNotFoundError as error:
        return _failed(_missing_extra(error, chosen.command), 1)
    except OSError as error:  # without the number that str(error) begins with
        return _failed(
            f"{error.strerror}: {error.filename}"
            if error.filename
            else error.strerror or str(error),
            1,
        )
    except RuntimeError as error:
        return _failed(str(error), 1)
    except KeyboardInterrupt:
        kept = "; finished runs are cached, and the same command continues with the others"
        return _failed("interrupted" + kept * (chosen.command in TRAINING), INTERRUPTED)


def _lab(chosen: argparse.Namespace) -> int:
    if pathlib.Path(chosen.folder).is_file():
        raise ValueError(f"FOLDER must be a folder. Received: {chosen.folder}, which is a file")
    return _module("lab.course").open_course(
        chosen.folder, chosen.port, not chosen.no_browser, chosen.dask
    )


def _run(chosen: argparse.Namespace) -> int:
    _check_out_file(chosen.out)
    values = {name: getattr(chosen, name) for name in OPTIONS if getattr(chosen, name) is not None}
    [result] = _train(chosen, lambda: [_module("lab.experiments.experiment").Experiment(**values)])
    _print_summaries([result], chosen.json)
    if chosen.out:
        result.save(chosen.out)
    return 0


def _sweep(chosen: argparse.Namespace) -> int:
    _make_folder("--out", chosen.out)

    def experiments() -> list:
        with _readable("FILE must be a TOML file that describes a sweep", chosen.file):
            return _module("lab.experiments.jobs.sweep_file").read(chosen.file)

    results = _train(chosen, experiments)
    _print_summaries(results, chosen.json)
    if chosen.out:
        for number, result in enumerate(results):
            e = result.experiment
            result.save(
                chosen.out
                / f"{number:02}-{e.method}-{e.accumulation_steps}x{e.microbatch_size}.npz"
            )
    return 0


def _reproduce(chosen: argparse.Namespace) -> int:
    folder = chosen.out or (None if chosen.quick else pathlib.Path("data", "results"))
    _make_folder("--out", folder)
    if chosen.name == "averaging":
        results = _train(
            chosen, lambda: _module("lab.reproduce.averaging").experiments(chosen.quick)
        )
        made = _module("lab.reproduce.averaging").Averaging(results)
    else:
        if chosen.processes != 1 or chosen.dask or chosen.cache:
            raise ValueError(
                "--processes, --dask and --cache are for averaging only. Received: NAME "
                f"{chosen.name}"
            )
        study = _module(f"lab.reproduce.{chosen.name.replace('-', '_')}").study
        with contextlib.redirect_stdout(sys.stderr):
            runtime.setup(seed=0)
        made = study(chosen.quick)
    print(json.dumps(made.summary(), indent=1) if chosen.json else made.text())
    for file in made.write(folder) if folder is not None else ():
        print(f"written: {file}", file=sys.stderr)
    return 0


def _plot(chosen: argparse.Namespace) -> int:
    _check_out_file(chosen.out)
    plots = _module("lab.figures.plots")
    more = {"against": chosen.against} if chosen.kind == "accuracy" else {}
    figure = getattr(plots, chosen.kind)([_load(path) for path in chosen.results], **more)
    chosen.out.write_bytes(plots.to_png(figure))
    words = figure.get_label()
    print(
        json.dumps({"file": str(chosen.out), "text": words})
        if chosen.json
        else f"{chosen.out}: {words}"
    )
    return 0


def _devices(chosen: argparse.Namespace) -> int:
    with contextlib.redirect_stdout(sys.stderr):
        setup = runtime.setup()
    environment = _module("lab.experiments.environment").describe()
    found = {
        "towers": list(setup.devices),
        **{name: environment[name] for name in ("device", "processor", "threads")},
    }
    print(
        json.dumps(found)
        if chosen.json
        else "\n".join(f"{name:>10}: {value}" for name, value in found.items())
    )
    return 0


def _doctor(chosen: argparse.Namespace) -> int:
    from dataclasses import asdict

    with runtime.without_startup_noise():
        findings = _module("lab.doctor").examine()
    if chosen.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            print(f"{'good' if finding.good else 'BAD':>5}  {finding.name}: {finding.found}")
            if finding.fix:
                print(f"       fix: {finding.fix}")
    return 0 if all(finding.good for finding in findings) else 1


def _audit(chosen: argparse.Namespace) -> int:
    _check_out_file(chosen.plot, "--plot")
    found = _module("auditing.command").audit_named(chosen.adapter, chosen.supports)
    print(found.json() if chosen.json else found.markdown() if chosen.markdown else found.text())
    if chosen.plot and not found.clean:
        found.plot().savefig(chosen.plot)
    return 0 if found.clean else 1


def _launch(chosen: argparse.Namespace) -> int:
    with _readable("SCRIPT must be a Python script", chosen.script):
        open(chosen.script, "rb").close()
    return cluster.launch([sys.executable, chosen.script, *chosen.arguments], chosen.workers)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "lab": _lab,
    "run": _run,
    "sweep": _sweep,
    "reproduce": _reproduce,
    "plot": _plot,
    "devices": _devices,
    "doctor": _doctor,
    "audit": _audit,
    "launch": _launch,
}


def _train(chosen: argparse.Namespace, experiments: Callable[[], list]) -> list:
    """Check the options, make the experiments, train them and return their results."""
    if chosen.dask and chosen.processes != 1:
        raise ValueError("give --processes or --dask. Received: both")
    _checks.positive_integer("processes", chosen.processes)
    if chosen.dask:
        # A missing package is an error before TensorFlow starts
        importlib.import_module("distributed")
    sweep = _module("lab.experiments.jobs.sweep")
    _make_folder("--cache", chosen.cache)
    made = experiments()
    towers = max((experiment.towers for experiment in made), default=1)
    with contextlib.redirect_stdout(sys.stderr):
        runtime.setup(towers=towers if towers > 1 else None, seed=0)
    with _executor(chosen) as executor:
        return sweep.sweep(made, executor, chosen.cache, progress=sys.stderr.isatty())


def _print_summaries(results: Sequence, as_json: bool) -> None:
    summaries = [result.summary() for result in results]
    if as_json:
        print(json.dumps(summaries, indent=1))
    else:
        text = _module("lab.experiments.summary").text
        for result, summary in zip(results, summaries):
            print(f"{result}\n{text(summary)}")


@contextlib.contextmanager
def _executor(chosen: argparse.Namespace) -> Iterator:
    """What runs the jobs: None for this process, an executor for several processes or a Dask
    cluster."""
    if chosen.dask:
        from distributed import Client

        with Client(chosen.dask) as client:
            yield client.get_executor()
    elif chosen.processes != 1:
        pool = _module("lab.experiments.jobs.sweep").processes(chosen.processes)
        try:
            yield pool
        except BaseException:
            # Otherwise shutdown waits until their jobs are finished
            for child in multiprocessing.active_children():
                child.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    else:
        yield None


def _load(path: str) -> Any:
    """The result in a file."""
    rule = "RESULT must be a file that run --out or sweep --out wrote"
    result = _module("lab.experiments.result")
    result_file = _module("lab.experiments.result_file")
    with _readable(rule, path):
        try:
            return result.Result.load(path)
        except result_file.UnreadableResult as error:
            raise ValueError(f"{rule}. Received: {path}, {error.reason}") from None


@contextlib.contextmanager
def _readable(rule: str, path: str) -> Iterator[None]:
    """Replace the operating system's error for an unreadable file by a ValueError with the rule for
    that file."""
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{rule}. Received: {path}, which does not exist") from None
    except IsADirectoryError:
        raise ValueError(f"{rule}. Received: {path}, which is a folder") from None
    except OSError as error:
        raise ValueError(
            f"{rule}. Received: {path}, which cannot be read ({error.strerror})"
        ) from None


def _check_out_file(path: pathlib.Path | None, option: str = "--out") -> None:
    """Raise ValueError if the result could not be written to this path later."""
    rule = f"{option} must be a file in an existing folder"
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{rule}. Received: {path}, which is a folder")
    if not path.parent.is_dir():
        raise ValueError(f"{rule}. Received: {path}, but there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{rule} that you may write to. Received: {path}")


def _make_folder(option: str, path: pathlib.Path | None) -> None:
    """Create the folder that an option names, so that a wrong path is an error before the training
    starts."""
    if path is not None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            rule = f"{option} must be a folder that exists or can be created"
            raise ValueError(f"{rule}. Received: {path} ({error.strerror})") from None


def _module(name: str) -> Any:
    """Import a module of gradlab. The lab's modules start TensorFlow, so each command imports only
    what it needs."""
    with runtime.without_startup_noise():
        return importlib.import_module(f"gradlab.{name}")


def _missing_extra(error: ModuleNotFoundError, command: str) -> str:
    """The sentence for a package that is not installed; raises the error again if no extra has
    it."""
    missing = (error.name or "").split(".")[0]
    for extra, packages in EXTRAS.items():
        if missing in packages:
            return f'{command} needs the extra "{extra}": pip install "gradlab[{extra}]". Received: no module {missing}'
    raise error


def _failed(sentence: str, status: int) -> int:
    print(f"gradlab: {sentence}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
