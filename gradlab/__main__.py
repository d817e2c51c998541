"""The command line: python -m gradlab COMMAND; python -m gradlab --help lists the commands."""

import argparse
import contextlib
import json
import multiprocessing
import pathlib
import sys
from collections.abc import Iterator

from gradlab import _checks, cluster, runtime

FIGURES = ("losses", "accuracy", "loss_noise", "noise_scale", "cost")
INTERRUPTED = 130  # what a shell gives for Ctrl-C


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status: 0 well, 1 something failed, 2 bad input, 130 interrupted."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    try:
        return chosen.command(chosen)
    except ValueError as error:
        parser.error(str(error))  # status 2
    except (OSError, RuntimeError) as error:
        print(f"gradlab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "gradlab: interrupted; the runs that were finished are kept, and the same command goes on from there",
            file=sys.stderr,
        )
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gradlab", description="gradlab's commands")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command, words: str, **more) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=words, description=more.pop("description", words[0].upper() + words[1:] + ".")
        )
        added.set_defaults(command=command)
        return added

    run = add("run", _run, "train one experiment")
    run.add_argument("--out", type=pathlib.Path, metavar="FILE", help="save the result there (.npz)")
    _add_experiment(run)
    sweep = add("sweep", _sweep, "train the experiments of a TOML file")
    sweep.add_argument("file", help="tables [all], [[run]] and [grid]: see gradlab/lab/sweep_file.py")
    sweep.add_argument("--out", type=pathlib.Path, metavar="FOLDER", help="save the results there (.npz)")
    reproduce = add(
        "reproduce", _reproduce, "run the published experiment and print its table beside the published one"
    )
    reproduce.add_argument("--quick", action="store_true", help="a small version, in under two minutes")
    reproduce.add_argument(
        "--out", type=pathlib.Path, metavar="FOLDER", help="where to write (default: data/results; --quick: nowhere)"
    )
    for each in (run, sweep, reproduce):
        each.add_argument(
            "--processes", type=int, default=1, metavar="N", help="how many seeds to train at once (default: 1)"
        )
        each.add_argument("--dask", metavar="ADDRESS", help="train on the Dask cluster whose scheduler is there")
        each.add_argument("--cache", metavar="FOLDER", help="keep finished runs there")
    plot = add("plot", _plot, "draw a figure of saved results")
    plot.add_argument("results", nargs="+", metavar="RESULT", help="files that run --out or sweep --out wrote")
    plot.add_argument("--kind", choices=FIGURES, default="losses", help="(default: losses)")
    plot.add_argument("--against", choices=("updates", "examples", "seconds"), default="updates", help="for accuracy")
    plot.add_argument("--out", type=pathlib.Path, metavar="FILE", default="figure.png", help="(default: figure.png)")
    devices = add("devices", _devices, "show what TensorFlow computes on")
    doctor = add("doctor", _doctor, "check the installation, and say how to mend what is wrong")
    for each in (run, sweep, reproduce, plot, devices, doctor):
        each.add_argument("--json", action="store_true", help="print JSON")
    launch = add(
        "launch",
        _launch,
        "run a Python script as a local cluster",
        description="Runs a Python script in several processes on this machine that train together, to try out what a "
        "scheduler starts on a real cluster. In the script, gradlab.cluster.strategy() finds the others.",
    )
    launch.add_argument("--workers", type=int, default=2, help="how many processes (default: 2)")
    launch.add_argument("script", help="the Python script; after -- it and its arguments are taken as they are")
    launch.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's arguments")
    return parser


# An experiment's fields as options. They are written out, because asking Experiment would start TensorFlow for --help.
OPTIONS = {
    "dataset": str,
    "model": str,
    "method": str,
    "microbatch_size": int,
    "accumulation_steps": int,
    "towers": int,
    "updates": int,
    "examples": int,
    "seconds": float,
    "seeds": int,
    "optimizer": str,
    "learning_rate": float,
    "eval_every": int,
}


def _add_experiment(parser: argparse.ArgumentParser) -> None:
    for name, kind in OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=kind.__name__.upper())


def _run(chosen) -> int:
    values = {name: getattr(chosen, name) for name in OPTIONS if getattr(chosen, name) is not None}
    [result] = _results(chosen, lambda: [_lab("experiment").Experiment(**values)])
    if chosen.out:
        result.save(chosen.out)
    return 0


def _sweep(chosen) -> int:
    results = _results(chosen, lambda: _lab("sweep_file").read(chosen.file))
    if chosen.out:
        chosen.out.mkdir(parents=True, exist_ok=True)
        for number, result in enumerate(results):
            e = result.experiment
            result.save(chosen.out / f"{number:02}-{e.method}-{e.accumulation_steps}x{e.microbatch_size}.npz")
    return 0


def _reproduce(chosen) -> int:
    def show(results):
        reproduce = _lab("reproduce")
        rows = reproduce.table(results)
        print(json.dumps(rows, indent=1) if chosen.json else reproduce.text(rows))

    results = _results(chosen, lambda: _lab("reproduce").experiments(chosen.quick), show)
    folder = chosen.out or (None if chosen.quick else pathlib.Path("data", "results"))
    if folder is not None:
        for file in _lab("reproduce").write(results, folder):
            print(f"written: {file}", file=sys.stderr)
    return 0


def _plot(chosen) -> int:
    plots, result = _lab("plots"), _lab("result")
    more = {"against": chosen.against} if chosen.kind == "accuracy" else {}
    figure = getattr(plots, chosen.kind)([result.Result.load(path) for path in chosen.results], **more)
    chosen.out.write_bytes(plots.to_png(figure))
    words = figure.get_label()
    print(json.dumps({"file": str(chosen.out), "text": words}) if chosen.json else f"{chosen.out}: {words}")
    return 0


def _devices(chosen) -> int:
    with contextlib.redirect_stdout(sys.stderr):
        chose = runtime.setup()
    environment = _lab("environment").describe()
    found = {"towers": list(chose.devices), **{name: environment[name] for name in ("device", "processor", "threads")}}
    print(json.dumps(found) if chosen.json else "\n".join(f"{name:>10}: {value}" for name, value in found.items()))
    return 0


def _doctor(chosen) -> int:
    from dataclasses import asdict

    with runtime.without_startup_noise():
        findings = _lab("doctor").examine()
    if chosen.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            print(f"{'good' if finding.good else 'BAD':>5}  {finding.name}: {finding.found}")
            if finding.mend:
                print(f"       mend: {finding.mend}")
    return 0 if all(finding.good for finding in findings) else 1


def _launch(chosen) -> int:
    return cluster.launch([sys.executable, chosen.script, *chosen.arguments], chosen.workers)


def _results(chosen, experiments, show=None) -> list:
    """Trains the experiments that a function gives, shows their results and returns them."""
    if chosen.dask and chosen.processes != 1:
        raise ValueError("give --processes or --dask. Received: both")
    _checks.positive_integer("processes", chosen.processes)
    experiments = experiments()
    towers = max(experiment.towers for experiment in experiments)
    with contextlib.redirect_stdout(sys.stderr):
        runtime.setup(towers=towers if towers > 1 else None, seed=0)
    with _executor(chosen) as executor:
        results = _lab("sweep").sweep(experiments, executor, chosen.cache, progress=sys.stderr.isatty())
    if show is not None:
        show(results)
    elif chosen.json:
        print(json.dumps([result.summary() for result in results], indent=1))
    else:
        for result in results:
            print(result)
            for name, value in result.summary().items():
                if name not in ("experiment", "endings"):
                    print(f"    {name.replace('_', ' ')}: {value}")
    return results


@contextlib.contextmanager
def _executor(chosen) -> Iterator:
    """What the options say to train on: this process (None), several, or a Dask cluster."""
    if chosen.dask:
        try:
            from distributed import Client
        except ImportError:
            raise ValueError('--dask needs the extra "cluster": pip install "gradlab[cluster]"') from None
        with Client(chosen.dask) as client:
            yield client.get_executor()
    elif chosen.processes != 1:
        pool = _lab("sweep").processes(chosen.processes)
        try:
            yield pool
        except BaseException:
            for child in multiprocessing.active_children():  # else the pool would first finish what it is at
                child.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    else:
        yield None


def _lab(module: str):
    """A module of the lab. They start TensorFlow, so the command line imports them when it needs them."""
    import importlib

    with runtime.without_startup_noise():
        return importlib.import_module(f"gradlab.lab.{module}")


if __name__ == "__main__":
    sys.exit(main())
