"""icejax's own form of a folder: the tensors of a Hugging Face folder, by their keys, as an Orbax checkpoint."""

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

DATA = "d"  # the folder of tensors' bytes, of which parts are read


class _Later:
    """Stands for a tensor that is there when its turn comes."""


class _ByTurns(ocp.type_handlers.NumpyHandler):
    """Writes tensors as arrays are written, each to its end before the next is there, but small ones together.

    A write has a file and an index of its own, which takes longer than a small tensor does: `most` bytes are written together.
    """

    def __init__(self, tensors: Iterable[tuple[str, np.ndarray]], most: int) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self._tensors, self._most = tensors, most

    async def serialize(
        self,
        values: Sequence[_Later],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> list[ocp.future.Future]:
        places = {info.name: (info, how) for info, how in zip(infos, args, strict=True)}
        some: dict[str, np.ndarray] = {}
        for key, tensor in self._tensors:
            if sum(each.nbytes for each in some.values()) + tensor.nbytes > self._most:
                await self._write(some, places)
                some = {}
            some[key] = tensor
            del tensor  # or it would be there beside the next one
        await self._write(some, places)
        return []

    async def _write(self, some: dict[str, np.ndarray], places: dict[str, tuple]) -> None:
        infos, args = zip(*(places[key] for key in some), strict=True)
        for each in await super().serialize(list(some.values()), infos, args):
            each.result()


def save(path: Path, about: Mapping[str, tuple[tuple[int, ...], str]], tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes tensors one by one, in any order and in their own dtypes, to the new folder `path`.

    Args:
        about: shape and dtype of each, as safetensors names it, by key.
    """
    most = max(huggingface.size(*each) for each in about.values())
    registry = ocp.type_handlers.create_type_handler_registry((_Later, _ByTurns(tensors, most)))
    with _to_the_end(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as checkpointer:
        checkpointer.save(path.absolute(), {key: _Later() for key in about})


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
    with _told(path), ocp.StandardCheckpointer() as checkpointer:
        _check_files(path)
        metadata = checkpointer.metadata(path.absolute()).item_metadata.tree
        return {key: jax.ShapeDtypeStruct(m.shape, m.dtype) for key, m in metadata.items()}


def _check_files(path: Path) -> None:
    """Raises ValueError for what Orbax would wait for, as a pipe, or read whole, whatever its size."""
    for where, folders, files in os.walk(path):
        for folder in (Path(where, name) for name in folders):
            if folder.is_symlink():
                raise ValueError(f"{folder} is a link to a folder")
        for file in (Path(where, name) for name in files):
            if not file.is_file():
                raise ValueError(f"{file} is no file")
            if file.parent.name != DATA and (size := file.stat().st_size) > MOST_BYTES:
                raise ValueError(f"{file} has {size} bytes")


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Tells in one line that what is stored at `path` cannot be read: Orbax raises nearly anything for a damaged folder."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{path} is not a whole Orbax checkpoint ({reason}): convert it again") from None


def read(path: Path, key: str, about: jax.ShapeDtypeStruct) -> np.ndarray:
    """Returns one tensor of a checkpoint as stored; `about` is what `stored` says of it. InputError if it cannot be read."""
    how = ocp.args.PyTreeRestore({key: about}, {key: ocp.RestoreArgs(restore_type=np.ndarray)}, partial_restore=True)
    with _told(path), ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path.absolute(), args=how)[key]
