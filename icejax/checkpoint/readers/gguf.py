"""GGUF files: their tensors under Hugging Face's names, read one at a time.

`icejax.checkpoint.tensors` calls it, with a folder that `icejax.checkpoint.gguf.folder` made.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from icejax.checkpoint import aligned
from icejax.checkpoint.gguf.folder import pointed_model
from icejax.checkpoint.gguf.numbers import CODES, FLOATS, read_numbers
from icejax.checkpoint.gguf.parts import type_counts
from icejax.checkpoint.gguf.tensors import Mapped, mapped
from icejax.checkpoint.readers import huggingface
from icejax.checks.errors import InputError

LOG = logging.getLogger(__name__)


def keys(folder: Path) -> Iterator[tuple[str, tuple[int, ...], str, Callable[[], np.ndarray]]]:
    """Yields key, shape and dtype (as safetensors names it) of every tensor, and the function that reads it.

    Raises:
        InputError: a file is missing or not sound, or a tensor's type is not read.
    """
    for entry in mapped(huggingface.read_json(folder / "config.json"), pointed_model(folder).tensors):
        yield entry.key, entry.shape, _dtype(entry), functools.partial(read_tensor, entry)


def tell_types(folder: Path) -> None:
    """Logs how many tensors are dequantised, by type."""
    model = pointed_model(folder)
    counts = type_counts(tensor for tensor in model.tensors.values() if tensor.type in CODES)
    if counts:
        types = ", ".join(f"{count} in {kind}" for kind, count in counts.items())
        LOG.info("%s: tensors are dequantised as they are read: %s", model.files[0], types)


def read_tensor(entry: Mapped) -> np.ndarray:
    """Returns one tensor; of the tensors of all experts, one expert's matrix at a time is in memory beside the result."""
    first, *others = entry.stored
    if not others and not entry.turned:
        numbers = read_numbers(first, expert=entry.expert, heads=entry.heads)
        return numbers - np.float32(entry.less) if entry.less else numbers
    tensor, step = aligned.empty(entry.shape, huggingface.DTYPES[_dtype(entry)]), len(entry.stored)
    for expert in range(entry.shape[0]):
        for i, part in enumerate(entry.stored):
            tensor[expert][..., i::step] = read_numbers(part, expert=expert).T
    return tensor


def _dtype(entry: Mapped) -> str:
    """Returns the dtype of a tensor: that of its floats, float32 for codes and for what is computed."""
    for tensor in entry.stored:
        if tensor.type not in FLOATS and (tensor.type not in CODES or len(tensor.shape) == 1):
            raise InputError(f"{tensor.file}: {entry.key} is stored in {tensor.type}, which is not read: take another file")
    types = {tensor.type for tensor in entry.stored}
    return types.pop() if len(types) == 1 and types <= FLOATS.keys() and not entry.less else "F32"
