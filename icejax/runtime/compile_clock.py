"""How long JAX has spent on tracing and compiling: what a first token waits for only once."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import jax.monitoring

# Tracing, lowering and compiling, and reading a program that was compiled before.
EVENTS = ("/jax/core/compile/", "/jax/compilation_cache/cache_retrieval_time_sec")
BEGUN = "/jax/compilation_cache/compile_requests_use_cache"
ENDED = "/jax/core/compile/backend_compile_duration"


class Clock:
    """Adds up the seconds in which JAX was making programs.

    Attributes:
        seconds: so far, in all threads.
        busy: whether a program is being compiled at this moment; told only where compiled programs are kept.
    """

    def __init__(self) -> None:
        self.seconds, self.busy = 0.0, False
        self._spans: list[tuple[float, float]] = []  # the last ones, each apart from the others
        jax.monitoring.register_event_duration_secs_listener(self._add)
        jax.monitoring.register_event_listener(self._begin)

    def _begin(self, event: str, **_: str | int) -> None:
        self.busy = self.busy or event == BEGUN

    def _add(self, event: str, duration: float, **_: str | int) -> None:
        if not event.startswith(EVENTS):
            return
        self.busy = self.busy and event != ENDED
        end = time.perf_counter()
        start = end - duration
        # The parts of a program are told before the whole: what lies inside counts once.
        while self._spans and self._spans[-1][0] >= start:
            inner = self._spans.pop()
            self.seconds -= inner[1] - inner[0]
        if self._spans and self._spans[-1][1] > start:
            start = self._spans[-1][1]
        self._spans.append((start, end))
        self.seconds += end - start
        del self._spans[:-1000]


@dataclass(frozen=True)
class Mark:
    """A moment, and what had been compiled until then; seconds."""

    time: float
    compiling: float

    @classmethod
    def now(cls) -> Mark:
        """Returns this moment."""
        return cls(time.perf_counter(), clock().seconds)


@functools.cache
def clock() -> Clock:
    """Returns the one clock of the process, which begins to listen with the first call."""
    return Clock()
