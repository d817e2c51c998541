"""A classroom's server for tests, with real kernels and trainers."""

import contextlib
import pathlib
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator

import pytest
import websocket
from events import is_running
from lab_page import Lab, free_port, listens, new_page, until_up
from playwright.sync_api import TimeoutError as PlaywrightTimeout

V1 = "v1.kernel.websocket.jupyter.org"


class Classroom:
    """A server for the tests.

    Args:
        log: a file for what it says.
        *options: options of the command line.
        port: the port, or None for a free one.
    """

    def __init__(self, log: pathlib.Path, *options: str, port: int | None = None):
        self.port, self.log = port or free_port(), log
        self.hosts: set[str] = set()  # from which its pages have loaded anything
        command = [
            sys.executable,
            "-m",
            "gradlab.lab.classroom",
            "--no-browser",
            f"--port={self.port}",
            *options,
        ]
        with log.open("ab") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        until_up(lambda: listens(self.port), self.process, log)

    def said(self) -> str:
        return self.log.read_text()

    def children(self, word: str) -> set[int]:
        """The processes of the server with this word in their command line."""
        found = set()
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                if parent == self.process.pid and word in (folder / "cmdline").read_text():
                    found.add(int(folder.name))
        return {pid for pid in found if is_running(pid)}

    def kernels(self) -> set[int]:
        return self.children("ipykernel_launcher")

    def trainers(self) -> set[int]:
        return self.children("spawn_main")

    def open(self, browser, query: str = ""):
        """A page that has begun to load."""
        page = new_page(browser, viewport={"width": 1280, "height": 800}, accept_downloads=True)
        page.on(
            "request", lambda request: self.hosts.add(urllib.parse.urlsplit(request.url).netloc)
        )
        page.goto(f"http://127.0.0.1:{self.port}/{query}", wait_until="domcontentloaded")
        return page

    def page(self, browser, query: str = "") -> Lab:
        """A visitor's page with a lab. When none appears, the test says what the page and the
        server said."""
        page = self.open(browser, query)
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("requestfailed", lambda request: said.append(f"{request.url}: {request.failure}"))
        page.on(
            "response",
            lambda answer: answer.status >= 400 and said.append(f"{answer.url}: {answer.status}"),
        )
        try:
            page.locator(".gradlab-lab").wait_for()
        except PlaywrightTimeout:
            pytest.fail(
                "\n".join(
                    [
                        "no lab. The page:",
                        page.inner_text("body"),
                        *said,
                        "The server:",
                        self.said(),
                    ]
                )
            )
        return Lab(page)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(120)


@contextlib.contextmanager
def classrooms(log: pathlib.Path) -> Iterator[Callable[..., Classroom]]:
    """A function that starts a server. At the end all are stopped, and nothing of them is left."""
    running: list[Classroom] = []

    def start(*options: str, **more: int) -> Classroom:
        running.append(Classroom(log, *options, **more))
        return running[-1]

    yield start
    for server in running:
        server.stop()
        assert not server.kernels() and not server.trainers()
        # "": data and blobs of the page itself
        assert server.hosts <= {f"127.0.0.1:{server.port}", ""}


def status_of(address: str) -> int:
    """The status of an address; 403 if it leads to the login page."""
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            return 403 if "/login" in answer.url else answer.status
    except urllib.error.HTTPError as error:
        return error.code


def page_of(port: int, query: str = "") -> str:
    """The HTML of a new visitor's page."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{query}", timeout=60) as answer:
        return answer.read().decode()


def kernel_of(page: str) -> str:
    """The kernel of a page."""
    return re.search(r'"kernelId": "([^"]+)"', page)[1]


def channels(port: int, kernel: str, protocol: str | None = V1) -> websocket.WebSocket:
    """An open socket to a kernel."""
    address = f"ws://127.0.0.1:{port}/api/kernels/{kernel}/channels"
    return websocket.create_connection(
        address, subprotocols=[protocol] if protocol else None, timeout=60
    )
