"""icejax's own checkpoint folder: the tensors of a Hugging Face folder, under the same keys, in an Orbax checkpoint.

`icejax.checkpoint.tensors` and `icejax.checkpoint.convert` call it. A tensor keeps its stored shape and dtype.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from icejax.checkpoint.readers import huggingface
from icejax.checks.errors import InputError
from icejax.checks.json_file import MOST_BYTES

DATA = "d"  # the subfolder with the tensors' bytes, whose files are read in parts


class _Placeholder:
    """Stands for a tensor that is made when Orbax writes it."""


class _OneByOne(ocp.type_handlers.NumpyHandler):
    """Writes each tensor to its end before the next is made; small tensors are written together.

    A write makes a file and an index, which take longer than a small tensor: tensors of up to `max_bytes` share one write.
    """

    def __init__(self, tensors: Iterable[tuple[str, np.ndarray]], max_bytes: int) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self._tensors, self._max_bytes = tensors, max_bytes

    async def serialize(
        self,
        values: Sequence[_Placeholder],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> list[ocp.future.Future]:
        places = {info.name: (info, how) for info, how in zip(infos, args, strict=True)}
        batch: dict[str, np.ndarray] = {}
        for key, tensor in self._tensors:
            if sum(array.nbytes for array in batch.values()) + tensor.nbytes > self._max_bytes:
                await self._write(batch, places)
                batch = {}
            batch[key] = tensor
            del tensor  # else two tensors are in memory while the next is made
        await self._write(batch, places)
        return []

    async def _write(self, batch: dict[str, np.ndarray], places: dict[str, tuple]) -> None:
        infos, args = zip(*(places[key] for key in batch), strict=True)
        for future in await super().serialize(list(batch.values()), infos, args):
            future.result()


def save(path: Path, about: Mapping[str, tuple[tuple[int, ...], str]], tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes tensors one by one, in any order and in their own dtypes, to the new folder `path`.

    Args:
        about: shape and dtype (as safetensors names it) of each tensor, by key.
        tensors: key and array of each tensor.
    """
    largest = max(huggingface.size(*entry) for entry in about.values())
    registry = ocp.type_handlers.create_type_handler_registry((_Placeholder, _OneByOne(tensors, largest)))
    with _finishing_writes(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as checkpointer:
        checkpointer.save(path.absolute(), {key: _Placeholder() for key in about})


@contextlib.contextmanager
def _finishing_writes() -> Iterator[None]:
    """Makes a save that fails finish its other writes first, and report only the error that it raises.

    Orbax closes its event loop at the first error: the other writes continue, and make removed folders again.
    """
    log, silence, new_event_loop = logging.getLogger("absl"), logging.Filter("nothing"), asyncio.new_event_loop

    def waiting_loop() -> asyncio.AbstractEventLoop:
        loop = new_event_loop()
        close = loop.close

        def close_after_tasks() -> None:
            if not loop.is_closed() and (tasks := asyncio.all_tasks(loop)):
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            close()

        loop.close = close_after_tasks
        return loop

    log.addFilter(silence)  # Orbax logs a traceback of every error before it raises the error
    asyncio.new_event_loop = waiting_loop
    try:
        yield
    finally:
        asyncio.new_event_loop = new_event_loop
        log.removeFilter(silence)


def stored(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape and dtype of every tensor stored at `path`; InputError if it is not a whole checkpoint."""
    with _as_input_error(path), ocp.StandardCheckpointer() as checkpointer:
        _check_files(path)
        metadata = checkpointer.metadata(path.absolute()).item_metadata.tree
        return {key: jax.ShapeDtypeStruct(m.shape, m.dtype) for key, m in metadata.items()}


def _check_files(path: Path) -> None:
    """Raises ValueError for files that would make Orbax hang (a pipe), or that it would read whole at any size."""
    for parent, folders, files in os.walk(path):
        for folder in (Path(parent, name) for name in folders):
            if folder.is_symlink():
                raise ValueError(f"{folder} is a link to a folder")
        for file in (Path(parent, name) for name in files):
            if not file.is_file():
                raise ValueError(f"{file} is no file")
            if file.parent.name != DATA and (size := file.stat().st_size) > MOST_BYTES:
                raise ValueError(f"{file} has {size} bytes")


@contextlib.contextmanager
def _as_input_error(path: Path) -> Iterator[None]:
    """Turns any error into an InputError of one line: Orbax raises nearly any exception for a damaged folder."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{path} is not a whole Orbax checkpoint ({reason}): convert it again") from None


def read(path: Path, key: str, about: jax.ShapeDtypeStruct) -> np.ndarray:
    """Returns one tensor of a checkpoint as stored.

    Args:
        about: its shape and dtype, from `stored`.

    Raises:
        InputError: the tensor cannot be read.
    """
    restore = ocp.args.PyTreeRestore({key: about}, {key: ocp.RestoreArgs(restore_type=np.ndarray)}, partial_restore=True)
    with _as_input_error(path), ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path.absolute(), args=restore)[key]
