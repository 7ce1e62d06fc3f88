"""A request's answers between the engine's thread and the event loop: its pieces, its usage, and its end if the client leaves.

Each endpoint submits its prompts through `Service.submit`, and reads `Answers` to the end. A task of each request waits for the
client to disconnect, and cancels the request in the engine, wherever it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from icejax.engine.response import GenerationResponse, join
from icejax.engine.serving.thread import Handle, Piece
from icejax.serving.metrics import Metrics


def new_id(prefix: str, mark: str = "-") -> str:
    """Returns a new id, such as `chatcmpl-8c0f...`; `mark` stands between its parts."""
    return f"{prefix}{mark}{secrets.token_hex(12)}"


@dataclass
class Usage:
    """Token counts of a request; those of a prompt count once, however many answers it has."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    reasoning_tokens: int = 0

    def body(self) -> dict[str, Any]:
        """Returns OpenAI's object."""
        return dict(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.new_tokens,
            total_tokens=self.prompt_tokens + self.new_tokens,
            prompt_tokens_details=dict(cached_tokens=self.cached_tokens),
            completion_tokens_details=dict(reasoning_tokens=self.reasoning_tokens),
        )


class Answers:
    """The pieces of a request's answers, in the order in which they come.

    Attributes:
        count: number of answers; those to a prompt follow one another.
        usage: token counts so far.
    """

    def __init__(self, handles: Sequence[Handle], n: int, metrics: Metrics) -> None:
        """Listens to the handles, one for each prompt, of `n` answers each; called in the event loop."""
        self.count, self.usage = len(handles) * n, Usage()
        self._handles, self._n, self._metrics = handles, n, metrics
        self._queue: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        self._left, self._prompts = self.count, set[int]()
        self._submitted, self._last = time.monotonic(), dict[int, float]()
        loop = asyncio.get_running_loop()
        for number, handle in enumerate(handles):
            handle.listen(functools.partial(self._put, loop, number))

    def _put(self, loop: asyncio.AbstractEventLoop, number: int, piece: Piece) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: the server stops
            loop.call_soon_threadsafe(self._queue.put_nowait, (number, piece))

    @property
    def over(self) -> bool:
        """Whether all answers have come to their end."""
        return not self._left

    def cancel(self) -> None:
        """Ends the request in the engine; one that is over stays so."""
        for handle in self._handles:
            handle.cancel()

    async def pieces(self, *, patience: float | None = None) -> AsyncIterator[tuple[int, GenerationResponse] | None]:
        """Yields the number of an answer and its piece; None after `patience` seconds without one.

        It ends early if the request was cancelled, and cancels it if the reader ends early.

        Raises:
            InputError, RuntimeError: as in the iteration of a `Handle`.
        """
        try:
            while self._left:
                try:
                    number, piece = await self._next(patience)
                except TimeoutError:
                    yield None
                    continue
                if isinstance(piece, BaseException):
                    raise piece
                if piece is None:
                    self._metrics.cancelled(self._left)
                    return
                at = number * self._n + piece.sample
                self._count(number, at, piece)
                yield at, piece
        finally:
            if self._left:
                self.cancel()

    async def whole(self, read: Callable[[int, GenerationResponse], Any]) -> list[GenerationResponse] | None:
        """Returns the whole answers, in order; None if the request was cancelled. Errors are those of `pieces`.

        Args:
            read: called with the number of an answer and each of its pieces.
        """
        parts: dict[int, list[GenerationResponse]] = {}
        async for at, piece in self.pieces():
            read(at, piece)
            parts.setdefault(at, []).append(piece)
        return None if self._left else [join(parts[at]) for at in sorted(parts)]

    async def _next(self, patience: float | None) -> tuple[int, Piece]:
        if not self._queue.empty():
            return self._queue.get_nowait()
        async with asyncio.timeout(patience):  # wait_for would make a task for each token
            return await self._queue.get()

    def _count(self, number: int, at: int, piece: GenerationResponse) -> None:
        now = time.monotonic()
        if number not in self._prompts:
            self._prompts.add(number)
            self.usage.prompt_tokens += piece.prompt_tokens
            self.usage.cached_tokens += piece.cached_tokens
            self._metrics.prompt(piece)
        self.usage.new_tokens += 1
        self.usage.reasoning_tokens += bool(piece.reasoning) and not piece.text
        self._metrics.token(piece, None if at not in self._last else now - self._last[at])
        self._last[at] = now
        if piece.finish_reason is not None:
            self._left -= 1
            self._metrics.ended(piece, now - self._submitted)
