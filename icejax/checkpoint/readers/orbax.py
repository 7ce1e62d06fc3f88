"""icejax's own checkpoint folder: the tensors of a Hugging Face folder, under the same keys, in an Orbax checkpoint.

`icejax.checkpoint.tensors` and `icejax.checkpoint.convert` call it. A tensor keeps its stored shape and dtype; it is stored in
chunks (`boxes.chunk_shape`), so that a box of it is read without the rest. Tensors of older folders are one chunk each.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from icejax.checkpoint import boxes
from icejax.checkpoint.boxes import Box
from icejax.checks.errors import InputError
from icejax.checks.json_file import MOST_BYTES

About = Mapping[str, tuple[tuple[int, ...], str]]  # shape and dtype of each tensor, by key
NODE_BYTES = 2**18  # of the index: every write replaces the nodes that lead to its chunks, and leaves the old ones in the file
CACHE_BYTES = 2**24  # of these nodes in memory: Orbax's own 100 MB can be more than the tensors
BATCH_BYTES = 2**20  # smaller pieces are written together
DATA = "d"  # the subfolder with the tensors' bytes, whose files are read in parts


class _Placeholder:
    """Stands for a tensor that is made when Orbax writes it."""


class Stored(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        in_boxes: whether a box of it is read without the rest.
        info: where Orbax has it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    in_boxes: bool
    info: ocp.type_handlers.ParamInfo


class _OneByOne(ocp.type_handlers.NumpyHandler):
    """Writes each piece of a tensor to its end before the next is made; small ones are written together.

    A write makes a file and an index, which take longer than a small piece: pieces of up to `most_bytes` share one write.
    """

    def __init__(self, about: About, pieces: Iterable[tuple[str, int, np.ndarray]], most_bytes: int) -> None:
        super().__init__()
        self._about, self._pieces, self._most_bytes = about, pieces, most_bytes

    async def serialize(
        self,
        values: Sequence[_Placeholder],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> list[ocp.future.Future]:
        context = _context(in_one=infos[0].is_ocdbt_checkpoint)
        places = {info.name: info for info in infos}
        batch: list[tuple[ocp.type_handlers.ParamInfo, int, np.ndarray]] = []
        for key, start, array in self._pieces:
            if sum(part.nbytes for *_, part in batch) + array.nbytes > self._most_bytes:
                await asyncio.gather(*(self._write(*entry, context) for entry in batch))
                batch.clear()
            batch.append((places[key], start, array))
            del array  # else two pieces are in memory while the next is made
        await asyncio.gather(*(self._write(*entry, context) for entry in batch))
        return []

    async def _write(self, info: ocp.type_handlers.ParamInfo, start: int, array: np.ndarray, context: ts.Context) -> None:
        await info.await_path_creation()
        (shape, _), dtype = self._about[info.name], array.dtype
        spec = ocp.type_handlers.get_json_tspec_write(
            info,
            use_ocdbt=info.is_ocdbt_checkpoint,
            global_shape=shape,
            local_shape=boxes.chunk_shape(shape, dtype.itemsize),  # Orbax's own chunks are what one device writes
            dtype=dtype,
            process_index=jax.process_index(),
        )
        spec["kvstore"]["config"]["max_decoded_node_bytes"] = NODE_BYTES
        target = await ts.open(ts.Spec(spec), create=True, open=True, context=context)
        target = target[start : start + len(array)] if shape else target
        await target.write(array, can_reference_source_data_indefinitely=True)


def _context(*, in_one: bool) -> ts.Context:
    """Returns TensorStore's context of one checkpoint: it has the index of the chunks, so all tensors share one."""
    cache = ts.Context.Spec({"cache_pool#ocdbt": {"total_bytes_limit": CACHE_BYTES}})
    return ts.Context(cache, ocp.type_handlers.get_ts_context(use_ocdbt=in_one))


def save(path: Path, about: About, pieces: Iterable[tuple[str, int, np.ndarray]], *, most_bytes: int) -> None:
    """Writes tensors piece by piece, in any order and in their own dtypes, to the new folder `path`.

    Args:
        about: shape and dtype (as safetensors names it) of each tensor, by key.
        pieces: key of a tensor, its first row that is written, and the rows; a piece is whole chunks.
        most_bytes: pieces of up to so many bytes are written together, or of up to `BATCH_BYTES`.
    """
    registry = ocp.type_handlers.create_type_handler_registry(
        (_Placeholder, _OneByOne(about, pieces, max(most_bytes, BATCH_BYTES)))
    )
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


def stored(path: Path) -> dict[str, Stored]:
    """Returns every tensor stored at `path`; InputError if it is not a whole checkpoint."""
    with _as_input_error(path), ocp.StandardCheckpointer() as checkpointer:
        _check_files(path)
        metadata = checkpointer.metadata(path.absolute()).item_metadata.tree
        in_one = ocp.type_handlers.is_ocdbt_checkpoint(path.absolute())
        context = _context(in_one=in_one)
        return {key: _stored(key, path, entry, in_one, context) for key, entry in metadata.items()}


def _stored(key: str, path: Path, entry: Any, in_one: bool, context: ts.Context) -> Stored:
    """Returns a tensor from its entry in Orbax's metadata; `in_one` says whether all tensors are in one database."""
    chunk, layout = entry.storage.chunk_shape, entry.storage.zarr_metadata
    places = dict(is_ocdbt_checkpoint=in_one, use_zarr3=layout is not None and layout.zarr_format == 3)
    info = ocp.type_handlers.ParamInfo(name=key, parent_dir=path.absolute(), ts_context=context, **places)
    in_boxes = len(entry.shape) < 2 or 1 in entry.shape or tuple(chunk) != tuple(entry.shape)
    return Stored(tuple(entry.shape), np.dtype(entry.dtype), in_boxes, info)


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


def read(path: Path, key: str, about: Stored, box: Box | None = None) -> np.ndarray:
    """Returns one tensor of a checkpoint as stored, or a box of it; the chunks that hold it are read.

    Args:
        about: the tensor, from `stored`.
        box: the part that is read; None: all.

    Raises:
        InputError: the tensor cannot be read.
    """
    with _as_input_error(path):
        spec = ocp.type_handlers.get_json_tspec_read(about.info, use_ocdbt=about.info.is_ocdbt_checkpoint)
        tensor = ts.open(ts.Spec(spec), open=True, context=about.info.ts_context).result()
        return (tensor if box is None else tensor[box]).read().result()
