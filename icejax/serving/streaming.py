"""Responses whose answers are still computed: whole ones, and streams of server-sent events. `completions` and `chat` call it.

An event is `data: {...}` and two line feeds, one for each token. While nothing comes, a comment tells client and proxies that
the server lives. An error after the headers is an event too: {"error": ...}.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from icejax.engine.response import GenerationResponse
from icejax.serving.answers import Answers, Usage
from icejax.serving.errors import ApiError, api_error
from icejax.serving.json_text import json_bytes, json_text
from icejax.serving.service import Service

PATIENCE_S = 5.0  # seconds without an event, after which a comment is sent
COMMENT = b": the request waits\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # nginx would hold events back


def event(value: Any) -> bytes:
    """Returns a server-sent event."""
    return b"data: " + json_bytes(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """Returns a server-sent event with the name that is its `type`."""
    return f"event: {value['type']}\n".encode() + event(value)


def chunks(about: dict[str, Any], usage: Usage, options: Any) -> tuple[Callable[..., bytes], Callable[[], list[bytes]]]:
    """Returns what makes an event of choices, and what makes the last events, with the usage that `stream_options` asks for."""
    has_usage = bool(options and options.include_usage)
    always = bool(has_usage and options.continuous_usage_stats)
    head, tail = f'data: {json_text(about)[:-1]},"choices":', ',"usage":null}\n\n' if has_usage else "}\n\n"  # of every event

    def chunk(choices: list[dict[str, Any]], *, usage_now: bool = False) -> bytes:
        now = f',"usage":{json_text(usage.body())}}}\n\n' if usage_now or always else tail
        return (head + json_text(choices) + now).encode(errors="replace")

    return chunk, lambda: [chunk([], usage_now=True)] if has_usage else []


CUT = "draining"  # the code of the error of answers that the server cut


@contextlib.asynccontextmanager
async def open_while(request_receive: Receive, answers: Answers, service: Service) -> AsyncIterator[None]:
    """Cancels the answers when the client disconnects while the block runs, and forgets them at its end."""

    async def watch() -> None:
        while (await request_receive())["type"] != "http.disconnect":
            pass
        answers.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        service.close(answers)


async def whole_response(
    request: Request,
    answers: Answers,
    service: Service,
    body: Callable[[list[GenerationResponse]], dict[str, Any]],
    *,
    read: Callable[[int, GenerationResponse], Any] = lambda number, piece: None,
) -> Response:
    """Returns the response with all answers, of which `body` makes the object; an error if they were cut.

    Args:
        read: called with the number of an answer and each of its pieces.
    """
    async with open_while(request.receive, answers, service):
        responses = await answers.whole(read)
    if responses is None:
        raise _cut()
    return json_response(body(responses))


def _cut() -> ApiError:
    return ApiError(503, "the answer was cut: the server stops", code=CUT)


def json_response(value: Any, status: int = 200) -> Response:
    """Returns a response with a value as JSON."""
    return Response(json_bytes(value), status, media_type="application/json")


class EventStream(Response):
    """A response that sends events as they come.

    Args:
        of_piece: the events of the piece of an answer, whose number is given.
        first: events before the first piece.
        last: called after the last piece; events before `done`.
        failed: the event of an error.
        waits: called when nothing has come for a while; what is sent then.
        done: the end of a stream.
    """

    def __init__(
        self,
        answers: Answers,
        service: Service,
        *,
        of_piece: Callable[[int, GenerationResponse], list[bytes]],
        first: Sequence[bytes] = (),
        last: Callable[[], list[bytes]] = list,
        failed: Callable[[ApiError], bytes] = lambda error: event(error.body()),
        waits: Callable[[], bytes] = lambda: COMMENT,
        done: bytes = DONE,
    ) -> None:
        self._answers, self._service, self._of_piece = answers, service, of_piece
        self._first, self._last, self._failed, self._waits, self._done = first, last, failed, waits, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"content-type": "text/event-stream; charset=utf-8"} | HEADERS
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

        def write(data: bytes, *, more: bool = True) -> Awaitable[None]:
            return send({"type": "http.response.body", "body": data, "more_body": more})

        async with open_while(receive, self._answers, self._service):
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            try:
                await write(b"".join(self._first) or COMMENT)
                async for item in self._answers.pieces(patience=PATIENCE_S):
                    await write(self._waits() if item is None else b"".join(self._of_piece(*item)))
                if not self._answers.over:
                    raise _cut()
                await write(b"".join(self._last()) + self._done)
            except Exception as error:
                failure = api_error(error)
                if failure.status >= 500 and failure.code != CUT:
                    self._service.failed_on(error)
                await write(self._failed(failure))
            await write(b"", more=False)
