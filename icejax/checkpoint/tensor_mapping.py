"""Which tensors of a Hugging Face folder a parameter is made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from icejax.checkpoint.quantized.cpu_codes import for_cpu
from icejax.checkpoint.quantized.float4 import doubled
from icejax.checkpoint.quantized.layouts import QuantizedMatrix
from icejax.checkpoint.quantized.rounding import Method
from icejax.models.registry import Family


@dataclass(frozen=True)
class TensorMapping:
    """Where a parameter stands in a Hugging Face folder.

    Attributes:
        keys: its tensors; of a matrix of all experts one an expert, in order, or one that holds all.
        shape: of each of them.
        experts: how many it is of; 0: of none, and there is one tensor.
        whole: whether one tensor holds all experts.
        rows: which of each matrix are its own; None: all.
        turned: whether each matrix is [I, O] there.
    """

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    experts: int = 0
    whole: bool = False
    rows: slice | None = None
    turned: bool = False

    @property
    def columns(self) -> int:
        """How many columns its matrices have."""
        return self.shape[-2 if self.turned else -1]

    def join(
        self,
        matrices: Iterable[np.ndarray | QuantizedMatrix],
        *,
        dtype: np.dtype,
        codes: bool,
        on_cpu: bool,
        method: Method | None = None,
    ) -> np.ndarray | QuantizedMatrix:
        """Returns the parameter of its tensors, or of the matrices in the one of all experts, of which one is there at a time.

        Args:
            dtype: of what is no codes.
            codes: whether codes, which then are of one form, stay such: contiguous, as `Grouped` has them.
            on_cpu: whether with `codes` narrow numbers take the forms that a CPU needs.
            method: that its matrices are rounded by; None: they are not.
        """
        made: list[np.ndarray] = []
        for i, matrix in enumerate(matrices):
            own = self._own(matrix, dtype, codes, method)
            own = for_cpu(own) if codes and on_cpu else own
            if not self.experts:
                return own
            made = made or [np.empty((self.experts, *x.shape), x.dtype) for x in _arrays(own)]
            for of_all, x in zip(made, _arrays(own), strict=True):
                of_all[i] = x
        return _like(own, made)

    def _own(
        self, matrix: np.ndarray | QuantizedMatrix, dtype: np.dtype, codes: bool, method: Method | None
    ) -> np.ndarray | QuantizedMatrix:
        if self.turned and not isinstance(matrix, QuantizedMatrix):
            matrix = matrix.T
        if self.rows is not None:
            matrix = _like(matrix, [x[self.rows] for x in _arrays(matrix)])
        if method is not None:
            matrix = method.rounded(matrix)
        if isinstance(matrix, QuantizedMatrix) and codes:
            return _grouped(matrix if self.experts else doubled(matrix))
        return np.asarray(matrix.weights() if isinstance(matrix, QuantizedMatrix) else matrix, dtype, order="C")


def _grouped(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Returns a matrix with its groups first, in the dtypes that a device has: codes [G, O, g], scale and zero [G, O]."""
    codes = matrix.codes.reshape(*matrix.scale.shape, -1).swapaxes(0, 1)
    by_group = [np.ascontiguousarray(x.T) for x in _arrays(matrix)[1:]]
    dtype = ml_dtypes.int4 if matrix.bits == 4 else codes.dtype
    return _like(matrix, [np.asarray(codes, dtype, order="C"), *by_group])


def _arrays(tensor: np.ndarray | QuantizedMatrix) -> list[np.ndarray]:
    if not isinstance(tensor, QuantizedMatrix):
        return [tensor]
    return [tensor.codes, tensor.scale] + ([] if tensor.zero is None else [tensor.zero])


def _like(tensor: np.ndarray | QuantizedMatrix, arrays: list[np.ndarray]) -> np.ndarray | QuantizedMatrix:
    return (
        tensor._replace(**dict(zip(QuantizedMatrix._fields, arrays, strict=False)))
        if isinstance(tensor, QuantizedMatrix)
        else arrays[0]
    )


def tensor_mappings(
    shapes: dict[str, tuple[int, ...]], family: Family, form: tuple[tuple[str, str], ...] = ()
) -> dict[str, TensorMapping]:
    """Returns where each parameter, of these shapes by key, stands in a folder of a family, in one of its forms."""
    whole = any(key.startswith("experts.") for key in family.fused)
    together: dict[str, tuple[str, tuple[str, ...]]] = {}
    for key, names in family.fused.items():
        module, stored = key.split(".")
        together |= {f"{module}.{name}": (stored, names) for name in names}

    def theirs(key: str) -> str:
        for own, their in (*form, *family.renamed):
            key = key.replace(own, their)
        return key

    def stack(key: str, shape: tuple[int, ...]) -> TensorMapping:
        module, name, kind = ("", *key.split("."))[-3:]
        path, count, own = key.removesuffix(f"{name}.{kind}"), shape[0] if module == "experts" else 0, None
        stored, names = together.get(f"{module}.{name}", (name, (name,)))
        shape = shape[1:] if count else shape
        if len(names) > 1:
            rows, at = [shapes[f"{path}{each}.{kind}"][int(count > 0)] for each in names], names.index(name)
            own = slice(at, None, len(names)) if family.turned else slice(sum(rows[:at]), sum(rows[: at + 1]))
            shape = (sum(rows), *shape[1:])
        if not count:
            return TensorMapping((theirs(f"{path}{stored}.{kind}"),), shape, rows=own)
        if not whole:
            return TensorMapping(tuple(theirs(f"{path}{i}.{stored}.{kind}") for i in range(count)), shape, count, rows=own)
        turned, suffix = family.turned and kind == "weight", "" if kind == "weight" else f"_{kind}"
        shape = (count, *(shape[::-1] if turned else shape))
        return TensorMapping((theirs(f"{path}{stored}{suffix}"),), shape, count, whole, own, turned)

    return {key: stack(key, tuple(shape)) for key, shape in shapes.items()}
