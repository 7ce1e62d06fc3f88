"""Which tensors of a Hugging Face folder a parameter is made of."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

STACKED = re.compile(r"(.*\.experts)\.(\w+\.weight)")

FUSED = ("gate_proj", "up_proj")  # in one tensor, in this order


@dataclass(frozen=True)
class Stack:
    """Where a parameter stands in a Hugging Face folder.

    Attributes:
        keys: its tensors; of a matrix of all experts one an expert, in order.
        shape: of each of them.
        stacked: whether they are stacked; else there is one.
        half: which half of the second axis of that one the parameter is; None: all of it.
    """

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    stacked: bool
    half: int | None = None

    def split(self, parameter: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the tensors of a parameter, views of it, or what it is of one."""
        return dict(zip(self.keys, parameter if self.stacked else [parameter], strict=True))

    def join(self, tensors: Iterable[np.ndarray]) -> np.ndarray:
        """Returns the parameter of its tensors, of which one at a time exists beside it."""
        tensors = iter(tensors)
        first = next(tensors)
        if self.half is not None:
            return np.ascontiguousarray(np.split(first, 2, axis=1)[self.half])
        if not self.stacked:
            return first
        whole = np.empty((len(self.keys), *self.shape), first.dtype)
        whole[0] = first
        for i, tensor in enumerate(tensors, start=1):
            whole[i] = tensor
        return whole


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
        if fused:
            name = stacked[2].removesuffix(".weight")
            if name not in FUSED:
                return Stack((f"{stacked[1]}.{name}",), tuple(shape), False)
            count, inner, hidden = shape
            return Stack((f"{stacked[1]}.gate_up_proj",), (count, 2 * inner, hidden), False, FUSED.index(name))
        return Stack(tuple(f"{stacked[1]}.{i}.{stacked[2]}" for i in range(shape[0])), tuple(shape[1:]), True)

    return {key: stack(key, shape) for key, shape in shapes.items()}


def split(stacks: dict[str, Stack], parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors of all parameters, views of them but for those of fused ones."""
    found: dict[str, np.ndarray] = {}
    for name, stack in sorted(stacks.items()):  # gate before up
        for key, tensor in stack.split(parameters[name]).items():
            found[key] = np.concatenate([found[key], tensor], axis=1) if key in found else tensor
    return found
