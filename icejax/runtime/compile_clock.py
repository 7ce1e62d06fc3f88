"""Measures how long JAX traces and compiles, which the first token waits for; generation and `show` report it."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax.monitoring

# Tracing, lowering, compiling, and loading a program from the compile cache.
EVENTS = ("/jax/core/compile/", "/jax/compilation_cache/cache_retrieval_time_sec")
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # JAX reports it right before it compiles
ENDED = "/jax/core/compile/backend_compile_duration"


class Clock:
    """Adds up the seconds in which JAX traced, compiled or loaded programs.

    Attributes:
        seconds: total so far, of all threads.
        programs: number of programs that were compiled or loaded.
        busy: whether a program is being compiled now.
    """

    def __init__(self) -> None:
        self.seconds, self.programs, self.busy = 0.0, 0, False
        self._spans: list[tuple[float, float]] = []  # the last spans (start, end), disjoint
        self._listeners: list[Callable[[], None]] = []
        jax.monitoring.register_event_duration_secs_listener(self._add)

    @contextlib.contextmanager
    def telling(self, tell: Callable[[int], None]) -> Iterator[None]:
        """While the block runs, calls `tell` before each program that this thread compiles, with its number from 1."""
        thread, programs = threading.get_ident(), 0

        def begin() -> None:
            nonlocal programs
            if threading.get_ident() == thread:
                programs += 1
                tell(programs)

        self._listeners.append(begin)
        try:
            yield
        finally:
            self._listeners.remove(begin)

    def _add(self, event: str, duration: float, **_: str | int) -> None:
        if not event.startswith(EVENTS):
            return
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
        self.busy = event == LOWERED or (self.busy and event != ENDED)
        if event == LOWERED:
            self.programs += 1
            for begin in tuple(self._listeners):
                begin()


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
