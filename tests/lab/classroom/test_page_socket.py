"""The socket of a classroom's page: when the server calls a page silent, or gives it up."""

import logging
import subprocess
import sys

import pytest
from coroutines import result_of
from jupyter_server.base import websocket as jupyter
from tornado.iostream import StreamBufferFullError
from voila.tornado.kernel_websocket_handler import VoilaKernelWebsocketHandler

from gradlab.lab.classroom import page_socket
from gradlab.lab.classroom.page_socket import GONE, PageSocket

INTERVAL = 10.0  # seconds between two pings, for GONE = 40


class Socket(PageSocket):
    """A page's socket without a server, on a clock of its own."""

    settings = None
    log = logging.getLogger("test")

    def __init__(self):
        self.settings = {GONE: 4 * INTERVAL}
        self.ws_connection, self.client_terminated = self, False
        self.now, self.pings, self.closed_at = 0.0, 0, None

    def ping(self, data):
        self.pings += 1

    def close(self, code=None, reason=None):
        self.closed_at = self.now

    def at(self, seconds, act, *arguments):
        self.now = seconds
        act(*arguments)


@pytest.fixture
def socket(monkeypatch):
    made = Socket()
    loop = type("Loop", (), {"time": lambda self: made.now})()
    monkeypatch.setattr(jupyter.ioloop.IOLoop, "current", lambda: loop)
    return made


def test_a_page_that_answers_is_not_called_silent_when_the_server_is_late(socket):
    for number in range(1, 100):
        late = 0.2 * INTERVAL * (number % 2)  # every other ping
        socket.at(number * INTERVAL + late, socket.send_ping)
        socket.at(socket.now + 0.001, socket.on_pong, b"")
    assert socket.closed_at is None and socket.pings == 99


def test_a_page_that_does_not_read_is_closed(socket, monkeypatch):
    """What it has not read stays in the server's memory."""

    class FullStream:
        is_closed = False

        def close(self):
            self.is_closed = True

    def refuse(self, message, binary=False):
        raise StreamBufferFullError

    monkeypatch.setattr(VoilaKernelWebsocketHandler, "write_message", refuse)
    monkeypatch.setattr(Socket, "is_closing", lambda self: False, raising=False)
    monkeypatch.setattr(Socket, "stream", FullStream(), raising=False)
    assert socket.write_message(b"an answer", binary=True) is None and socket.stream.is_closed


def test_a_silent_page_is_closed_within_half_of_the_time_that_it_has(socket):
    socket.at(INTERVAL, socket.send_ping)
    socket.at(INTERVAL + 0.001, socket.on_pong, b"")
    for number in (2, 3, 4):
        if socket.closed_at is None:
            socket.at(number * INTERVAL, socket.send_ping)
    assert socket.closed_at == 3 * INTERVAL


INTERRUPTED = """
import signal
from tornado.ioloop import IOLoop
from gradlab.lab.classroom.page_socket import end_at_ctrl_c

class Deleted:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

loop = IOLoop(make_current=False)
end_at_ctrl_c(loop)
loop.add_callback(lambda: Deleted() and None)
loop.call_later(60, lambda: (print("it was lost"), loop.stop()))
loop.start()
try:
    signal.raise_signal(signal.SIGINT)  # the second one, while the server ends
except KeyboardInterrupt:
    print("ended")
"""


def test_ctrl_c_ends_the_server_though_an_object_is_being_deleted():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert done.stdout == "ended\n", done.stderr


class Loop:
    """An event loop on a clock of its own."""

    def __init__(self):
        self.now, self.timers = 0.0, []

    def call_later(self, seconds, act, *arguments):
        self.timers.append((self.now + seconds, act, arguments))

    def until(self, seconds):
        due = sorted(
            (timer for timer in self.timers if timer[0] <= seconds), key=lambda one: one[0]
        )
        self.timers = [timer for timer in self.timers if timer[0] > seconds]
        for when, act, arguments in due:
            self.now = when
            result_of(act(*arguments))
        self.now = seconds


@pytest.mark.parametrize(
    ("sockets", "ended"),
    [
        ([(0, 10)], [20]),  # a quarter of GONE after its only socket
        ([(0, 10), (11, 19)], [29]),  # at 20 no socket is open, but one was at 19
        ([(0, 10), (11, 19), (21, 90)], [100]),
        ([(0, 30), (5, 10)], [40]),  # a second socket of the same page
    ],
)
def test_a_kernel_ends_when_no_socket_was_open_for_a_while(sockets, ended, monkeypatch):
    loop, ends = Loop(), []

    async def nothing(*arguments, **more):
        """What Voila does with a socket of its own."""

    async def end(kernels, kernel):
        ends.append(loop.now)

    monkeypatch.setattr(page_socket, "end", end)
    monkeypatch.setattr(page_socket.IOLoop, "current", lambda: loop)
    monkeypatch.setattr(VoilaKernelWebsocketHandler, "open", nothing)
    monkeypatch.setattr(VoilaKernelWebsocketHandler, "on_close", lambda self: None)
    monkeypatch.setattr(Socket, "stream", type("Stream", (), {})(), raising=False)
    monkeypatch.setattr(Socket, "kernel_id", "one", raising=False)
    monkeypatch.setattr(Socket, "kernel_manager", None, raising=False)
    made = [Socket() for _ in sockets]
    events = [
        (when, made[i], is_open)
        for i, pair in enumerate(sockets)
        for when, is_open in zip(pair, (True, False))
    ]
    for when, one, is_open in sorted(events, key=lambda event: event[0]):
        loop.until(when)
        if is_open:
            result_of(one.open())
        else:
            one.on_close()
    loop.until(1000)
    assert ends == ended and "one" not in PageSocket.pages and "one" not in PageSocket.closed
