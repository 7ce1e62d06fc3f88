"""Measures how long JAX traces and compiles, which the first token waits for; generation and `show` report it."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import jax.monitoring

# Tracing, lowering, compiling, and loading a program from the compile cache.
EVENTS = ("/jax/core/compile/", "/jax/compilation_cache/cache_retrieval_time_sec")
BEGUN = "/jax/compilation_cache/compile_requests_use_cache"
ENDED = "/jax/core/compile/backend_compile_duration"


class Clock:
    """Adds up the seconds in which JAX traced, compiled or loaded programs.

    Attributes:
        seconds: total so far, of all threads.
        busy: whether a program is being compiled now; known only with a compile cache.
    """

    def __init__(self) -> None:
        self.seconds, self.busy = 0.0, False
        self._spans: list[tuple[float, float]] = []  # the last spans (start, end), disjoint
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
        # JAX reports the parts of a program before the whole, so spans inside this one are replaced by it.
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
    """A moment, and the compile time up to it.

    Attributes:
        time: seconds of `time.perf_counter`.
        compiling: seconds of the clock.
    """

    time: float
    compiling: float

    @classmethod
    def now(cls) -> Mark:
        """Returns the current moment."""
        return cls(time.perf_counter(), clock().seconds)


@functools.cache
def clock() -> Clock:
    """Returns the one clock of the process; it starts to listen at the first call."""
    return Clock()
