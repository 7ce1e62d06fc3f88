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
from collections import deque
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


class Inbox:
    """Pieces on their way from the engine's thread to their one reader, a task of the event loop.

    However many pieces come while the loop is busy, they wake it once. One timer serves all waits.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pieces: deque[tuple[int, Piece]] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._wakes, self._is_late, self._last = False, False, self._loop.time()

    def put(self, number: int, piece: Piece) -> None:
        """Takes a piece of the handle with this number; the engine's thread calls it."""
        self._pieces.append((number, piece))
        if not self._wakes:
            self._wakes = True
            with contextlib.suppress(RuntimeError):  # the loop has ended: the server stops
                self._loop.call_soon_threadsafe(self._wake)

    async def get(self, patience: float | None) -> tuple[int, Piece] | None:
        """Returns the next piece and its number; None if none has come for `patience` seconds (None: it waits)."""
        while not self._pieces:
            if self._timer is None and patience is not None:
                self._timer = self._loop.call_later(patience, self._look, patience)
            self._reader = self._loop.create_future()
            await self._reader
            if self._is_late:
                self._is_late, self._last = False, self._loop.time()
                return None
        self._last = self._loop.time()
        return self._pieces.popleft()

    def close(self) -> None:
        """Ends the timer."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def _waits(self) -> bool:
        """Whether the reader waits."""
        return self._reader is not None and not self._reader.done()

    def _wake(self) -> None:
        self._wakes = False
        if self._waits:
            self._reader.set_result(None)

    def _look(self, patience: float) -> None:
        """Wakes the reader if it has waited for long, and looks again when it may have."""
        left = self._last + patience - self._loop.time()
        if left <= 0:
            self._is_late, left = self._waits and not self._pieces, patience
            self._wake()
        self._timer = self._loop.call_later(left, self._look, patience)


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
        self._inbox = Inbox()
        self._left, self._prompts = self.count, set[int]()
        self._submitted, self._last = time.monotonic(), dict[int, float]()
        for number, handle in enumerate(handles):
            handle.listen(functools.partial(self._inbox.put, number))

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
                item = await self._inbox.get(patience)
                if item is None:
                    yield None
                    continue
                number, piece = item
                if isinstance(piece, BaseException):
                    raise piece
                if piece is None:
                    self._metrics.cancelled(self._left)
                    return
                at = number * self._n + piece.sample
                self._count(number, at, piece)
                yield at, piece
        finally:
            self._inbox.close()
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
