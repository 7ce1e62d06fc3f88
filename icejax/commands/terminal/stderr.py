"""The console of a command's messages."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from rich.console import Console


class _Lossy:
    """`sys.stderr`, but what it cannot take is lost: rich would end the program, and the answer on stdout with it."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, AttributeError, ValueError):  # full, closed when Python began, closed since
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, AttributeError, ValueError):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


def stderr_console(**options: Any) -> Console:
    """Returns a console that writes to stderr, and loses what stderr cannot take: it may be full, or a pipe without a reader.

    Args:
        options: of rich's `Console`.
    """
    return Console(file=_Lossy(), **options)
