"""Which tensors of a Hugging Face folder a parameter is made of."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from icejax.checkpoint.layouts import Codes

STACKED = re.compile(r"(.*\.experts)\.(\w+\.weight)")


@dataclass(frozen=True)
class Stack:
    """Where a parameter stands in a Hugging Face folder.

    Attributes:
        keys: its tensors; of a matrix of all experts one an expert, in order.
        shape: of each of them.
        stacked: whether they are stacked; else there is one, the parameter itself.
    """

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    stacked: bool

    def join(self, tensors: Iterable[np.ndarray | Codes]) -> np.ndarray | Codes:
        """Returns the parameter of its tensors, arrays or codes of one form, of which one at a time exists beside it."""
        tensors = iter(tensors)
        first = next(tensors)
        if not self.stacked:
            return first
        whole = [np.empty((len(self.keys), *x.shape), x.dtype) for x in _arrays(first)]
        for i, tensor in enumerate(itertools.chain([first], tensors)):
            for all_of_them, own in zip(whole, _arrays(tensor), strict=True):
                all_of_them[i] = own
        return first._replace(**dict(zip(Codes._fields, whole, strict=False))) if isinstance(first, Codes) else whole[0]


def _arrays(tensor: np.ndarray | Codes) -> list[np.ndarray]:
    if not isinstance(tensor, Codes):
        return [tensor]
    return [tensor.codes, tensor.scale] + ([] if tensor.zero is None else [tensor.zero])


def stacks(shapes: dict[str, tuple[int, ...]], renamed: Iterable[tuple[str, str]]) -> dict[str, Stack]:
    """Returns where each parameter stands.

    Args:
        shapes: of the parameters, by their keys.
        renamed: parts of keys that are others in the folder, ours and theirs.
    """

    def stack(key: str, shape: tuple[int, ...]) -> Stack:
        for ours, theirs in renamed:
            key = key.replace(ours, theirs)
        stacked = STACKED.fullmatch(key)
        if stacked is None:
            return Stack((key,), tuple(shape), False)
        return Stack(tuple(f"{stacked[1]}.{i}.{stacked[2]}" for i in range(shape[0])), tuple(shape[1:]), True)

    return {key: stack(key, shape) for key, shape in shapes.items()}
