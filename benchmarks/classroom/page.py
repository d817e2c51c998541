"""A visitor of the classroom without a browser, and what it measures."""

import itertools
import json
import random
import re
import struct
import threading
import time
import urllib.request
import uuid
from collections import defaultdict

import websocket

LONGEST = 120  # seconds that a visitor waits for anything before it counts as lost


class Figures:
    """What the visitors have measured, by name: seconds, and counts of what was refused or lost."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.counts: dict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def add(self, name: str, seconds: float) -> None:
        """Adds a time."""
        with self._lock:
            self.seconds[name].append(seconds)

    def count(self, name: str) -> None:
        """Counts an event."""
        with self._lock:
            self.counts[name] += 1


class PageWithoutBrowser:
    """A visitor who loads the page, opens its socket, and reads and changes the lab's widgets.

    Args:
        port: the server's port.
        figures: where to put what it measures.
        rng: chooses what it does.
        end: when it stops waiting, by `time.monotonic`.
    """

    def __init__(self, port: int, figures: Figures, rng: random.Random, end: float):
        self._figures, self._rng, self._end, self._port = figures, rng, end, port
        began = time.monotonic()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=LONGEST) as answer:
            page = answer.read().decode()
        kernel = re.search(r'"kernelId": "([^"]+)"', page)
        if kernel is None:
            raise ConnectionError("the page has no kernel")
        self._kernel = kernel[1]
        self._session, self._counts = uuid.uuid4().hex, dict[str, list]()
        self._socket = websocket.create_connection(
            f"ws://127.0.0.1:{port}/api/kernels/{kernel[1]}/channels?session_id={self._session}",
            timeout=LONGEST,
            subprotocols=["v1.kernel.websocket.jupyter.org"],
        )
        self.status, self.k = "", 0
        self._widgets = self._read_widgets()
        self._tell("charts", {"method": "custom", "content": {"seen": True}})
        figures.add("page to usable lab", time.monotonic() - began)
        self._first_point(began, "page to first point")

    def live(self) -> str:
        """Uses the lab until the end, or until it reloads the page or leaves: returns "time",
        "reload" or "leave"."""
        while time.monotonic() < self._end:
            action = self._rng.choices(
                ["move", "run", "pin", "look", "reload", "leave"], [10, 3, 1, 4, 1, 0.3]
            )[0]
            if action in ("reload", "leave"):
                return action
            if action == "look":
                self._read_for(self._rng.uniform(1, 8))
            elif action == "pin":
                self._press("pin")
            else:
                began = time.monotonic()
                if action == "move":
                    value = self.k = self._rng.choice(
                        [one for one in range(1, 31) if one != self.k]
                    )
                    self._tell(
                        "accumulation_steps", {"method": "update", "state": {"value": value}}
                    )
                else:
                    value = self.k
                    self._press("run")
                self._first_point(began, "key to first point", value)
                self._read_for(self._rng.uniform(0.5, 6))
        return "time"

    def close(self) -> None:
        """Closes the socket. Four of five times it says farewell first, as a page does that is not
        killed."""
        if self._rng.random() < 0.8:
            farewell = f"http://127.0.0.1:{self._port}/classroom/farewell/{self._kernel}"
            urllib.request.urlopen(farewell, b"", timeout=LONGEST).close()
        self._socket.close()

    def _first_point(self, began: float, name: str, k: int | None = None) -> None:
        """Asks until a run with this k shows its first update."""
        queued: float | None = None
        while time.monotonic() < min(began + LONGEST, self._end):
            content = self._ask()
            if "waiting for a worker" in self.status and queued is None:
                queued = time.monotonic()
            if "classroom is full" in self.status:
                self._figures.count("refused")
                return
            if (
                content["now"]
                and content["runs"][0]["counts"][0] > 0
                and k in (None, content["experiment"]["k"])
            ):
                self.k = content["experiment"]["k"]
                self._figures.add(name, time.monotonic() - began)
                if queued is not None:
                    self._figures.add("of it in the queue", time.monotonic() - queued)
                return
            time.sleep(self._pause(content))
        self._figures.count("lost" if time.monotonic() < self._end else "in the queue at the end")

    def _read_for(self, seconds: float) -> None:
        """Asks as a page does while a run is under way."""
        end = min(time.monotonic() + seconds, self._end)
        while time.monotonic() < end:
            time.sleep(min(self._pause(self._ask()), max(0.0, end - time.monotonic())))

    @staticmethod
    def _pause(content: dict) -> float:
        """The seconds until the next question. A page asks no more after a run's end; this one
        still does."""
        return 0.1 if content["again"] is None else content["again"] / 1000

    def _ask(self) -> dict:
        """Asks for new numbers, and returns the answer."""
        name = uuid.uuid4().hex
        self._tell(
            "charts",
            {"method": "custom", "content": {"ask": name, "have": self._counts, "revision": 0}},
        )
        end = time.monotonic() + LONGEST
        while time.monotonic() < end:
            message = self._hear()
            content = message.get("content", {}).get("data", {}).get("content")
            if isinstance(content, dict) and content.get("to") == name:
                if "runs" not in content:
                    raise RuntimeError(f"the lab could not answer: {content}")
                self._counts = {str(run["number"]): run["counts"] for run in content["runs"]}
                return content
        raise TimeoutError("no answer")

    def _press(self, name: str) -> None:
        self._tell(name, {"method": "custom", "content": {"event": "click"}})

    def _read_widgets(self) -> dict[str, str]:
        """The comm of each widget that has a CSS class gradlab-NAME, by name."""
        control = uuid.uuid4().hex
        opened = {"comm_id": control, "target_name": "jupyter.widget.control", "data": {}}
        self._send("comm_open", opened, {"version": "1.0.0"})
        self._send("comm_msg", {"comm_id": control, "data": {"method": "request_states"}})
        while True:
            data = self._hear().get("content", {}).get("data", {})
            if data.get("method") == "update_states":
                named = {
                    css.removeprefix("gradlab-"): comm
                    for comm, each in data["states"].items()
                    for css in each["state"].get("_dom_classes", ())
                }
                return named

    def _tell(self, name: str, data: dict) -> None:
        self._send("comm_msg", {"comm_id": self._widgets[name], "data": data})

    def _send(self, kind: str, content: dict, metadata: dict | None = None) -> None:
        header = {
            "msg_id": uuid.uuid4().hex,
            "msg_type": kind,
            "session": self._session,
            "username": "",
            "date": "",
        }
        parts = [
            "shell",
            *map(json.dumps, (header | {"version": "5.3"}, {}, metadata or {}, content)),
        ]
        bodies = [part.encode() for part in parts]
        offsets = list(itertools.accumulate(map(len, bodies), initial=8 * (len(bodies) + 2)))
        numbers = struct.pack(f"<{len(offsets) + 1}Q", len(offsets), *offsets)
        self._socket.send_binary(numbers + b"".join(bodies))

    def _hear(self) -> dict:
        """The next message of the kernel, without its buffers. Keeps what the status line says."""
        received = self._socket.recv()
        [count] = struct.unpack_from("<Q", received)
        offsets = struct.unpack_from(f"<{count}Q", received, 8)
        header, content = (json.loads(received[offsets[i] : offsets[i + 1]]) for i in (1, 4))
        message = {"header": header, "content": content}
        if content.get("comm_id") == getattr(self, "_widgets", {}).get("status"):
            self.status = content.get("data", {}).get("state", {}).get("value", self.status)
        return message
