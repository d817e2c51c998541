"""The load test of the classroom: visitors who move sliders, run, pin, reload and leave, all on
this machine.

    python -m benchmarks.classroom --visitors 30 --minutes 5
    python -m benchmarks.classroom --visitors 8 --minutes 2 --voila      (Voila as it comes, for comparison)

A few visitors are real Chromium pages. The others speak to the same addresses and sockets as a page
does, and ask for numbers as charts.js does. The visitors come within a minute.
"""

import argparse
import contextlib
import pathlib
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.classroom.page import LONGEST, Figures, PageWithoutBrowser
from gradlab.lab.classroom.entrance import AGAIN_SECONDS

LATE_SECONDS = 30  # after the end, in which visitors finish what they do
# In which all visitors come; after which nothing of them should be left
COME_SECONDS, LEFT_SECONDS = 60, 60
PLAIN = "import gradlab\n_ = gradlab.setup(towers=2, seed=0)\nlab = gradlab.AccumulationLab()\nlab"


def _visit(port: int, figures: Figures, seed: int, wait: float, end: float) -> None:
    """The life of one visitor, who comes back after leaving."""
    rng = random.Random(seed)
    time.sleep(wait)
    while time.monotonic() < end:
        visitor = None
        try:
            visitor = PageWithoutBrowser(port, figures, rng, end)
            after = visitor.live()
            figures.count(after)
            if after == "leave":
                time.sleep(rng.uniform(5, 20))
        except urllib.error.HTTPError as error:
            # Of a full classroom, whose page tries again
            figures.count("refused" if error.code == 503 else f"lost: {error}")
            time.sleep(AGAIN_SECONDS)
        except Exception as error:
            figures.count(f"lost: {type(error).__name__}: {str(error)[:80]}")
            time.sleep(1)
        finally:
            if visitor is not None:
                with contextlib.suppress(Exception):
                    visitor.close()


def _use_pages(port: int, figures: Figures, pages: int, end: float) -> None:
    """Real pages in one Chromium, which move k and see their first point and the view of one
    update."""
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "support"))
    import lab_page
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = lab_page.launch(playwright)
        labs = []
        for _ in range(pages):
            began = time.monotonic()
            page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
            page.set_default_timeout(1000 * LONGEST)
            page.goto(f"http://127.0.0.1:{port}/", wait_until="domcontentloaded")
            page.locator(".gradlab-status [role=status]").wait_for()
            figures.add("browser: page to usable lab", time.monotonic() - began)
            labs.append(lab_page.Lab(page))
        while time.monotonic() < end:
            for lab in labs:
                before, began = (
                    lab.root.locator(".gradlab-added").first.inner_text(),
                    time.monotonic(),
                )
                lab.press(
                    "accumulation_steps", random.choice(["ArrowRight", "ArrowLeft", "PageUp"])
                )
                while lab.root.locator(".gradlab-added").first.inner_text() == before:
                    if time.monotonic() - began > 5:
                        break  # the slider was at its end
                else:
                    figures.add("browser: key to view of one update", time.monotonic() - began)
                time.sleep(1)
        browser.close()


def memory_of_tree(pid: int) -> float:
    """The MiB of a process and all its descendants; memory that they share counts once."""
    children = defaultdict(list)
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children[int(stat.read_text().rsplit(")", 1)[1].split()[1])].append(
                int(stat.parent.name)
            )
    total, waiting = 0.0, [pid]
    while waiting:
        one = waiting.pop()
        waiting += children[one]
        with contextlib.suppress(OSError):
            rollup = pathlib.Path(f"/proc/{one}/smaps_rollup").read_text()
            total += int(re.search(r"\nPss: +(\d+)", rollup)[1]) / 1024  # type: ignore[index]
    return total


def over_time(seen: list[tuple[float, float]], began: float, end: float) -> dict[str, float]:
    """The peak, and the medians over the second and the last fifth of the time: what grows shows
    there.

    Args:
        seen: (time, MiB).
        began, end: the time in which visitors were there.
    """

    def median(fifth: int) -> float:
        parts = [
            mebibytes for at, mebibytes in seen if int(5 * (at - began) / (end - began)) == fifth
        ]
        return statistics.median(parts)

    peak = max(mebibytes for _, mebibytes in seen)
    return {
        "peak": peak,
        "in the second fifth of the time": median(1),
        "in the last fifth": median(4),
    }


def _start(port: int, voila: bool, folder: str) -> subprocess.Popen:
    if not voila:
        command = [sys.executable, "-m", "gradlab.lab.classroom", "--no-browser", f"--port={port}"]
    else:
        import nbformat

        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(PLAIN)])
        notebook.metadata.kernelspec = {
            "name": "python3",
            "display_name": "Python 3",
            "language": "python",
        }
        nbformat.write(notebook, pathlib.Path(folder) / "lab.ipynb")
        command = [
            sys.executable,
            "-m",
            "voila",
            "--no-browser",
            f"--port={port}",
            f"{folder}/lab.ipynb",
        ]
    log = open(pathlib.Path(folder) / "log", "wb")  # noqa: SIM115
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(0.2)


def measure(visitors: int, minutes: float, pages: int, voila: bool) -> dict:
    """Runs the load test.

    Returns:
        {"seconds": {name: {"median", "p90", "most", "count"}}, "counts": {name: number}, "MiB":
        {name: memory}}.
    """
    figures = Figures()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        process = _start(port, voila, folder)
        try:
            time.sleep(20)  # until trainers and kernels in reserve are ready, as before a lesson
            memory = {"before anyone came": memory_of_tree(process.pid)}
            end = time.monotonic() + 60 * minutes
            waits = [COME_SECONDS * number / visitors for number in range(visitors - pages)]
            works = [
                (_visit, (port, figures, number, wait, end)) for number, wait in enumerate(waits)
            ]
            works += [(_use_pages, (port, figures, pages, end))] if pages else []
            threads = [
                threading.Thread(target=each, args=arguments, daemon=True)
                for each, arguments in works
            ]
            for thread in threads:
                thread.start()
            began, seen = time.monotonic(), list[tuple[float, float]]()
            while (
                any(thread.is_alive() for thread in threads)
                and time.monotonic() < end + LATE_SECONDS
            ):
                seen.append((time.monotonic(), memory_of_tree(process.pid)))
                time.sleep(1)
            for _ in filter(threading.Thread.is_alive, threads):
                figures.count("lost: still waits at the end")
            time.sleep(LEFT_SECONDS)
            memory |= over_time(seen, began, end)
            memory[f"{LEFT_SECONDS} s after all left"] = memory_of_tree(process.pid)
        finally:
            process.terminate()
            process.wait(60)
    seconds = {
        name: {
            "median": statistics.median(all_of),
            "p90": sorted(all_of)[int(0.9 * len(all_of))],
            "most": max(all_of),
            "count": len(all_of),
        }
        for name, all_of in figures.seconds.items()
    }
    return {"seconds": seconds, "counts": dict(figures.counts), "MiB": memory}


def as_table(found: dict) -> str:
    """Writes what `measure` found as Markdown."""
    lines = [
        "| seconds | median | 90 % | most | how often |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, row in found["seconds"].items():
        figures = " | ".join(f"{row[key]:.2f}" for key in ("median", "p90", "most"))
        lines.append(f"| {name} | {figures} | {row['count']} |")
    lines += ["", "| memory | MiB |", "| --- | ---: |"]
    lines += [f"| {name} | {value:,.0f} |" for name, value in found["MiB"].items()]
    counts = ", ".join(f"{name} {number}" for name, number in sorted(found["counts"].items()))
    return "\n".join([*lines, "", f"Counts: {counts or 'none'}."])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--visitors", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument(
        "--pages", type=int, default=2, help="how many of the visitors are real pages"
    )
    parser.add_argument("--voila", action="store_true", help="serve the lab with Voila as it comes")
    asked: Any = parser.parse_args(arguments)
    print("\n" + as_table(measure(asked.visitors, asked.minutes, asked.pages, asked.voila)))


if __name__ == "__main__":
    main()
