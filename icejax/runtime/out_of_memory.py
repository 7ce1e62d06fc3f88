"""The error line of a command that runs out of memory. `generate`, `chat` and `convert` call it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

from icejax.checks.errors import InputError
from icejax.runtime import devices


@contextlib.contextmanager
def report_out_of_memory(advice: str, session: Path | None) -> Iterator[None]:
    """Turns an out-of-memory error into an InputError.

    Args:
        advice: what the user can do.
        session: folder of the session, which holds the conversation up to its last whole answer; None: no session.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        note = f"; {session} holds the session up to its last whole answer" if session is not None and session.exists() else ""
        raise InputError(f"out of memory on {_side(error)}: {advice}{note}") from None


def _side(error: Exception) -> str:
    """Returns the memory that an error is about: the host's or the device's."""
    on_host = isinstance(error, MemoryError) or "host" in str(error).splitlines()[0].lower()
    return "the host" if on_host else f"the device ({devices.device().device_kind})"
