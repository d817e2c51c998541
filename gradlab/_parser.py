"""The options of the command line. This module does not import TensorFlow, so --help is fast."""

import argparse
import pathlib
from collections.abc import Callable

from gradlab import __version__

# The studies of gradlab.lab.reproduce, which --help lists without importing them.
STUDIES = {
    "averaging": "Chlebus 2018: accuracy against the division of a batch of 100 (the default)",
    "noise-scale": "McCandlish et al. 2018: the gradient noise scale of MNIST",
    "noisy-quadratic": "Zhang et al. 2019: updates to a target against the batch",
    "growing-batch": "Smith et al. 2018 and Meterez et al. 2025: growing batches against falling "
    "learning rates",
    "late-switching": "Wang et al. 2026: large batches at the end of training only",
    "vanilla-sgd": "Marek et al. 2025: momentum for large and for small batches",
    "surge": "Li et al. 2024: the best rate of optimizers that follow signs",
    "adam-rule": "Malladi et al. 2022: Adam's hyperparameters for a larger batch",
    "norm-layers": "Gray et al. 2024: the noise scale from normalization layers alone",
    "half-life": "Marek et al. 2025: Adam's half-life in tokens, for small batches of a language model",
    "small-batches": "Masters and Luschi 2018: small batches against large ones at equal cost",
}
FIGURES = ("losses", "accuracy", "loss_noise", "noise_scale", "cost")

# The fields of an experiment as options: type, placeholder and help. They are listed here because
# importing Experiment would start TensorFlow for --help.
OPTIONS: dict[str, tuple[type, str, str]] = {
    "dataset": (str, "NAME", "mnist, fashion_mnist or cifar10 (default: mnist)"),
    "model": (str, "NAME", "lenet, dense or vgg (default: lenet)"),
    "method": (
        str,
        "NAME",
        "large_batch, towers, placeholders, variables or microbatched (default: variables)",
    ),
    "microbatch_size": (int, "N", "examples of one forward and backward pass (default: 20)"),
    "accumulation_steps": (int, "N", "micro-batches per update (default: 5)"),
    "towers": (int, "N", "copies of the computation (default: 1)"),
    "updates": (
        int,
        "N",
        "train for this number of updates (default: 1000 if no other budget is given)",
    ),
    "examples": (int, "N", "train for this number of examples instead"),
    "seconds": (float, "X", "train for this time instead"),
    "seeds": (int, "N", "how many trainings, with the seeds 0, 1, 2 and so on (default: 10)"),
    "optimizer": (str, "NAME", "sgd, momentum, adam or adamw (default: adam)"),
    "learning_rate": (float, "X", "(default: 0.001)"),
    "eval_every": (
        int,
        "N",
        "updates between measurements of the accuracy (default: ten measurements per training)",
    ),
}


def parser(prog: str) -> argparse.ArgumentParser:
    """Make the parser of all commands. The name of the chosen one is the argument `command` of what
    it returns.

    Args:
        prog: the program's name, for the help.
    """
    made = argparse.ArgumentParser(
        prog=prog, description="Gradient averaging and accumulation with TensorFlow."
    )
    made.add_argument("--version", action="version", version=f"gradlab {__version__}")
    commands = made.add_subparsers(required=True, metavar="COMMAND", dest="command")

    def add(name: str, summary: str, more: str = "") -> argparse.ArgumentParser:
        description = f"{summary[0].upper()}{summary[1:]}. {more}"
        return commands.add_parser(name, help=summary, description=description)

    lab = add(
        "lab",
        "copy the course to a folder and open it in JupyterLab",
        "It keeps files that you changed.",
    )
    lab.add_argument(
        "folder",
        nargs="?",
        metavar="FOLDER",
        default="gradlab-course",
        help="(default: %(default)s)",
    )
    lab.add_argument(
        "--port",
        type=int,
        default=8888,
        metavar="N",
        help="JupyterLab's port (default: %(default)s)",
    )
    lab.add_argument("--no-browser", action="store_true", help="do not open a web browser")
    lab.add_argument(
        "--dask",
        metavar="ADDRESS",
        help="train the labs' runs on the Dask cluster with this scheduler",
    )
    _add_training_commands(add)
    plot = add("plot", "draw a figure of saved results")
    plot.add_argument(
        "results", nargs="+", metavar="RESULT", help="files that run --out or sweep --out wrote"
    )
    plot.add_argument("--kind", choices=FIGURES, default="losses", help="(default: losses)")
    against = ("updates", "examples", "seconds")
    plot.add_argument(
        "--against",
        choices=against,
        default="updates",
        help="the horizontal axis of --kind accuracy",
    )
    plot.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="FILE",
        default="figure.png",
        help="(default: figure.png)",
    )
    devices = add("devices", "show the devices that TensorFlow uses")
    doctor = add("doctor", "check the installation, and say how to fix what is wrong")
    for each in (plot, devices, doctor):
        each.add_argument("--json", action="store_true", help="print JSON")
    _add_audit(add)
    launch = add(
        "launch",
        "run a Python script as a local cluster",
        "The script runs in several processes on this machine that train together, as a scheduler "
        "starts them on a real cluster. In the script, gradlab.cluster.strategy() connects them.",
    )
    launch.add_argument(
        "--workers", type=int, default=2, metavar="N", help="the number of processes (default: 2)"
    )
    launch.add_argument(
        "script", metavar="SCRIPT", help="the Python script; options after -- belong to the script"
    )
    launch.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's arguments"
    )
    return made


def _add_audit(add: Callable[..., argparse.ArgumentParser]) -> None:
    audit = add(
        "audit",
        "find out which accumulation bugs a training loop has",
        "MODULE:NAME is an adapter, a function train(problem) that help(gradlab.audit) describes. "
        "The exit status is 0 if no bug was found, 1 if one was, and 2 if the loop could not be "
        "audited.",
    )
    audit.add_argument(
        "adapter", metavar="MODULE:NAME", help="where the adapter is, such as my_loop:train"
    )
    audit.add_argument(
        "--supports",
        metavar="NAMES",
        help="what the loop supports, with commas between: tokens,clip_norm,schedule",
    )
    audit.add_argument(
        "--plot", type=pathlib.Path, metavar="FILE", help="draw the first finding in this PNG file"
    )
    form = audit.add_mutually_exclusive_group()
    form.add_argument(
        "--json", action="store_true", help="print JSON: clean, findings, skipped and notes"
    )
    form.add_argument("--markdown", action="store_true", help="print Markdown, for an issue thread")


def _add_training_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    run = add("run", "train one experiment")
    run.add_argument(
        "--out", type=pathlib.Path, metavar="FILE", help="save the result to this file (.npz)"
    )
    for name, (kind, placeholder, words) in OPTIONS.items():
        run.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=placeholder, help=words)
    sweep = add("sweep", "train the experiments of a TOML file")
    example = "help(gradlab.lab.experiments.jobs.sweep_file) shows an example"
    sweep.add_argument(
        "file",
        metavar="FILE",
        help=f"a TOML file with the tables [all], [[run]] and [grid]; {example}",
    )
    sweep.add_argument(
        "--out", type=pathlib.Path, metavar="FOLDER", help="save the results to this folder (.npz)"
    )
    listed = "; ".join(f"{name}: {words}" for name, words in STUDIES.items())
    reproduce = add(
        "reproduce",
        "run a published experiment again and compare",
        f"The published experiments: {listed}.",
    )
    reproduce.add_argument(
        "name", nargs="?", default="averaging", choices=STUDIES, metavar="NAME", help="which one"
    )
    reproduce.add_argument(
        "--quick", action="store_true", help="a small version that takes less than two minutes"
    )
    default = "(default: data/results; with --quick: write nothing)"
    reproduce.add_argument(
        "--out", type=pathlib.Path, metavar="FOLDER", help=f"where to write the files {default}"
    )
    for each in (run, sweep, reproduce):
        each.add_argument(
            "--processes",
            type=int,
            default=1,
            metavar="N",
            help="seeds to train at once (default: 1)",
        )
        each.add_argument(
            "--dask", metavar="ADDRESS", help="train on the Dask cluster with this scheduler"
        )
        each.add_argument(
            "--cache",
            type=pathlib.Path,
            metavar="FOLDER",
            help="cache finished runs in this folder",
        )
        each.add_argument("--json", action="store_true", help="print JSON: a list")
