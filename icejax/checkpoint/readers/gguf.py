"""GGUF files: their tensors under Hugging Face's names, read one at a time, as numbers or as codes.

`icejax.checkpoint.tensors` calls it, with a folder that `icejax.checkpoint.gguf.folder` made.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from icejax.checkpoint import aligned
from icejax.checkpoint.boxes import Box
from icejax.checkpoint.gguf.codes import TYPES, Blocks
from icejax.checkpoint.gguf.folder import pointed_model
from icejax.checkpoint.gguf.numbers import CODES, FLOATS, read_numbers, read_stored
from icejax.checkpoint.gguf.parts import type_counts
from icejax.checkpoint.gguf.tensors import Mapped, mapped
from icejax.checkpoint.quantized.layouts import Layout
from icejax.checkpoint.readers import huggingface
from icejax.checks.errors import InputError

LOG = logging.getLogger(__name__)


def keys(
    folder: Path, *, as_codes: bool = False
) -> Iterator[tuple[str, tuple[int, ...], str, Callable[..., np.ndarray], Layout | None, bool]]:
    """Yields key, shape, dtype, the function that reads it, its layout, and whether that reads boxes, for every tensor.

    Args:
        as_codes: whether matrices in types of `codes.TYPES` are read as bytes, with that type as dtype and a layout; all others
            have the dtype of their numbers, as safetensors names it, and no layout.

    Raises:
        InputError: a file is missing or not sound, or a tensor's type is not read.
    """
    for entry in mapped(huggingface.read_json(folder / "config.json"), pointed_model(folder).tensors):
        dtype = _dtype(entry)
        if as_codes and _is_coded(entry):
            layout = Blocks(kind=entry.stored[0].type, turned=entry.turned)
            yield entry.key, entry.shape, layout.kind, functools.partial(_read_bytes, entry), layout, entry.plain
        else:
            yield entry.key, entry.shape, dtype, functools.partial(read_tensor, entry), None, entry.plain


def tell_types(folder: Path, *, as_codes: bool = False) -> None:
    """Logs how many tensors are dequantised, by type; `as_codes` as in `keys`."""
    model = pointed_model(folder)
    kinds = CODES - TYPES.keys() if as_codes else CODES
    counts = type_counts(tensor for tensor in model.tensors.values() if tensor.type in kinds)
    if counts:
        types = ", ".join(f"{count} in {kind}" for kind, count in counts.items())
        LOG.info("%s: tensors are dequantised as they are read: %s", model.files[0], types)


def read_tensor(entry: Mapped, box: Box | None = None) -> np.ndarray:
    """Returns one tensor, or a box of it, which an entry that is not `plain` does not have.

    Of the tensors of all experts, one expert's matrix at a time is in memory beside the result.
    """
    first = entry.stored[0]
    if entry.plain:
        numbers = read_numbers(first, expert=entry.expert, heads=entry.heads, box=box)
        return numbers - np.float32(entry.less) if entry.less else numbers
    tensor, step = aligned.empty(entry.shape, huggingface.DTYPES[_dtype(entry)]), len(entry.stored)
    for expert in range(entry.shape[0]):
        for i, part in enumerate(entry.stored):
            tensor[expert][..., i::step] = read_numbers(part, expert=expert).T
    return tensor


def _read_bytes(entry: Mapped, box: Box | None = None) -> np.ndarray:
    """Returns the bytes of a tensor's blocks, or of a box, u8[..., bytes of a row]; rows of several tensors alternate."""
    parts = [read_stored(tensor, expert=entry.expert, heads=entry.heads, box=box) for tensor in entry.stored]
    return parts[0] if len(parts) == 1 else np.stack(parts, axis=2).reshape(len(parts[0]), -1, parts[0].shape[-1])


def _is_coded(entry: Mapped) -> bool:
    """Says whether a tensor is a matrix, or one for each expert, of a type that can stay codes."""
    kinds = {tensor.type for tensor in entry.stored}
    return len(kinds) == 1 and kinds <= TYPES.keys() and not entry.less and len(entry.shape) == (3 if entry.turned else 2)


def _dtype(entry: Mapped) -> str:
    """Returns the dtype of a tensor's numbers: that of its floats, float32 for codes and computed numbers."""
    for tensor in entry.stored:
        if tensor.type not in FLOATS and (tensor.type not in CODES or len(tensor.shape) == 1):
            raise InputError(f"{tensor.file}: {entry.key} is stored in {tensor.type}, which is not read: take another file")
    types = {tensor.type for tensor in entry.stored}
    return types.pop() if len(types) == 1 and types <= FLOATS.keys() and not entry.less else "F32"
