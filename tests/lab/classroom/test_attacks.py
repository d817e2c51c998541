"""What a visitor or a local process may try against a classroom. Whatever serves a classroom must
pass these tests.

The tests in tests/browser/test_classroom.py show that visitors see what they should; these, that
nobody can stop the others.
"""

import concurrent.futures
import contextlib
import random
import re
import socket
import struct
import time
import urllib.error
import urllib.request

import pytest
import websocket
from classroom_server import channels, classrooms, kernel_of, page_of, status_of
from lab_page import DEADLINE

from benchmarks.classroom.page import Figures, PageWithoutBrowser
from gradlab.lab.classroom.server import READY_KERNELS

pytestmark = pytest.mark.slow

NAMES = {"www.w3.org", "purl.org", "creativecommons.org"}  # in names of XML, which nothing loads
SCRIPT = "%22%3E%3Cscript%3Ealert(1)%3C/script%3E"  # it ends an attribute, and begins a script


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A classroom that most attacks share: none may leave it in another state than before."""
    with classrooms(tmp_path_factory.mktemp("classroom") / "log") as start:
        yield start("--trainers=1", "--gone=20")


@pytest.fixture
def small(tmp_path):
    """A classroom for two visitors."""
    with classrooms(tmp_path / "log") as start:
        yield start("--trainers=1", "--visitors=2")


def serves(server) -> bool:
    """Whether a new visitor still gets a page."""
    return status_of(f"http://127.0.0.1:{server.port}/") == 200


@pytest.mark.parametrize("query", ["theme", "template", "voila", "title"])
def test_no_script_of_an_address_gets_into_the_page(server, query):
    assert "<script>alert(1)" not in page_of(server.port, f"?{query}={SCRIPT}")


def test_a_page_names_no_other_host(server):
    for query in ("", "?template=reveal", "?template=classic&theme=dark"):
        hosts = set(re.findall(r"https?://([\w.-]+)", page_of(server.port, query)))
        assert hosts <= NAMES
    with contextlib.closing(
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/", timeout=60)
    ) as answer:
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]


def test_messages_on_which_a_server_would_hang(server):
    kernel = kernel_of(page_of(server.port))
    with pytest.raises(websocket.WebSocketBadStatusException, match="400"):
        channels(server.port, kernel, protocol=None)  # without the protocol by which Voila reads
    rng = random.Random(0)
    hostile = [
        b"",
        b"\xff" * 8,
        b"\xff" * 1000,
        (3).to_bytes(8, "little") + b"\xff" * 24,
        bytes(2**21),
        "text",
    ]
    hostile += [rng.randbytes(rng.randrange(200)) for _ in range(100)]
    hostile += [(6).to_bytes(8, "little") + rng.randbytes(48) for _ in range(100)]
    for few in (hostile[i : i + 10] for i in range(0, len(hostile), 10)):
        # A kernel without any page would end meanwhile. This page reads nothing, so on a slow machine its socket
        # would not live long enough for all of them.
        with contextlib.closing(channels(server.port, kernel)):
            for message in few:
                line = channels(server.port, kernel)
                with contextlib.suppress(OSError, websocket.WebSocketException):
                    line.send(message, 1 if isinstance(message, str) else 2)
                line.close(timeout=0.1)
    assert serves(server)


def test_answers_to_a_page_whose_socket_is_being_closed_do_not_hang_the_server(server):
    page = PageWithoutBrowser(server.port, Figures(), random.Random(0), time.monotonic() + DEADLINE)
    for number in range(20):  # its kernel answers each with the numbers of a run
        page._tell(
            "charts",
            {"method": "custom", "content": {"ask": str(number), "have": {}, "revision": 0}},
        )
    # On which the server closes the socket; the page does not answer that
    page._socket.send_binary(b"no message")
    page._socket.sock.settimeout(60)
    with contextlib.suppress(ConnectionResetError):
        # Until the server has waited for the page's answer for a few seconds
        while page._socket.sock.recv(2**16):
            pass
    assert serves(server)


def test_who_only_loads_the_page_gets_no_more_kernels_than_there_may_be_visitors(small):
    address = f"http://127.0.0.1:{small.port}/"
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        statuses = list(pool.map(status_of, [address] * 12))
    assert sorted(statuses) == [200] * 2 + [503] * 10
    assert len(small.kernels()) <= 2 + READY_KERNELS
    with pytest.raises(urllib.error.HTTPError) as refused:
        page_of(small.port)
    said = refused.value.read().decode()
    assert (
        "The classroom is full: it has 2 visitors. This page tries again every 3 seconds." in said
    )
    assert refused.value.headers["Refresh"] == "3"


def test_a_visitor_who_leaves_makes_room(small):
    first = kernel_of(page_of(small.port))
    page_of(small.port)
    assert not serves(small)
    farewell = f"http://127.0.0.1:{small.port}/classroom/farewell/{first}"
    urllib.request.urlopen(farewell, b"", timeout=60).close()
    assert serves(small) and not serves(small)


def test_connections_that_ask_for_nothing_are_closed(server):
    with contextlib.ExitStack() as stack:
        silent = []
        for number in range(1_100):
            line = stack.enter_context(
                socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE)
            )
            # All of them only begin a request
            line.sendall(b"GET / HTTP/1.1\r\nHost:"[: number % 23])
            silent.append(line)
        assert serves(server)
        assert not any(line.recv(1000) for line in silent)  # each waits until it is closed


def test_large_requests_and_messages_are_refused(server):
    kernel = kernel_of(page_of(server.port))
    farewell = f"http://127.0.0.1:{server.port}/classroom/farewell/{kernel}"
    with pytest.raises(OSError):  # as soon as it says its length
        urllib.request.urlopen(farewell, bytes(2**27), timeout=60)
    line = channels(server.port, kernel)
    with pytest.raises((OSError, websocket.WebSocketException)):
        for _ in range(1_000):
            line.send_binary(bytes(2**20))
            line.recv()
    assert serves(server)


def test_many_messages_of_the_largest_size_change_nothing(server):
    line = channels(server.port, kernel_of(page_of(server.port)))
    offsets = struct.pack("<7Q", 6, 56, 56, 56, 56, 56, 2**16)
    with contextlib.suppress(OSError, websocket.WebSocketException):
        for _ in range(2_000):
            line.send_binary(offsets + bytes(2**16 - len(offsets)))
    assert serves(server)
    line.close(timeout=0.1)
