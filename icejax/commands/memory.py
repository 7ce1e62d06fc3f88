"""What a command line says when memory does not suffice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

from icejax.checks.errors import InputError
from icejax.runtime import devices


@contextlib.contextmanager
def out_of_memory_told(advice: str, session: Path | None) -> Iterator[None]:
    """Turns running out of memory into an InputError that gives `advice` and says what the folder `session` still holds."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        kept = f"; {session} holds the session up to its last whole answer" if session is not None and session.exists() else ""
        raise InputError(f"out of memory on {_side(error)}: {advice}{kept}") from None


def _side(error: Exception) -> str:
    """Says which memory an error is about."""
    on_host = isinstance(error, MemoryError) or "host" in str(error).splitlines()[0].lower()
    return "the host" if on_host else f"the device ({devices.device().device_kind})"
