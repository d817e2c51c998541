"""Serves the lab to a classroom: Voila shows the page, and a Dask cluster trains the runs of all
visitors.

    python -m gradlab.lab.classroom --trainers 2 --visitors 30

Voila gives each visitor a kernel, which is a client of the cluster and does not import TensorFlow.
A few kernels are started before visitors come. One whose page is gone is ended
(gradlab.lab.classroom.page_socket), and with it its run.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import secrets
import socket
import sys
from collections.abc import Iterator, Sequence

from gradlab import _checks, runtime
from gradlab.lab.classroom import LIMITS
from gradlab.lab.classroom.limits import Limits
from gradlab.lab.classroom.local_cluster import workers_on_this_machine
from gradlab.lab.course import check_port, course_folder
from gradlab.lab.experiments.jobs.cluster import DASK, Cluster

READY_KERNELS = 3
PATIENCE = 120  # seconds for a kernel to start, and to send what a cell shows
# What a page may load: what this server sends, and what scripts make of it. Widgets need inline
# scripts.
PAGE_LOADS = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'self'"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until Ctrl-C.

    Args:
        arguments: the arguments of the command line. None: those of this process.
    """
    asked = _parser().parse_args(arguments)
    for needed in ("voila", "distributed", "cryptography"):
        if importlib.util.find_spec(needed) is None:
            sys.exit(
                'gradlab: a classroom needs the extra "app": pip install "gradlab[app]". '
                f"Received: no {needed}"
            )
    try:
        _checks.positive_integer("trainers", asked.trainers)
        check_port(asked.port)
        limits = Limits(
            **{each.name: getattr(asked, each.name) for each in dataclasses.fields(Limits)}
        )
        _allow_many_files()
        with _cluster(asked):
            os.environ[LIMITS] = json.dumps(dataclasses.asdict(limits))
            token = "" if asked.host in LOOPBACK else secrets.token_urlsafe(12)
            print(_sentence(asked, token), flush=True)
            _serve(asked, token)
    except (ValueError, OSError) as error:
        sys.exit(f"gradlab: {error}")


@contextlib.contextmanager
def _cluster(asked: argparse.Namespace) -> Iterator[None]:
    """The cluster that labs find in the environment."""
    if asked.dask:
        Cluster(asked.dask).client().close()  # a wrong address is an error before anything starts
        os.environ[DASK] = asked.dask
        yield
    else:
        with workers_on_this_machine(asked.trainers):
            yield


def _allow_many_files() -> None:
    """A socket is a file, and many systems allow a program 1,024 unless it asks for more."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # not on Windows

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _serve(asked: argparse.Namespace, token: str) -> None:
    from gradlab.lab.classroom.entrance import VISITORS
    from gradlab.lab.classroom.page_socket import BYTES, GONE, ClassroomApp

    options = [
        str(course_folder() / "app" / "lab.ipynb"),
        f"--Voila.ip={asked.host}",
        f"--port={asked.port}",
        f"--token={token}",
        f"--theme={asked.theme}",
        # Voila writes ?theme= into its page as it comes, with whatever script is in it.
        "--VoilaConfiguration.allow_theme_override=NO",
        "--VoilaConfiguration.allow_template_override=NO",
        "--preheat_kernel=True",
        f"--pool_size={READY_KERNELS}",
        # `Kernels` ends those whose page was never opened, and `PageSocket` all others.
        "--VoilaConfiguration.multi_kernel_manager_class=gradlab.lab.classroom.kernels.Kernels",
        f"--MappingKernelManager.cull_idle_timeout={math.ceil(asked.gone)}",
        f"--MappingKernelManager.cull_interval={math.ceil(asked.gone / 3)}",
        "--KernelManager.autorestart=False",  # one that ends has been released
        # On a busy machine, a kernel's outputs may come long after its reply. Those that come later
        # are lost: no lab.
        f"--VoilaExecutor.startup_timeout={PATIENCE}",
        f"--VoilaExecutor.iopub_timeout={PATIENCE}",
    ]
    options += ["--no-browser"] * asked.no_browser
    settings = {
        GONE: asked.gone,
        VISITORS: asked.visitors,
        "headers": {"Content-Security-Policy": PAGE_LOADS},
        "websocket_max_message_size": BYTES,
    }
    ClassroomApp.launch_instance(options, tornado_settings=settings)


def _sentence(asked: argparse.Namespace, token: str) -> str:
    where = f"the Dask cluster {asked.dask}" if asked.dask else "this machine"
    at_once = "" if asked.dask else f"{asked.trainers} at once "
    words = (
        f"gradlab: a lab for at most {asked.visitors} visitors, whose runs are trained {at_once}on "
        f"{where}"
    )
    if not token:
        return f"{words}: http://{asked.host}:{asked.port} (on this machine only; --host 0.0.0.0 lets others in)"
    return (
        f"{words}. Who can reach this machine and has the link can use it, and what they see is "
        f"not encrypted. The link: http://{socket.gethostname()}:{asked.port}/?token={token}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gradlab.lab.classroom", description="Serve the lab to a classroom."
    )
    add = parser.add_argument
    add(
        "--host",
        default="127.0.0.1",
        help="0.0.0.0 lets other machines in, with a token (default: %(default)s)",
    )
    add("--port", type=int, default=8866, help="(default: %(default)s)")
    add(
        "--trainers",
        type=int,
        default=runtime.cores(),
        help="runs at once on this machine (default: one for each core)",
    )
    add(
        "--visitors",
        type=int,
        default=Limits.visitors,
        help="visitors at most (default: %(default)s)",
    )
    add(
        "--seconds",
        type=float,
        default=Limits.seconds,
        help="longest time for which a run may train (default: %(default)g)",
    )
    add(
        "--examples",
        type=int,
        default=Limits.examples,
        help="most examples of a run (default: %(default)s)",
    )
    microbatches = "most micro-batches of a run (default: %(default)s)"
    add("--microbatches", type=int, default=Limits.microbatches, help=microbatches)
    add(
        "--idle",
        type=float,
        default=Limits.idle,
        help="idle seconds before a release (default: %(default)g)",
    )
    add(
        "--gone",
        type=float,
        default=Limits.gone,
        help="seconds until a silent page is ended (default: %(default)g)",
    )
    add("--dask", metavar="ADDRESS", help="train on the Dask cluster with this scheduler")
    add("--theme", choices=("light", "dark"), default="light", help="(default: %(default)s)")
    add("--no-browser", action="store_true", help="do not open a web browser")
    return parser
