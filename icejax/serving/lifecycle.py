"""The life of a server: it listens, loads, warms up, serves, drains and ends. The command ``icejax serve`` calls it.

`/health` answers from the first moment, with 503 while the model loads. A signal lets the answers that run come to their end,
while new requests get 503. An engine that fails ends the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from icejax.api.engine import Engine
from icejax.checks.errors import InputError
from icejax.models.decoder import CausalLM
from icejax.serving.app import make_app
from icejax.serving.connections import Connection, allow_open_files
from icejax.serving.service import Phase, Service

LOG = logging.getLogger(__name__)
BODY_BYTES, TOKEN_BYTES = 2**20, 16  # of a body: for its fields, and for each token of the context
HEADER_BYTES = 2**16
LOOK_S = 1.0  # seconds between two looks at the engine, which may fail while nobody asks: a process of its group may end
Start = Callable[[], tuple[CausalLM, Any, Engine]]


class EngineFailed(RuntimeError):
    """Raised when a server has ended because its engine failed; the error is its cause."""


class Server:
    """A server of one model.

    Attributes:
        service: what the endpoints share.
        port: the port that it listens on.
    """

    def __init__(self, service: Service, *, host: str, port: int, drain_s: float) -> None:
        """Listens; nothing is answered yet.

        Args:
            port: 0: any that is free.
            drain_s: most seconds that answers may take after a signal.

        Raises:
            InputError: the address cannot be used.
        """
        allow_open_files()
        self.service, self._drain_s = service, drain_s
        self._socket = _listening(host, port)
        self.port = self._socket.getsockname()[1]
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        service.fail = self._fail
        options = dict(http=Connection, ws="none", loop="asyncio", lifespan="off", log_config=None, access_log=False)
        options |= dict(server_header=False, h11_max_incomplete_event_size=HEADER_BYTES, backlog=2048)
        self._server = _Uvicorn(uvicorn.Config(make_app(service), **options))

    def run(self, start: Start, ready: Callable[[], None] = lambda: None) -> None:
        """Serves until `drain` or a failure.

        Args:
            start: loads the model and returns it with its tokenizer and a warm engine; called in another thread.
            ready: called when the server takes requests.

        Raises:
            EngineFailed: the engine has failed; the log has told of it.
            Exception: what `start` raises.
        """
        asyncio.run(self._run(start, ready))
        if self.service.phase is Phase.FAILED:
            raise EngineFailed(f"the engine has failed: {self._error}") from self._error
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        """Ends the server when the answers that run are over; any thread may call it."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._ends.set)

    async def _run(self, start: Start, ready: Callable[[], None]) -> None:
        self._loop, self._ends = asyncio.get_running_loop(), asyncio.Event()
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        # A thread that nobody waits for: a server that ends while it loads ends at once.
        threading.Thread(target=self._start, args=(start, ready), name="icejax-start", daemon=True).start()
        while not self._ends.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ends.wait(), LOOK_S)
            self.service.look_at_engine()
        await self._drained()
        self._server.should_exit = True
        self._server.force_exit = self._error is not None
        await serving
        if self.service.engine is not None:
            self.service.engine.close()

    def _start(self, start: Start, ready: Callable[[], None]) -> None:
        """Loads the model, and opens the server to requests; runs in a thread of its own."""
        service = self.service
        try:
            service.model, service.tokenizer, service.engine = start()
        except Exception as error:
            self._error = error
            self.drain()
            return
        service.body_limit = TOKEN_BYTES * service.engine.context_length + BODY_BYTES
        if not self._ends.is_set():
            service.phase = Phase.READY
            ready()

    async def _drained(self) -> None:
        """Waits until no answer runs, but no longer than `drain_s` seconds."""
        if self.service.phase is Phase.READY:
            self.service.phase = Phase.DRAINING
        end = self._loop.time() + self._drain_s
        while self.service.open_answers and self._error is None and self._loop.time() < end:
            await asyncio.sleep(0.05)
        if self.service.open_answers and self._error is None:
            LOG.warning("%d answers are cut: they took longer than --drain-seconds", self.service.open_answers)
            self.service.cancel_all()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._ends.set()


class _Uvicorn(uvicorn.Server):
    """Uvicorn without its own handling of signals, which is the command's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listening(host: str, port: int) -> socket.socket:
    """Returns a socket that listens on an address; InputError if it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InputError(f"--host {host} is no address of this machine: {error.strerror}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{host}, port {port} cannot be used: {reason}: choose another --port") from None
    return listening
