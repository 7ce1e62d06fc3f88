"""Which tensors of a Hugging Face folder a parameter is made of."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from icejax.checkpoint.layouts import Codes
from icejax.models import Family


@dataclass(frozen=True)
class Stack:
    """Where a parameter stands in a Hugging Face folder.

    Attributes:
        keys: its tensors; of a matrix of all experts one an expert, in order.
        shape: of each of them.
        stacked: whether they are stacked; else there is one.
        part: what the parameter is of each of them, by axis; (): all of it.
        turned: whether they are [E, I, O], and the parameter, as codes are, [E, O, I].
    """

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    stacked: bool
    part: tuple[slice, ...] = ()
    turned: bool = False

    def join(self, tensors: Iterable[np.ndarray | Codes], *, codes: bool) -> np.ndarray | Codes:
        """Returns the parameter of its tensors, of which one at a time exists beside it.

        `codes` says that codes, which then are of one form, stay such.
        """
        tensors = (self._own(tensor, codes) for tensor in tensors)
        first = next(tensors)
        if not self.stacked:
            return first
        whole = [np.empty((len(self.keys), *x.shape), x.dtype) for x in _arrays(first)]
        for i, tensor in enumerate(itertools.chain([first], tensors)):
            for all_of_them, own in zip(whole, _arrays(tensor), strict=True):
                all_of_them[i] = own
        return _like(first, whole)

    def _own(self, tensor: np.ndarray | Codes, codes: bool) -> np.ndarray | Codes:
        if self.turned and not isinstance(tensor, Codes):
            tensor = tensor.swapaxes(1, 2)
        tensor = _like(tensor, [np.ascontiguousarray(x[self.part]) for x in _arrays(tensor)])
        return tensor.weights() if isinstance(tensor, Codes) and not codes else tensor


def _arrays(tensor: np.ndarray | Codes) -> list[np.ndarray]:
    if not isinstance(tensor, Codes):
        return [tensor]
    return [tensor.codes, tensor.scale] + ([] if tensor.zero is None else [tensor.zero])


def _like(tensor: np.ndarray | Codes, arrays: list[np.ndarray]) -> np.ndarray | Codes:
    return tensor._replace(**dict(zip(Codes._fields, arrays, strict=False))) if isinstance(tensor, Codes) else arrays[0]


def stacks(shapes: dict[str, tuple[int, ...]], family: Family) -> dict[str, Stack]:
    """Returns where each parameter, of these shapes by key, stands in a folder of a family."""
    whole = any(key.startswith("experts.") for key in family.fused)
    together: dict[str, tuple[str, tuple[str, ...]]] = {}
    for key, names in family.fused.items():
        module, stored = key.split(".")
        together |= {f"{module}.{name}": (stored, names) for name in names}

    def theirs(key: str) -> str:
        for own, their in family.renamed:
            key = key.replace(own, their)
        return key

    def stack(key: str, shape: tuple[int, ...]) -> Stack:
        module, name, kind = ("", *key.split("."))[-3:]
        path, axis, part = key.removesuffix(f"{name}.{kind}"), int(module == "experts"), ()
        stored, names = together.get(f"{module}.{name}", (name, (name,)))
        if len(names) > 1:
            rows, at = [shapes[f"{path}{each}.{kind}"][axis] for each in names], names.index(name)
            own = slice(at, None, len(names)) if family.turned else slice(sum(rows[:at]), sum(rows[: at + 1]))
            part, shape = (slice(None),) * axis + (own,), (*shape[:axis], sum(rows), *shape[axis + 1 :])
        if axis and not whole:
            keys = tuple(theirs(f"{path}{i}.{stored}.{kind}") for i in range(shape[0]))
            return Stack(keys, tuple(shape[1:]), True)
        if not axis:
            return Stack((theirs(f"{path}{stored}.{kind}"),), tuple(shape), False, part)
        turned = family.turned and kind == "weight"
        suffix = "" if kind == "weight" else f"_{kind}"
        return Stack((theirs(f"{path}{stored}{suffix}"),), (shape[0], *shape[:0:-1]) if turned else shape, False, part, turned)

    return {key: stack(key, tuple(shape)) for key, shape in shapes.items()}
