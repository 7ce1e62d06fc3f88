"""The progress that a call reports to its caller. `api.generate` and `Session` call it; commands show it.

A `progress` is called with a phase, the amount done and the whole amount: ("loading", 3, 290) tensors, ("prefill", 2,
30) layers, ("compiling", 4, 0), the fourth program of the call, of a number that nobody knows, ("measuring", 5, 12) runs,
("warm-up", 3, 43) requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from icejax.runtime.compile_clock import clock

Progress = Callable[[str, int, int], None]  # phase, number done, number in all (0: unknown)
LOADING, COMPILING, PREFILL, MEASURING, WARM_UP = "loading", "compiling", "prefill", "measuring", "warm-up"


@contextlib.contextmanager
def prefilling(progress: Progress | None, layers: int) -> Iterator[Callable[[int], None] | None]:
    """Reports compiling while the block runs; yields a function that reports layers, to call with the number done.

    Yields None where nobody listens.
    """
    if progress is None:
        yield None
        return
    progress(PREFILL, 0, layers)
    with clock().telling(lambda programs: progress(COMPILING, programs, 0)):
        yield lambda done: progress(PREFILL, done, layers)
