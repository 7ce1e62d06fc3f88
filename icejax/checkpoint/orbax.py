"""icejax's own form of a folder: the tensors of a Hugging Face folder, by their keys, as an Orbax checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from icejax.errors import InputError


def save(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes `tensors` in their own dtypes to the new folder `path`."""
    with _to_the_end(), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), tensors)


@contextlib.contextmanager
def _to_the_end() -> Iterator[None]:
    """Lets a save that fails end with the last of its writes, and be told by what it raises alone.

    Orbax closes its event loop at the first error: the other writes go on, and bring back folders that have been removed.
    """
    log, silent, new_event_loop = logging.getLogger("absl"), logging.Filter("nothing"), asyncio.new_event_loop

    def patient() -> asyncio.AbstractEventLoop:
        loop = new_event_loop()
        close = loop.close

        def close_at_last() -> None:
            if not loop.is_closed() and (tasks := asyncio.all_tasks(loop)):
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            close()

        loop.close = close_at_last
        return loop

    log.addFilter(silent)  # Orbax prints a traceback of every error that it then raises
    asyncio.new_event_loop = patient
    try:
        yield
    finally:
        asyncio.new_event_loop = new_event_loop
        log.removeFilter(silent)


def stored(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape and dtype of every tensor stored at `path`; InputError if it is no whole checkpoint."""
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(path.absolute()).item_metadata.tree
    except (OSError, ValueError, KeyError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path} is not a whole Orbax checkpoint ({reason}): convert it again") from None
    return {key: jax.ShapeDtypeStruct(m.shape, m.dtype) for key, m in metadata.items()}


def read(path: Path, key: str, about: jax.ShapeDtypeStruct) -> np.ndarray:
    """Returns one tensor of a checkpoint as stored; `about` is what `stored` says of it."""
    how = ocp.args.PyTreeRestore({key: about}, {key: ocp.RestoreArgs(restore_type=np.ndarray)}, partial_restore=True)
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path.absolute(), args=how)[key]
