"""The socket between a page and its kernel, closed to messages on which the server would hang; and
a page's farewell.

Voila reads each message of a kernel by the first version of Jupyter's protocol, and Jupyter reads a
page's message by the number of parts that it claims to have. A page that asks for no protocol, or
claims to have 2**63 parts, would occupy the server for all visitors. So would a message for a page
whose socket is being closed. What a page does not read waits in the server's memory, but not more
than `UNREAD` bytes.

A page that is closed or reloaded says so with a request that outlives it (charts.js), and its
kernel ends at once. The server also pings every page. The kernel of a page that stops answering
ends after the seconds of the setting `GONE`.
"""

import pathlib
import signal
from collections import Counter
from functools import partial
from typing import Any, ClassVar

from jupyter_core.utils import ensure_async
from jupyter_server.base.handlers import JupyterHandler
from jupyter_server.utils import url_path_join
from tornado.ioloop import IOLoop
from tornado.iostream import StreamBufferFullError
from tornado.web import HTTPError, authenticated
from tornado.websocket import WebSocketProtocol, WebSocketProtocol13
from voila.app import Voila
from voila.tornado.handler import TornadoVoilaHandler
from voila.tornado.kernel_websocket_handler import VoilaKernelWebsocketHandler

from gradlab.lab.classroom.entrance import Entrance

PROTOCOL = "v1.kernel.websocket.jupyter.org"
GONE = "gradlab_gone_seconds"
TEMPLATE = pathlib.Path(__file__).with_name("template")
# a message of a lab has about 7 parts and 1 KiB
PARTS = 64
BYTES = 2**16
UNREAD = 2**24  # bytes that wait for a page that does not read them


def is_plausible(message: object) -> bool:
    """Whether a page's message has no more parts and bytes than a lab's."""
    if not isinstance(message, bytes) or not 8 <= len(message) <= BYTES:
        return False
    return 3 <= int.from_bytes(message[:8], "little") <= PARTS


class PageSocket(VoilaKernelWebsocketHandler):
    """Voila's socket, for plausible messages only. A kernel without an open socket ends after a
    while."""

    pages: ClassVar[Counter[str]] = Counter()  # the open sockets of each kernel
    closed: ClassVar[Counter[str]] = Counter()  # and how many have been closed

    @property
    def ping_interval(self) -> float:
        """The milliseconds between two pings. Two of them are half of `GONE`: then a silent page is
        closed."""
        return 250 * self.settings[GONE]

    @property
    def ping_timeout(self) -> float:
        return 1.5 * self.ping_interval

    def get_websocket_protocol(self) -> WebSocketProtocol | None:
        protocol = super().get_websocket_protocol()
        if isinstance(protocol, WebSocketProtocol13):
            # Jupyter pings; Tornado would too, and take the milliseconds for seconds
            protocol.params.ping_interval = 0
        return protocol

    def write_message(self, message: bytes | dict[str, Any], binary: bool = False) -> Any:
        """Sends the page a message of its kernel; nothing if the socket is being closed.

        Such a socket has no protocol. So Jupyter writes the message in an older format, and Voila
        would still read it by the first version of the protocol, by which it can claim to have
        2**63 parts.
        """
        if self.ws_connection is None or self.ws_connection.is_closing():
            return None
        try:
            return super().write_message(message, binary)
        except StreamBufferFullError:  # the page asks, and does not read the answers
            self.ws_connection.stream.close()
            return None

    async def get(self, *arguments: Any, **more: Any) -> None:
        if PROTOCOL not in self.request.headers.get("Sec-WebSocket-Protocol", ""):
            raise HTTPError(400, f"the page must speak {PROTOCOL}")
        await super().get(*arguments, **more)

    async def open(self, *arguments: Any, **more: Any) -> None:
        self.pages[self.kernel_id] += 1
        self.ws_connection.stream.max_write_buffer_size = UNREAD
        await super().open(*arguments, **more)

    def on_close(self) -> None:
        super().on_close()
        self.pages[self.kernel_id] -= 1
        self.closed[self.kernel_id] += 1
        closed = self.closed[self.kernel_id]
        IOLoop.current().call_later(self.settings[GONE] / 4, self._end_if_gone, closed)

    async def _end_if_gone(self, closed: int) -> None:
        # A page that comes back, and loses its socket again just now, has its own while
        if self.pages[self.kernel_id] == 0 and self.closed[self.kernel_id] == closed:
            del self.pages[self.kernel_id], self.closed[self.kernel_id]
            await end(self.kernel_manager, self.kernel_id)

    def on_message(self, message: object) -> None:
        if is_plausible(message):
            super().on_message(message)
        else:
            self.close(1007, "not a message of a lab")


class Farewell(JupyterHandler):
    """Ends a kernel. Who knows its name, which nobody can guess, is its page."""

    def check_xsrf_cookie(self) -> None:
        """Nothing: a page that is going away can send no header."""

    @authenticated
    async def post(self, kernel: str) -> None:
        await end(self.kernel_manager, kernel)


async def end(kernels: Any, kernel: str) -> None:
    """Ends a kernel, if it has not ended yet."""
    if kernel in kernels:
        await ensure_async(kernels.shutdown_kernel(kernel, now=True))


OWN_HANDLERS = {VoilaKernelWebsocketHandler: PageSocket, TornadoVoilaHandler: Entrance}


class ClassroomApp(Voila):
    """Voila with these handlers, and with pages that load nothing from other servers."""

    def setup_template_dirs(self) -> None:
        super().setup_template_dirs()
        self.template_paths.insert(0, str(TEMPLATE))

    def init_handlers(self) -> list:
        farewell = (
            url_path_join(self.server_url, r"/classroom/farewell/(\w+-\w+-\w+-\w+-\w+)"),
            Farewell,
        )
        rest = (
            (pattern, OWN_HANDLERS.get(kind, kind), *more)
            for pattern, kind, *more in super().init_handlers()
        )
        return [farewell, *rest]

    def listen(self) -> None:
        """Waits for callers; not for long for one that connects and does not say what it wants."""
        seconds = self.app.settings[GONE]
        patience = {
            "idle_connection_timeout": seconds,
            "body_timeout": seconds,
            "max_body_size": BYTES,
        }
        self.app.listen = partial(self.app.listen, **patience)
        end_at_ctrl_c(IOLoop.current())
        super().listen()


def end_at_ctrl_c(loop: IOLoop) -> None:
    """Lets Ctrl-C end the loop after what it is at. Python's KeyboardInterrupt is lost, and the
    server goes on, when it comes while an object is deleted: the sockets of a page that is closed,
    say."""

    def end(*_: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one does not wait
        loop.add_callback(loop.stop)

    signal.signal(signal.SIGINT, end)
