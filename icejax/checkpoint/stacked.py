"""Which tensors of a Hugging Face folder a parameter is made of."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from icejax.checkpoint.layouts import Codes

STACKED = re.compile(r"(.*\.experts)\.(\w+)\.weight")
FUSED = ("gate_proj", "up_proj")  # in one tensor, in this order


@dataclass(frozen=True)
class Stack:
    """Where a parameter stands in a Hugging Face folder.

    Attributes:
        keys: its tensors; of a matrix of all experts one an expert, in order.
        shape: of each of them.
        stacked: whether they are stacked; else there is one.
        part: what the parameter is of each of them, by axis; (): all of it.
    """

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    stacked: bool
    part: tuple[slice, ...] = ()

    def join(self, tensors: Iterable[np.ndarray | Codes]) -> np.ndarray | Codes:
        """Returns the parameter of its tensors, arrays or codes of one form, of which one at a time exists beside it."""
        tensors = map(self._own, tensors)
        first = next(tensors)
        if not self.stacked:
            return first
        whole = [np.empty((len(self.keys), *x.shape), x.dtype) for x in _arrays(first)]
        for i, tensor in enumerate(itertools.chain([first], tensors)):
            for all_of_them, own in zip(whole, _arrays(tensor), strict=True):
                all_of_them[i] = own
        return _like(first, whole)

    def _own(self, tensor: np.ndarray | Codes) -> np.ndarray | Codes:
        return _like(tensor, [np.ascontiguousarray(x[self.part]) for x in _arrays(tensor)]) if self.part else tensor


def _arrays(tensor: np.ndarray | Codes) -> list[np.ndarray]:
    if not isinstance(tensor, Codes):
        return [tensor]
    return [tensor.codes, tensor.scale] + ([] if tensor.zero is None else [tensor.zero])


def _like(tensor: np.ndarray | Codes, arrays: list[np.ndarray]) -> np.ndarray | Codes:
    return tensor._replace(**dict(zip(Codes._fields, arrays, strict=False))) if isinstance(tensor, Codes) else arrays[0]


def stacks(shapes: dict[str, tuple[int, ...]], renamed: Iterable[tuple[str, str]], *, fused: bool = False) -> dict[str, Stack]:
    """Returns where each parameter stands.

    Args:
        shapes: of the parameters, by their keys.
        renamed: parts of keys that are others in the folder, ours and theirs.
        fused: whether the folder holds each matrix of all experts in one tensor, and those of gate and up in the same.
    """

    def stack(key: str, shape: tuple[int, ...]) -> Stack:
        for ours, theirs in renamed:
            key = key.replace(ours, theirs)
        stacked = STACKED.fullmatch(key)
        if stacked is None:
            return Stack((key,), tuple(shape), False)
        if fused and stacked[2] in FUSED:
            count, inner, hidden = shape
            half = FUSED.index(stacked[2]) * inner
            part = slice(None), slice(half, half + inner)
            return Stack((f"{stacked[1]}.gate_up_proj",), (count, 2 * inner, hidden), False, part)
        if fused:
            return Stack((f"{stacked[1]}.{stacked[2]}",), tuple(shape), False)
        return Stack(tuple(f"{stacked[1]}.{i}.{stacked[2]}.weight" for i in range(shape[0])), tuple(shape[1:]), True)

    return {key: stack(key, shape) for key, shape in shapes.items()}
