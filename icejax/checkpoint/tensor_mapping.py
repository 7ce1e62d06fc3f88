"""Maps each parameter to the tensors of a Hugging Face folder that hold it, and joins them.

`icejax.checkpoint.tensors` calls it. Stored matrices are [O, I] or turned [I, O]; a joined parameter is dtype[O, I], or
dtype[E, O, I] of E experts, and codes have the form of `Grouped`, [..., G, O, g].

Example, a family with q_proj, k_proj and v_proj fused in qkv_proj, of 8, 2 and 2 rows and 4 columns:

    attn.q_proj.weight [8, 4]  ->  attn.qkv_proj.weight [12, 4], rows 0 to 7
    attn.k_proj.weight [2, 4]  ->  attn.qkv_proj.weight [12, 4], rows 8 and 9
    attn.v_proj.weight [2, 4]  ->  attn.qkv_proj.weight [12, 4], rows 10 and 11
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from icejax.checkpoint import aligned
from icejax.checkpoint.quantized.cpu_codes import for_cpu
from icejax.checkpoint.quantized.float4 import doubled
from icejax.checkpoint.quantized.layouts import QuantizedMatrix
from icejax.checkpoint.quantized.rounding import Method
from icejax.models.registry import Family


@dataclass(frozen=True)
class TensorMapping:
    """The tensors of a Hugging Face folder that hold a parameter.

    Attributes:
        keys: keys of the stored tensors: one key, or one per expert in order where experts are stored one by one.
        shape: shape of each stored tensor.
        experts: number of experts; 0: the parameter is one tensor without an axis of experts.
        whole: whether one stored tensor holds all experts.
        rows: the rows of each matrix [O, I] that belong to the parameter, in one piece or every n-th; None: all.
        turned: whether each matrix is stored as [I, O].
    """

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    experts: int = 0
    whole: bool = False
    rows: slice | None = None
    turned: bool = False

    @property
    def columns(self) -> int:
        """Number of columns of each matrix [O, I]."""
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
        """Returns the parameter, joined from its matrices; one matrix is in memory at a time.

        Args:
            matrices: the stored tensors, or the matrices of the one tensor that holds all experts.
            dtype: dtype of the parameter unless it is codes.
            codes: whether quantised matrices stay codes, contiguous in the form of `Grouped`; all then have one layout.
            on_cpu: whether narrow numbers take the form that a CPU needs (`for_cpu`); without `codes` it has no effect.
            method: how matrices are rounded; None: they are not.
        """
        stacks: list[np.ndarray] = []
        for i, matrix in enumerate(matrices):
            leaf = self._leaf(matrix, dtype, codes, method)
            leaf = for_cpu(leaf) if codes and on_cpu else leaf
            if not self.experts:
                return leaf
            stacks = stacks or [aligned.empty((self.experts, *array.shape), array.dtype) for array in _arrays(leaf)]
            for stack, array in zip(stacks, _arrays(leaf), strict=True):
                stack[i] = array
        return _like(leaf, stacks)

    def _leaf(
        self, matrix: np.ndarray | QuantizedMatrix, dtype: np.dtype, codes: bool, method: Method | None
    ) -> np.ndarray | QuantizedMatrix:
        """Returns one matrix, or a part of its rows, as an array of `dtype` or as codes; rounded if there is a `method`."""
        if self.turned and not isinstance(matrix, QuantizedMatrix):
            matrix = matrix.T
        if self.rows is not None:
            matrix = _like(matrix, [array[self.rows] for array in _arrays(matrix)])
        if method is not None:
            matrix = method.rounded(matrix)
        if isinstance(matrix, QuantizedMatrix) and codes:
            return _grouped(matrix if self.experts else doubled(matrix))
        return aligned.cast(matrix.weights() if isinstance(matrix, QuantizedMatrix) else matrix, dtype)


def _grouped(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Returns a matrix in the form of `Grouped`, groups first: codes [G, O, g], 4-bit codes as int4; scale and zero [G, O]."""
    codes = matrix.codes.reshape(*matrix.scale.shape, -1).swapaxes(0, 1)
    by_group = [np.ascontiguousarray(values.T) for values in _arrays(matrix)[1:]]
    dtype = ml_dtypes.int4 if matrix.bits == 4 else codes.dtype
    return _like(matrix, [np.asarray(codes, dtype, order="C"), *by_group])


def _arrays(tensor: np.ndarray | QuantizedMatrix) -> list[np.ndarray]:
    """Returns the arrays of a tensor: itself, or the codes, scale and zero of a QuantizedMatrix."""
    if not isinstance(tensor, QuantizedMatrix):
        return [tensor]
    return [tensor.codes, tensor.scale] + ([] if tensor.zero is None else [tensor.zero])


def _like(tensor: np.ndarray | QuantizedMatrix, arrays: list[np.ndarray]) -> np.ndarray | QuantizedMatrix:
    """Returns a tensor of the same kind as `tensor` with these arrays."""
    return (
        tensor._replace(**dict(zip(QuantizedMatrix._fields, arrays, strict=False)))
        if isinstance(tensor, QuantizedMatrix)
        else arrays[0]
    )


def tensor_mappings(
    shapes: dict[str, tuple[int, ...]], family: Family, form: tuple[tuple[str, str], ...] = ()
) -> dict[str, TensorMapping]:
    """Returns the stored tensors of each parameter, by the parameter's key.

    Args:
        shapes: shapes of the parameters, by key.
        family: how the model family's checkpoints are read.
        form: one of `family.renamings`.
    """
    experts_fused = any(key.startswith("experts.") for key in family.fused)
    fused: dict[str, tuple[str, tuple[str, ...]]] = {}
    for key, names in family.fused.items():
        module, stored = key.split(".")
        fused |= {f"{module}.{name}": (stored, names) for name in names}

    def stored_key(key: str) -> str:
        for ours, theirs in (*form, *family.renamed):
            key = key.replace(ours, theirs)
        return key

    def mapping(key: str, shape: tuple[int, ...]) -> TensorMapping:
        module, name, kind = ("", *key.split("."))[-3:]
        path, count, rows = key.removesuffix(f"{name}.{kind}"), shape[0] if module == "experts" else 0, None
        stored, names = fused.get(f"{module}.{name}", (name, (name,)))
        shape = shape[1:] if count else shape
        if len(names) > 1:
            sizes, index = [shapes[f"{path}{sibling}.{kind}"][int(count > 0)] for sibling in names], names.index(name)
            rows = slice(index, None, len(names)) if family.turned else slice(sum(sizes[:index]), sum(sizes[: index + 1]))
            shape = (sum(sizes), *shape[1:])
        if not count:
            return TensorMapping((stored_key(f"{path}{stored}.{kind}"),), shape, rows=rows)
        if not experts_fused:
            return TensorMapping(tuple(stored_key(f"{path}{i}.{stored}.{kind}") for i in range(count)), shape, count, rows=rows)
        turned, suffix = family.turned and kind == "weight", "" if kind == "weight" else f"_{kind}"
        shape = (count, *(shape[::-1] if turned else shape))
        return TensorMapping((stored_key(f"{path}{stored}{suffix}"),), shape, count, experts_fused, rows, turned)

    return {key: mapping(key, tuple(shape)) for key, shape in shapes.items()}
