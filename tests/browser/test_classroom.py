"""A classroom with real pages: its trainers and kernels, and what is left when pages or trainers
are gone."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pandas as pd
import pytest
import websocket
from classroom_server import V1, classrooms, status_of
from dask_processes import DaskProcesses
from distributed import Client
from events import is_running
from jupyter_server.services.kernels.connection.base import serialize_msg_to_ws_v1
from lab_page import (
    DEADLINE,
    FLAGS,
    SCREENSHOTS,
    Lab,
    chromium_path,
    new_page,
    until,
)

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ENDLESS = ("--examples=1000000000", "--microbatches=1000000000", "--seconds=100000")
SCROLLS = "(({ scrollHeight, clientHeight }) => scrollHeight > clientHeight)(document.getElementById('rendered_cells'))"


@pytest.fixture
def classroom(tmp_path):
    """A function that starts a server; all are stopped after the test."""
    with classrooms(tmp_path / "log") as start:
        yield start


def short_run(lab: Lab) -> Lab:
    """Ask for a short run in the place of the one that a page begins with, and wait for an end. With a
    load of 14 on two cores, it was once that of the long one."""
    lab.wait_for("running")
    lab.set_budget(20)
    lab.wait_for("finished")
    return lab


def long_run(lab: Lab) -> None:
    """Start a run that is under way until it is stopped."""
    lab.set_budget(50_000)
    until(lambda: re.search(r"update \d+ of 50000", lab.status()), lab.status)


def the_busy_one(processes: set[int]) -> int:
    """The process that computes now, whatever the others have computed before: its processor time
    grows by a second."""

    def ticks(pid: int) -> int:
        return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11])

    began = {pid: ticks(pid) for pid in processes}
    second = os.sysconf("SC_CLK_TCK")
    until(lambda: any(ticks(pid) - began[pid] >= second for pid in processes))
    return max(processes, key=lambda pid: ticks(pid) - began[pid])


def test_visitors_share_the_trainers_and_leave_nothing_behind(classroom, browser):
    server = classroom("--trainers=1", "--visitors=2", *ENDLESS)
    one = short_run(server.page(browser))
    one.page.screenshot(path=SCREENSHOTS / "classroom.png")
    assert not one.page.evaluate(SCROLLS), "all of it must fit in the window"
    one.press("accumulation_steps", "ArrowRight")
    until(lambda: "6 × 20 = 120" in one.text("batch"))
    until(lambda: "now: k = 6, b = 20" in one.words("losses"), one.status)
    one.wait_for("finished")
    with one.page.expect_download() as download:
        one.press("csv")
    one.show_more_views()
    one.page.mouse.wheel(0, 1000)

    def status_is_in_sight() -> bool:
        box = one.root.locator(".gradlab-status").bounding_box()
        return one.page.evaluate(SCROLLS) and -10 <= box["y"] <= 800 - box["height"]

    until(status_is_in_sight, lambda: "the status line must stay in sight")
    assert (
        set(pd.read_csv(download.value.path())["run"])
        and download.value.suggested_filename == "gradlab-runs.csv"
    )
    one.wait_for("downloaded: gradlab-runs.csv")

    long_run(one)
    other = server.page(browser)
    other.wait_for("waiting for a worker")
    third = server.open(browser)
    third.get_by_text(
        "The classroom is full: it has 2 visitors. This page tries again every 3 seconds."
    ).wait_for()
    third.context.close()

    one.page.reload()  # its run ends, and the other one's begins
    short_run(other)
    short_run(Lab(one.page))
    one.page.context.close()
    other.page.context.close()
    ready = server.kernels()
    # Those for the next ones
    until(lambda: len(server.kernels()) <= 3, lambda: f"{server.kernels()}, before {ready}")


def test_a_lost_trainer_and_a_lost_server(classroom, browser):
    server = classroom("--trainers=2", *ENDLESS)
    lab, other = server.page(browser), server.page(browser)
    for each in (lab, other):
        short_run(each)
    before = server.trainers()
    long_run(lab)
    busy = the_busy_one(before)
    os.kill(busy, signal.SIGKILL)
    lab.wait_for("a worker was lost: another repeats the run, and goes on")
    other.press("accumulation_steps", "ArrowRight")
    until(lambda: "now: k = 6, b = 20" in other.words("losses"), other.status)
    other.wait_for("finished")
    until(lambda: len(server.trainers()) == 2)
    assert busy not in server.trainers()

    children = server.kernels() | server.trainers()
    server.process.kill()
    server.process.wait()
    until(lambda: not any(map(is_running, children)))
    lab.press("run")
    until(lambda: "No answer from the kernel" in lab.text("lost"))
    again = classroom(port=server.port)
    lab.page.reload()
    short_run(Lab(lab.page))
    again.stop()
    for each in (lab, other):
        each.page.context.close()


def run_as_soon_as_possible(lab: Lab) -> None:
    """Press Run after each failure, until a trainer has the run. A press while a run waits would
    begin another."""

    def is_trained() -> bool:
        if lab.status().startswith("failed"):
            lab.press("run")
        return re.match("running|finished", lab.status()) is not None

    until(is_trained, lambda: f"{lab.status()} {lab.text('lost')}")


def pids_with(word: str) -> list[int]:
    """The processes with this word in their command line."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word in (folder / "cmdline").read_text() and is_running(int(folder.name)):
                found.append(int(folder.name))
    return found


SILENT = """
import random, sys, time
from benchmarks.classroom.page import Figures, PageWithoutBrowser
page = PageWithoutBrowser(int(sys.argv[1]), Figures(), random.Random(0), time.monotonic() + 600)
print("trains", flush=True)
page._read_for(600)
"""


def test_a_killed_browser_and_a_lost_network_leave_nothing_behind(classroom, browser):
    server = classroom("--trainers=1", "--visitors=2", *ENDLESS, "--gone=40")
    flags = [*FLAGS, "--gradlab-is-killed"]
    killed = browser.browser_type.launch(
        executable_path=chromium_path(), args=flags, timeout=1000 * DEADLINE
    )
    long_run(server.page(killed))
    lab = server.page(browser)
    lab.wait_for("waiting for a worker")
    for pid in pids_with("--gradlab-is-killed"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    short_run(lab)

    command = [sys.executable, "-c", SILENT, str(server.port)]
    silent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert silent.stdout.readline() == "trains\n"
        third = server.open(browser)
        third.get_by_text("The classroom is full: it has 2 visitors").wait_for()
        silent.send_signal(signal.SIGSTOP)  # its connection stays open, and nobody answers
        third.locator(".gradlab-lab").wait_for()  # the page has loaded again by itself
        run_as_soon_as_possible(Lab(third))
    finally:
        silent.kill()
        silent.communicate()
    for page in (lab.page, third):
        page.context.close()


def test_an_idle_visitor_is_told_and_released(classroom, browser):
    server = classroom("--trainers=1", "--visitors=1", "--idle=3")
    lab = short_run(server.page(browser))
    lab.wait_for("released after 0.05 minutes without a run: reload the page to go on")
    lab.page.screenshot(path=SCREENSHOTS / "classroom_idle.png")
    # The place is free, although the first page is still open
    other = short_run(server.page(browser))
    other.wait_for("released")
    lab.page.reload()
    short_run(Lab(lab.page))
    for each in (lab, other):
        each.page.context.close()


def test_a_classroom_on_a_cluster_survives_a_worker_and_the_scheduler(classroom, browser, tmp_path):
    cluster = DaskProcesses(tmp_path, workers=2)
    try:
        server = classroom("--trainers=2", *ENDLESS, f"--dask={cluster.address}")
        lab = short_run(server.page(browser))
        assert not server.trainers()
        long_run(lab)
        with Client(cluster.address) as client:
            [busy] = [address for address, keys in client.processing().items() if keys]
            name = client.scheduler_info()["workers"][busy]["name"]
        cluster.workers[int(name)].kill()
        lab.wait_for("a worker was lost: another repeats the run, and goes on")
        lab.press("run")  # a run of its own is lost once only
        until(lambda: "of 50000" in lab.status() and "lost" not in lab.status(), lab.status)
        cluster.stop()
        lab.wait_for("the cluster has no scheduler any more")
        lab.press("run")
        lab.wait_for(f"there must be a Dask scheduler at {cluster.address}: it does not answer")
        cluster.start()
        run_as_soon_as_possible(lab)
        lab.press("stop")
        lab.page.context.close()
    finally:
        cluster.stop()


def test_what_a_classroom_cannot_start_with():
    for option, sentence in (
        ("--visitors=0", "visitors must be a positive integer. Received: 0"),
        ("--trainers=0", "trainers must be a positive integer. Received: 0"),
        ("--port=99999", "port must be at most 65535. Received: 99999"),
        ("--gone=-1", "gone must be a finite number above 0. Received: -1"),
        (
            "--dask=tcp://127.0.0.1:1",
            "there must be a Dask scheduler at tcp://127.0.0.1:1: it does not answer",
        ),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "gradlab.lab.classroom", option], capture_output=True, text=True
        )
        assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(
            f"gradlab: {sentence}"
        ), done.stderr


LATE = """
import functools, sys, time
type(sys.stdout).flush = lambda stream: None  # which waits for the outputs before the reply is sent
late = get_ipython().kernel.iopub_thread
get_ipython().events.register("pre_run_cell", lambda info: late.schedule(functools.partial(time.sleep, 6)))
"""


def test_a_page_has_its_lab_though_the_kernel_sends_it_late(classroom, tmp_path, monkeypatch):
    startup = tmp_path / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "late.py").write_text(LATE)  # a cell's outputs come six seconds after its reply
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    server = classroom("--trainers=1")
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/", timeout=DEADLINE) as answer:
        assert "application/vnd.jupyter.widget-view+json" in answer.read().decode(), server.said()


def test_visitors_need_the_token_and_reach_nothing_else(classroom, browser):
    server = classroom("--host=0.0.0.0", "--trainers=1")
    [token] = re.findall(r"The link: \S+\?token=(\S+)", server.said())
    address = f"http://127.0.0.1:{server.port}"
    assert "is not encrypted" in server.said()
    for path in ("api/kernels", "api/contents", "api/terminals", "files/README.md", "tree", "lab"):
        assert status_of(f"{address}/{path}") in (403, 404), path
        assert status_of(f"{address}/{path}?token={token}") in (403, 404), path
    page = new_page(browser)
    page.goto(address, wait_until="domcontentloaded")
    assert page.locator(".gradlab-lab").count() == 0  # a login page
    lab = server.page(browser, f"?token={token}")
    lab.wait_for("running")
    kernel = lab.page.evaluate(
        "JSON.parse(document.getElementById('jupyter-config-data').textContent).kernelId"
    )
    written = pathlib.Path(server.log.parent / "written by a visitor")
    line = websocket.create_connection(
        f"ws://127.0.0.1:{server.port}/api/kernels/{kernel}/channels?token={token}",
        subprotocols=[V1],
        timeout=60,
    )
    for kind, content in (
        ("execute_request", {"code": f"open({str(written)!r}, 'w')", "silent": False}),
        ("kernel_info_request", {}),
    ):
        header = {
            "msg_type": kind,
            "msg_id": kind,
            "session": "1",
            "username": "",
            "version": "5.3",
            "date": "",
        }
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content}
        line.send_binary(
            serialize_msg_to_ws_v1(message, "shell", lambda part: json.dumps(part).encode())
        )
    while b"kernel_info_reply" not in line.recv():  # the kernel has answered what came after
        pass
    line.close()
    assert not written.exists()
    for context in (page.context, lab.page.context):
        context.close()
