"""A server in a thread of the test's process, and a client of Python's own library that reads it."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from icejax.serving.lifecycle import Server
from icejax.serving.service import Phase, Service

WAIT_S = 120


class Live:
    """A server that runs.

    Attributes:
        errors: what `Server.run` has raised.
    """

    def __init__(self, service: Service, start, *, drain_s: float = 5.0) -> None:
        self.service, self.server, self.errors = service, Server(service, host="127.0.0.1", port=0, drain_s=drain_s), []
        self.port = self.server.port

        def run() -> None:
            try:
                self.server.run(start)
            except Exception as error:
                self.errors.append(error)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)

    def send(self, path: str, body: Any = None, *, method: str | None = None, **headers: str) -> http.client.HTTPResponse:
        """Returns the response of a request; a body that is no bytes is sent as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        connection = self.connect()
        connection.request(method or ("GET" if body is None else "POST"), path, data, headers)
        return connection.getresponse()

    def ask(self, path: str, body: Any = None, *, status: int = 200, **options: Any) -> Any:
        """Returns the JSON of a response, which must have this status."""
        response = self.send(path, body, **options)
        text = response.read()
        assert response.status == status, (response.status, text)
        return json.loads(text)

    def refusal(self, path: str, body: Any, *, status: int = 400, **options: Any) -> dict[str, Any]:
        """Returns the error object of a response with this status."""
        error = self.ask(path, body, status=status, **options)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"].count("\n") == 0
        return error

    def events(self, path: str, body: Any) -> list[Any]:
        """Returns the events of a stream, without the last, which must be [DONE], and without comments."""
        response = self.send(path, body)
        assert response.status == 200 and response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return read_events(response.read())


def read_events(data: bytes) -> list[Any]:
    """Returns what a client that splits at two line feeds reads."""
    blocks = data.decode().split("\n\n")
    assert blocks.pop() == "" and b"\r" not in data
    events = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


@contextmanager
def live(service: Service, start, **options: Any) -> Iterator[Live]:
    """Runs a server until the block ends; `start` is that of `Server.run`."""
    server = Live(service, start, **options)
    try:
        wait_for(lambda: service.phase is not Phase.LOADING or server.errors)
        yield server
    finally:
        server.server.drain()
        server.thread.join(WAIT_S)
        assert not server.thread.is_alive()


def wait_for(holds) -> None:
    """Waits until `holds` returns something true."""
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.01)
