"""A client of OpenAI's API that notes when each piece of an answer came, and a process that runs `icejax serve`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import h11

from icejax.checks.errors import InputError

READY = re.compile(r".* is served at (http://\S+)/v1\n")


@dataclass
class Timed:
    """A request and when its answer came, in seconds of `time.perf_counter`.

    Attributes:
        asked: when it was sent.
        times: when each piece with text came.
        over: when the answer ended.
        tokens, prompt_tokens, cached_tokens: as the server counts them; without usage, a token per piece.
        error: why there is no answer; None: it is whole.
    """

    asked: float
    times: list[float] = field(default_factory=list)
    over: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Http:
    """A server by its address.

    Attributes:
        url: without `/v1`.
    """

    url: str

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urllib.parse.urlsplit(self.url)
        return parts.hostname, parts.port or 80

    async def get(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Returns the body of a response; that of a POST if a body is given.

        Raises:
            InputError: nobody answers, or not with 200.
        """
        try:
            asked = ("GET", path, b"") if body is None else ("POST", path, json.dumps(body).encode())
            async with contextlib.aclosing(self._exchange(*asked)) as parts:
                status = await anext(parts)
                answer = b"".join([part async for part in parts])
        except (OSError, h11.RemoteProtocolError) as error:
            raise InputError(f"{self.url} does not answer: {getattr(error, 'strerror', None) or error}") from None
        if status != 200:
            raise InputError(f"{self.url}{path} answers with status {status}: expected 200")
        return answer

    async def answer(self, path: str, body: dict[str, Any], timed: Timed | None = None) -> Timed:
        """Returns a streamed answer, which a cancelled task gives up by closing the connection.

        Args:
            timed: gets the times while the answer comes.
        """
        timed = timed or Timed(time.perf_counter())
        body = body | dict(stream=True, stream_options=dict(include_usage=True))
        try:
            async with contextlib.aclosing(self._exchange("POST", path, json.dumps(body).encode())) as parts:
                status = await anext(parts)
                if status != 200:
                    timed.error = f"status {status}: " + b"".join([part async for part in parts]).decode(errors="replace")[:200]
                    return timed
                await _read_events(parts, timed)
        except (OSError, h11.RemoteProtocolError) as error:
            timed.error = f"{type(error).__name__}: {error}"
        timed.over = time.perf_counter()
        timed.tokens = timed.tokens or len(timed.times)
        return timed

    async def _exchange(self, method: str, path: str, body: bytes) -> AsyncIterator[Any]:
        """Yields a response's status, then the parts of its body."""
        host, port = self.address
        reader, writer = await asyncio.open_connection(host, port)
        try:
            connection = h11.Connection(h11.CLIENT)
            headers = [("Host", f"{host}:{port}"), ("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
            request = h11.Request(method=method, target=path, headers=[*headers, ("Connection", "close")])
            for event in (request, h11.Data(data=body), h11.EndOfMessage()):
                writer.write(connection.send(event))
            while not isinstance(event := connection.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    connection.receive_data(await reader.read(2**16))
                elif isinstance(event, h11.Response):
                    yield event.status_code
                elif isinstance(event, h11.Data):
                    yield bytes(event.data)
        finally:
            writer.close()


async def _read_events(parts: AsyncIterator[bytes], timed: Timed) -> None:
    """Notes the times of a stream's pieces, and its usage."""
    rest = b""
    async for part in parts:
        now = time.perf_counter()
        *blocks, rest = (rest + part).replace(b"\r\n", b"\n").split(b"\n\n")
        for block in blocks:
            data = b"".join(line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:"))
            if not data or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                timed.error = str(event["error"])[:200]
            if any(_text(choice) for choice in event.get("choices") or ()):
                timed.times.append(now)
            if usage := event.get("usage"):
                timed.tokens, timed.prompt_tokens = usage.get("completion_tokens", 0), usage.get("prompt_tokens", 0)
                timed.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""


async def model_of(server: Http) -> str:
    """Returns the name of the first model that a server lists."""
    try:
        return json.loads(await server.get("/v1/models"))["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        raise InputError(f"{server.url}/v1/models lists no model") from None


async def metric(server: Http, name: str) -> float:
    """Returns the value of a metric of icejax, whatever its labels."""
    text = (await server.get("/metrics")).decode()
    return float(re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)[1])


@contextlib.contextmanager
def served(arguments: list[str]) -> Iterator[Http]:
    """Runs `icejax serve` with these options on a free port, until the block ends.

    Raises:
        InputError: it does not start; it has told why.
    """
    command = [sys.executable, "-m", "icejax", "serve", "--port", "0", "--quiet", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            told = READY.fullmatch(process.stdout.readline())
            if told is None:
                raise InputError("icejax serve did not start")
            yield Http(told[1])
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(90)
            except subprocess.TimeoutExpired:
                process.kill()
