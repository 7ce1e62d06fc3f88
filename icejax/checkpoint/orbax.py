"""icejax's own form of the parameters: an Orbax checkpoint of Hugging Face keys."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from icejax import memory
from icejax.errors import InputError, listed

DTYPES = ("float32", "bfloat16", "float16")  # what a model may be in


def save(path: Path, parameters: dict[str, np.ndarray]) -> None:
    """Writes `parameters` in their own dtypes to the new folder `path`."""
    with _to_the_end(), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), parameters)


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
    """Returns shape and dtype of every parameter stored at `path`; InputError if it is no whole checkpoint."""
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(path.absolute()).item_metadata.tree
    except (OSError, ValueError, KeyError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path} is not a whole Orbax checkpoint ({reason}): convert it again") from None
    return {key: jax.ShapeDtypeStruct(m.shape, m.dtype) for key, m in metadata.items()}


def read(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    *,
    dtypes: dict[str, np.dtype] | None = None,
    device: jax.Device | None = None,
) -> dict[str, jax.Array]:
    """Returns the parameters at `path` on `device` (the default one), in `dtypes` or as stored.

    Raises:
        InputError: keys are missing, unknown or of another shape; or, with `dtypes`, one is stored in none of DTYPES.
    """
    saved = stored(path)
    faults = [f"{key} is missing" for key in shapes if key not in saved]
    faults += [f"{key} is not a parameter of this model" for key in saved if key not in shapes]
    faults += [
        f"{key} has shape {list(saved[key].shape)}, expected {list(shape)}"
        for key, shape in shapes.items()
        if key in saved and tuple(saved[key].shape) != tuple(shape)
    ]
    if dtypes is not None:
        faults += [
            f"{key}: dtype {s.dtype} is not supported: expected {', '.join(DTYPES)}"
            for key, s in saved.items()
            if str(s.dtype) not in DTYPES
        ]
    if faults:
        raise InputError(f"{path} does not fit its config.json: {listed(faults)}")
    sharding = memory.on_device(device)
    target = {
        key: jax.ShapeDtypeStruct(s.shape, s.dtype if dtypes is None else dtypes[key], sharding=sharding)
        for key, s in saved.items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path.absolute(), target)
