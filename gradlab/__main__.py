"""The command line: python -m gradlab launch --workers 2 -- SCRIPT [ARGUMENTS]"""

import argparse
import sys

from gradlab import cluster


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m gradlab", description="gradlab's commands")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    launch = commands.add_parser(
        "launch",
        help="run a Python script as a local cluster",
        description="Runs a Python script in several processes on this machine that train together, to try out what a "
        "scheduler starts on a real cluster. In the script, gradlab.cluster.strategy() finds the others.",
    )
    launch.add_argument("--workers", type=int, default=2, help="how many processes (default: 2)")
    launch.add_argument("script", help="the Python script; after -- it and its arguments are taken as they are")
    launch.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's arguments")
    chosen = parser.parse_args(arguments)
    try:
        return cluster.launch([sys.executable, chosen.script, *chosen.arguments], chosen.workers)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
