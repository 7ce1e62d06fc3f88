"""Matrices of experts in host memory: the bits of all of them in a table, some of them on the device as they are."""

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

PIECE = (16, 512)  # words that are read at once: few enough to fill up an expert with, and whole tiles of a TPU
Matrices = jax.Array | Grouped  # dtype[E, O, I], or codes in their place


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OffloadedExperts:
    """The same matrix of every expert, or codes in its place: all in host memory, R of them on the device.

    Attributes:
        table: every expert's bits, in words as wide as its widest numbers, cut into so many pieces, in host memory.
        resident: the matrices, or codes, of those on the device.
        slot: which of the resident ones an expert is; -1: none.
        live: tokens whose experts are to come; None: all.
        read: brings to the device what is wanted of several experts, by the numbers of their pieces.
    """

    table: jax.Array  # uint[E * pieces, 1, 16, 512], pinned_host
    resident: Matrices  # dtype[R, O, I]
    slot: jax.Array  # i32[E]
    live: jax.Array | None  # bool[T]
    read: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] = field(metadata=dict(static=True))

    @property
    def expert_bytes(self) -> int:
        """What comes from the host with an expert."""
        return self.table.nbytes // len(self.slot)

    def missing(self, ids: Int[Array, "T k"]) -> Bool[Array, "T k"]:
        """Returns for which experts that tokens take one has to come: not for those that an earlier one brings."""
        pairs = jnp.arange(ids.size, dtype=jnp.int32).reshape(ids.shape)
        return (self.slot[ids] < 0) & (self.first(ids)[ids] == pairs)

    def first(self, ids: Int[Array, "T k"]) -> Int[Array, " E"]:
        """Returns where each expert is first taken by a token that is live; the number of pairs: nowhere."""
        pairs = jnp.arange(ids.size, dtype=jnp.int32).reshape(ids.shape)
        if self.live is not None:
            pairs = jnp.where(self.live[:, None], pairs, ids.size)
        return jnp.full(self.slot.shape, ids.size, jnp.int32).at[ids].min(pairs)

    def held(self) -> Int[Array, " R"]:
        """Returns which experts are on the device."""
        return _held(self.slot, len(jax.tree.leaves(self.resident)[0]))

    def fetched(self, ids: Int[Array, " n"], wanted: Bool[Array, " n"]) -> Matrices:
        """Returns the matrices, or codes, of experts, from host memory; zeros for those that are not wanted."""
        pieces = len(self.table) // len(self.slot)
        numbers = ids[:, None] * pieces + jnp.arange(pieces, dtype=jnp.int32)[None, :]
        return _unpacked(self.read(self.table, numbers, wanted), self.resident)

    def whole(self) -> Matrices:
        """Returns the matrices, or codes, of all experts, on the device."""
        return _every(jax.device_put(self.table, devices.device_sharding()), self.resident, count=len(self.slot))

    def with_resident(self, whole: Matrices, taken: Int[Array, " E"]) -> OffloadedExperts:
        """Returns the same with those experts on the device that are taken most often; `whole`: all of them."""
        resident, slot = _chosen(whole, taken, count=len(jax.tree.leaves(self.resident)[0]))
        return replace(self, resident=resident, slot=slot)


def offload(matrices: Matrices, *, resident: int, read: Callable) -> OffloadedExperts:
    """Returns matrices of experts, or codes, in host memory, with the first `resident` of them on the device."""
    none = jnp.zeros(len(jax.tree.leaves(matrices)[0]), jnp.int32)
    table = jax.device_put(packed(matrices), devices.host_sharding())
    # Bound to the device, as those are that are chosen later, or a step is compiled twice.
    return OffloadedExperts(
        table, *jax.device_put(_chosen(matrices, none, count=resident), devices.device_sharding()), None, read
    )


def table_bytes(matrices: Matrices) -> int:
    """Returns the bytes of host memory that they take there."""
    table = jax.eval_shape(packed, matrices)
    return table.size * table.dtype.itemsize


def is_offloaded(x: Any) -> bool:
    """Says whether a leaf of a model is matrices in host memory."""
    return isinstance(x, OffloadedExperts)


def with_experts_on_device(tree: Any) -> Any:
    """Returns a model, or a part of one, with all matrices on the device; as it is, if none is in host memory."""
    return jax.tree.map(lambda x: x.whole() if is_offloaded(x) else x, tree, is_leaf=is_offloaded)


def with_live_tokens(tree: Any, live: Bool[Array, " T"]) -> Any:
    """Returns the weights of a model for tokens of which some are not live."""
    return jax.tree.map(lambda x: replace(x, live=live) if is_offloaded(x) else x, tree, is_leaf=is_offloaded)


@jax.jit
def packed(matrices: Matrices) -> UInt[Array, "R 1 16 512"]:
    """Returns a table with the bits of every expert, each filled up to whole pieces."""
    parts = jax.tree.leaves(matrices)
    wide = max(_bits(x.dtype) for x in parts)
    words = jnp.concatenate([_words(x, wide) for x in parts], axis=1)
    return _filled(words, math.prod(PIECE)).reshape(-1, 1, *PIECE)


def _words(x: jax.Array, wide: int) -> jax.Array:
    """Returns the bits of numbers [E, ...] in words of so many bits, uint[E, n].

    A word holds numbers that stand n apart: of neighbours an axis of a few would come, which a TPU fills up to 128.
    """
    bits = _bits(x.dtype)
    flat = lax.bitcast_convert_type(_filled(x.reshape(len(x), -1), wide // bits), f"uint{bits}")
    parts = jnp.split(flat, wide // bits, axis=1)
    return functools.reduce(jnp.bitwise_or, (part.astype(f"uint{wide}") << i * bits for i, part in enumerate(parts)))


def _filled(x: jax.Array, multiple: int) -> jax.Array:
    short = -x.shape[1] % multiple
    return jnp.pad(x, ((0, 0), (0, short))) if short else x


def _bits(dtype: jnp.dtype) -> int:
    return (jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo)(dtype).bits


def _unpacked(pieces: UInt[Array, "n pieces 16 512"], like: Matrices) -> Matrices:
    """Returns the matrices, or codes, of `packed`; each is of the form of one of `like`."""
    count, at, leaves = len(pieces), 0, []
    words = pieces.reshape(count, -1)
    kinds, tree = jax.tree.flatten(like)
    for kind in kinds:
        size, bits = math.prod(kind.shape[1:]), _bits(kind.dtype)
        each = _bits(words.dtype) // bits
        end = at + -(-size // each)
        parts = [(words[:, at:end] >> i * bits).astype(f"uint{bits}") for i in range(each)]
        flat = lax.bitcast_convert_type(jnp.concatenate(parts, axis=1), kind.dtype)
        leaves.append(flat[:, :size].reshape(count, *kind.shape[1:]))
        at = end
    return jax.tree.unflatten(tree, leaves)


@functools.partial(jax.jit, static_argnames="count")
def _every(table: jax.Array, like: Matrices, *, count: int) -> Matrices:
    return _unpacked(table.reshape(count, -1, *PIECE), like)


@functools.partial(jax.jit, static_argnames="count")
def _chosen(matrices: Matrices, taken: Int[Array, " E"], *, count: int) -> tuple[Matrices, Int[Array, " E"]]:
    """Returns the experts taken most often, in their order, and which of these each expert is."""
    there = best(taken.astype(jnp.float32), count)[1]
    slot = jnp.where(there, jnp.cumsum(there, dtype=jnp.int32) - 1, -1)
    held = _held(slot, count)
    return jax.tree.map(lambda x: x[held], matrices), slot


def _held(slot: Int[Array, " E"], count: int) -> Int[Array, " R"]:
    return jnp.flatnonzero(slot >= 0, size=count).astype(jnp.int32)
