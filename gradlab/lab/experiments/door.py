"""A door on this machine's network: it lets in who knows a key, and nobody who is silent keeps
others out."""

import contextlib
import multiprocessing.connection
import os
import secrets
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

HANDSHAKE_SECONDS = 10  # in which a caller must show that it knows the key
BACKLOG = 64


class Door:
    """Listens on a free port. Each caller has a thread of its own, which begins with the key.

    `multiprocessing.connection.Listener` with a key waits for one caller at a time, so one that
    connects and says nothing would keep all others out.

    Args:
        host: this machine's address as callers see it.
        enter: called with the connection of each caller that knows the key, on its thread. It
            closes the connection.
        name: the name of the threads.

    Attributes:
        address: (host, port), where to call.
        key: what callers must know.
    """

    def __init__(self, host: str, enter: Callable[[Connection], object], name: str):
        self.key = secrets.token_bytes(32)
        self._enter = enter
        self._name = name
        self._listener = multiprocessing.connection.Listener((host, 0), backlog=BACKLOG)
        self.address: Any = self._listener.address
        self._is_closed = False
        # Callers who have not shown yet that they know the key
        self._outside: dict[Connection, threading.Thread] = {}
        self._thread = self._start(self._accept)

    def close(self) -> None:
        """Lets nobody in any more."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            socket.create_connection(self.address).close()  # ends the wait for the next caller
        self._thread.join(1)
        for line, thread in list(self._outside.items()):
            _hang_up(line)
            thread.join(1)

    def _start(self, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name=self._name, daemon=True)
        thread.start()
        return thread

    def _accept(self) -> None:
        with self._listener:
            while not self._is_closed:
                with contextlib.suppress(OSError, EOFError):
                    line = self._listener.accept()
                    if self._is_closed:
                        line.close()
                    else:
                        self._start(self._let_in, line)

    def _let_in(self, line: Connection) -> None:
        self._outside[line] = threading.current_thread()
        late = threading.Timer(HANDSHAKE_SECONDS, _hang_up, [line])
        late.daemon = True
        late.start()
        try:
            multiprocessing.connection.deliver_challenge(line, self.key)
            multiprocessing.connection.answer_challenge(line, self.key)
        except (OSError, EOFError, multiprocessing.AuthenticationError):
            line.close()
            return
        finally:
            late.cancel()
            del self._outside[line]
        self._enter(line)


def _hang_up(line: Connection) -> None:
    """Ends a connection from which another thread reads, which then gets the end of the file."""
    with (
        contextlib.suppress(OSError, ValueError),
        socket.socket(fileno=os.dup(line.fileno())) as end,
    ):
        end.shutdown(socket.SHUT_RDWR)
