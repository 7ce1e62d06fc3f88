"""Connections of clients that send nothing, or slowly, or do not read: each is cut, so that none stays for ever.

Uvicorn has no limit of the time in which a request's headers must come, nor of the time in which a client must read.
`lifecycle` gives it this protocol in place of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 20.0  # seconds that a connection may take, without a request in work, to send the next one's headers
READ_S = 60.0  # seconds in which a client must read what waits for it
SPARE_FILES = 100  # open files of the process that are no connections
FEWEST = 64  # connections, whatever the process may open


class Connection(H11Protocol):
    """A connection that is cut if no request comes on it or nobody reads from it."""

    _headers_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()  # before the process has no file left for those that it holds
            return
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._headers_timer, self._read_timer, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_timer = self.loop.call_later(READ_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True  # what it answers goes nowhere
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # a response has begun, or is over: no other can be sent
            self.transport.abort()

    def _watch(self) -> None:
        """Starts the timer while no request is in work, also after a response whose request's body still comes."""
        if self.cycle is not None and not self.cycle.response_complete:
            if self._headers_timer is not None:
                self._headers_timer.cancel()
                self._headers_timer = None
        elif self._headers_timer is None and not self.transport.is_closing():
            self._headers_timer = self.loop.call_later(HEADERS_S, self.transport.abort)


def most_connections() -> int:
    """Returns how many connections the process may hold."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(files - SPARE_FILES, FEWEST)


def allow_open_files() -> None:
    """Lets the process open as many files as the system allows it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
