"""Experts in host memory: a table of the bits of all experts' matrices there, and the matrices of R of them on the device.

The checkpoint loader offloads them, the mixture of experts reads them, and prefill replaces all by matrices on the device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, UInt

from icejax.ops.quantized.products import Grouped
from icejax.ops.topk import best
from icejax.runtime import devices

PIECE = (16, 512)  # words of one read: whole tiles of a TPU, and little padding per expert
Matrices = jax.Array | Grouped  # dtype[E, O, I], or quantized


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OffloadedExperts:
    """One matrix of every expert, dense or quantized: all E in host memory, R of them on the device.

    Attributes:
        table: the bits of every expert, in words of its widest dtype, padded to whole pieces of `PIECE` words.
        resident: the matrices of the R experts on the device.
        slot: index in `resident` of each expert; -1: not on the device.
        live: tokens whose experts are fetched; None: all tokens.
        read: (table, piece numbers [n, pieces], wanted [n]) -> those pieces on the device; zeros where not wanted.
    """

    table: jax.Array  # uint[E * pieces, 1, 16, 512], pinned_host
    resident: Matrices  # dtype[R, O, I]
    slot: jax.Array  # i32[E]
    live: jax.Array | None  # bool[T]
    read: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] = field(metadata=dict(static=True))

    @property
    def expert_bytes(self) -> int:
        """Bytes that a fetch of one expert reads from the host."""
        return self.table.nbytes // len(self.slot)

    def missing(self, ids: Int[Array, "T k"]) -> Bool[Array, "T k"]:
        """Returns the pairs (token, choice) that fetch an expert: it is not resident, and the pair is its first live one."""
        pairs = jnp.arange(ids.size, dtype=jnp.int32).reshape(ids.shape)
        return (self.slot[ids] < 0) & (self.first(ids)[ids] == pairs)

    def first(self, ids: Int[Array, "T k"]) -> Int[Array, " E"]:
        """Returns each expert's first pair (token, choice) among live tokens, as token * k + choice; T k: no pair.

        Example: 4 experts and ids [[2, 0], [0, 3]] give [1, 4, 0, 3].
        """
        pairs = jnp.arange(ids.size, dtype=jnp.int32).reshape(ids.shape)
        if self.live is not None:
            pairs = jnp.where(self.live[:, None], pairs, ids.size)
        return jnp.full(self.slot.shape, ids.size, jnp.int32).at[ids].min(pairs)

    def held(self) -> Int[Array, " R"]:
        """Returns the indices of the experts on the device, in rising order."""
        return _resident_ids(self.slot, len(jax.tree.leaves(self.resident)[0]))

    def fetched(self, ids: Int[Array, " n"], wanted: Bool[Array, " n"]) -> Matrices:
        """Returns the matrices of the experts `ids`, fetched from host memory; zeros where not `wanted`."""
        pieces = len(self.table) // len(self.slot)
        numbers = ids[:, None] * pieces + jnp.arange(pieces, dtype=jnp.int32)[None, :]
        return _unpacked(self.read(self.table, numbers, wanted), self.resident)

    def whole(self) -> Matrices:
        """Returns the matrices of all experts, on the device."""
        return _all_experts(jax.device_put(self.table, devices.device_sharding()), self.resident, count=len(self.slot))

    def with_resident(self, whole: Matrices, taken: Int[Array, " E"]) -> OffloadedExperts:
        """Returns these experts with the R most chosen ones on the device.

        Args:
            whole: the matrices of all experts, on the device.
            taken: how often each expert was chosen.
        """
        resident, slot = _most_chosen(whole, taken, count=len(jax.tree.leaves(self.resident)[0]))
        return replace(self, resident=resident, slot=slot)


def offload(matrices: Matrices, *, resident: int, read: Callable) -> OffloadedExperts:
    """Returns experts' matrices in host memory, with the first `resident` experts on the device."""
    no_choices = jnp.zeros(len(jax.tree.leaves(matrices)[0]), jnp.int32)
    table = jax.device_put(packed(matrices), devices.host_sharding())
    # Committed to the device, as the experts of `with_resident` are, or the decode step is compiled twice.
    return OffloadedExperts(
        table, *jax.device_put(_most_chosen(matrices, no_choices, count=resident), devices.device_sharding()), None, read
    )


def table_bytes(matrices: Matrices) -> int:
    """Returns the bytes of host memory that `offload` takes for these matrices."""
    table = jax.eval_shape(packed, matrices)
    return table.size * table.dtype.itemsize


def is_offloaded(x: Any) -> bool:
    """Says whether a leaf of a model is experts in host memory."""
    return isinstance(x, OffloadedExperts)


def with_experts_on_device(tree: Any) -> Any:
    """Returns a model, or a part of one, with all experts on the device; unchanged if none is in host memory."""
    return jax.tree.map(lambda x: x.whole() if is_offloaded(x) else x, tree, is_leaf=is_offloaded)


def with_live_tokens(tree: Any, live: Bool[Array, " T"]) -> Any:
    """Returns the weights of a model for a batch of tokens where only `live` ones fetch experts."""
    return jax.tree.map(lambda x: replace(x, live=live) if is_offloaded(x) else x, tree, is_leaf=is_offloaded)


@jax.jit
def packed(matrices: Matrices) -> UInt[Array, "R 1 16 512"]:
    """Returns a table of the bits of every expert, each padded to whole pieces, uint[E * pieces, 1, 16, 512]."""
    parts = jax.tree.leaves(matrices)
    word_bits = max(_bits(x.dtype) for x in parts)
    words = jnp.concatenate([_words(x, word_bits) for x in parts], axis=1)
    return _padded(words, math.prod(PIECE)).reshape(-1, 1, *PIECE)


def _words(x: jax.Array, word_bits: int) -> jax.Array:
    """Returns the bits of numbers [E, ...] in words of `word_bits` bits, uint[E, n].

    A word holds numbers that are n apart: to join neighbours would need an axis of a few numbers, which a TPU pads to 128.
    Example: the int8 numbers [1, 2, 3, 4] make the 16-bit words [0x0301, 0x0402].
    """
    bits = _bits(x.dtype)
    flat = lax.bitcast_convert_type(_padded(x.reshape(len(x), -1), word_bits // bits), f"uint{bits}")
    parts = jnp.split(flat, word_bits // bits, axis=1)
    return functools.reduce(jnp.bitwise_or, (part.astype(f"uint{word_bits}") << i * bits for i, part in enumerate(parts)))


def _padded(x: jax.Array, multiple: int) -> jax.Array:
    padding = -x.shape[1] % multiple
    return jnp.pad(x, ((0, 0), (0, padding))) if padding else x


def _bits(dtype: jnp.dtype) -> int:
    return (jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo)(dtype).bits


def _unpacked(pieces: UInt[Array, "n pieces 16 512"], like: Matrices) -> Matrices:
    """Returns the matrices of the n packed experts, with the dtypes of `like` and its shapes except for the first axis."""
    count, at, leaves = len(pieces), 0, []
    words = pieces.reshape(count, -1)
    leaves_like, tree = jax.tree.flatten(like)
    for leaf_like in leaves_like:
        size, bits = math.prod(leaf_like.shape[1:]), _bits(leaf_like.dtype)
        per_word = _bits(words.dtype) // bits
        end = at + -(-size // per_word)
        parts = [(words[:, at:end] >> i * bits).astype(f"uint{bits}") for i in range(per_word)]
        flat = lax.bitcast_convert_type(jnp.concatenate(parts, axis=1), leaf_like.dtype)
        leaves.append(flat[:, :size].reshape(count, *leaf_like.shape[1:]))
        at = end
    return jax.tree.unflatten(tree, leaves)


@functools.partial(jax.jit, static_argnames="count")
def _all_experts(table: jax.Array, like: Matrices, *, count: int) -> Matrices:
    return _unpacked(table.reshape(count, -1, *PIECE), like)


@functools.partial(jax.jit, static_argnames="count")
def _most_chosen(matrices: Matrices, choices: Int[Array, " E"], *, count: int) -> tuple[Matrices, Int[Array, " E"]]:
    """Returns the `count` most chosen experts, in rising order, and each expert's index among them; -1: not among them."""
    is_resident = best(choices.astype(jnp.float32), count)[1]
    slot = jnp.where(is_resident, jnp.cumsum(is_resident, dtype=jnp.int32) - 1, -1)
    held = _resident_ids(slot, count)
    return jax.tree.map(lambda x: x[held], matrices), slot


def _resident_ids(slot: Int[Array, " E"], count: int) -> Int[Array, " R"]:
    return jnp.flatnonzero(slot >= 0, size=count).astype(jnp.int32)
