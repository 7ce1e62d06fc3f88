"""The protocol every cache policy follows: frozen options, state in, state out."""

from __future__ import annotations

import abc
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.host import PoolLayer


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The shapes of one layer's cache.

    Attributes:
        prompt_capacity: tokens a padded prompt may have.
        new_capacity: tokens that may be generated after it.
        dtype: dtype of keys and values, by name.
    """

    batch_size: int
    num_kv_heads: int
    head_dim: int
    prompt_capacity: int
    new_capacity: int
    dtype: str

    @property
    def capacity(self) -> int:
        """Tokens of prompt and generation together."""
        return self.prompt_capacity + self.new_capacity


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Lengths:
    """How far a cache has come; kept once for all layers.

    Attributes:
        prompt: tokens of each row's prompt.
        decoded: tokens decoded since the prompt, the same for all rows.
        pages: pages of the pool in use, the same for all rows, heads and layers.
    """

    prompt: jax.Array  # i32[B]
    decoded: jax.Array  # i32[]
    pages: jax.Array  # i32[]

    @property
    def seen(self) -> jax.Array:
        """Tokens of each row so far: the position of the token that comes next. i32[B]."""
        return self.prompt + self.decoded


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """The device part of a cache: one state per layer, each of the shape its policy made it."""

    layers: tuple[Any, ...]
    lengths: Lengths


class CachePolicy(abc.ABC):
    """Decides what of the keys and values is kept, where, and what a query attends to.

    A policy is a frozen dataclass, its fields are its options, and jit takes it as a static argument. It sees one
    layer at a time and never the model. A policy that keeps pages in host memory returns them from `prefill` and
    `flush` for the caller to write, and reads them in `decode`. A `guide` is what one layer found and others may follow,
    of a form that only the policy knows: None for a layer that is to find for itself.
    """

    budget: int | None = None  # tokens attended exactly per KV head and layer; None: all
    compact_every: int = 0  # decoded tokens after which their pages are sorted anew; 0: never
    dense_layers: int | None = None  # first layers that keep the full cache; None: 2 from 16 layers on, as in the paper
    reuse: int = 1  # layers with pages that share the partition and the choice of the first of them
    page_dtype: str | None = None  # of the pages in the pool: int8, or None for the model's
    prefetch: bool = False  # whether `decode` is given a guess of its queries

    @property
    def page_size(self) -> int:
        """Slots of a page in the pool; 0 for a policy that keeps nothing there."""
        return 0

    @property
    def num_window(self) -> int:
        """Newest tokens on their way to the pool."""
        return 0

    def num_pages(self, spec: CacheSpec) -> int:
        """Returns how many pages of the pool a layer of `spec` can need; 0 for a policy that keeps nothing there."""
        del spec
        return 0

    @abc.abstractmethod
    def init(self, spec: CacheSpec) -> Any:
        """Returns the empty state of a layer."""

    @abc.abstractmethod
    def prefill(
        self,
        state: Any,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Lengths,
        guide: Any = None,
    ) -> tuple[Any, jax.Array | None, Any]:
        """Returns the state after a prompt, its pages `dtype[P, B, K, 2, p, H]` for the pool, if any, and the guide.

        `lengths.pages` counts them. What stands in padding, NaN included, must not be kept.
        """

    @abc.abstractmethod
    def extend(
        self,
        state: Any,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        lengths: Lengths,
        new: Int[Array, " B"],
        pool: PoolLayer | None,
        guide: Any = None,
    ) -> tuple[Float[Array, "B T N H"], Any, tuple[jax.Array, jax.Array] | None, Any]:
        """Appends `new` tokens per row, right-padded, each of which attends exactly to all tokens up to itself.

        Returns what they attend to, the state after them, whose prompt they have become part of, their pages
        `dtype[P', B, K, 2, p, H]` for the pool with the number of those that are not empty, if any, and the guide.
        """

    @abc.abstractmethod
    def decode(
        self,
        state: Any,
        q: Float[Array, "B N H"],
        k: Float[Array, "B K H"],
        v: Float[Array, "B K H"],
        lengths: Lengths,
        pool: PoolLayer | None,
        guide: Any = None,
        guess: Float[Array, "B N H"] | None = None,
    ) -> tuple[Float[Array, "B N H"], Any, Any]:
        """Appends the token at position `lengths.seen`; returns what its queries attend to, the new state, and the guide.

        `guess` is known before `q` and may choose what is fetched in its place.
        """

    def flush(self, state: Any, lengths: Lengths) -> tuple[jax.Array, Any]:
        """Returns the oldest window page `dtype[B, K, 2, p, H]`, which is to leave, and what `flushed` needs to know: arrays.

        Called between steps whenever `page_size` tokens have been decoded, for policies with a pool.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps nothing in the pool")

    def flushed(self, state: Any, news: Any, lengths: Lengths) -> Any:
        """Returns the state after that page has left it; `lengths` are those that `flush` was given.

        Apart from `flush`, because XLA copies a large array that one program both reads and writes: this one only writes.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps nothing in the pool")

    def compact(self, state: Any, pages: jax.Array, lengths: Lengths, guide: Any = None) -> tuple[Any, jax.Array, Any]:
        """Returns the state, the newest pages `dtype[P', B, K, 2, p, H]` of the pool, sorted anew, and the guide.

        Called between steps whenever `compact_every` tokens have been decoded, with the pages that hold them.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps nothing in the pool")

    def page_counts(self, state: Any) -> jax.Array:
        """Returns how many pages the newest step attended to exactly, brought from the host and needed, over KV heads.

        An i32[3, B]; asked of policies with a pool.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps nothing in the pool")

    def digest_bytes(self, state: Any) -> int:
        """Returns the bytes of a layer's state that describe pages and are no keys or values."""
        del state
        return 0


def append(buffer: Float[Array, "R S H"], new: Float[Array, "B K H"], slot: Int[Array, " B"]) -> Float[Array, "R S H"]:
    """Returns `buffer`, rows and KV heads in one axis, with `new` in `slot` of each row."""
    batch, heads, size = new.shape
    slots, new = jnp.repeat(slot, heads), new.reshape(batch * heads, 1, size).astype(buffer.dtype)
    if batch == 1:
        return jax.lax.dynamic_update_slice(buffer, new, (0, slot[0], 0))
    by_row = functools.partial(_by_row, heads=heads)
    return jax.lax.platform_dependent(buffer, new, slots, cuda=_scattered, rocm=_scattered, default=by_row)


def _scattered(buffer: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """In one kernel; XLA:CPU would copy the buffer for it."""
    return buffer.at[jnp.arange(len(buffer)), slots].set(new[:, 0], mode="promise_in_bounds", unique_indices=True)


def _by_row(buffer: jax.Array, new: jax.Array, slots: jax.Array, *, heads: int) -> jax.Array:
    for row in range(0, len(buffer), heads):
        buffer = jax.lax.dynamic_update_slice(buffer, new[row : row + heads], (row, slots[row], 0))
    return buffer


def grouped(q: Float[Array, "B N H"], num_kv_heads: int) -> Float[Array, "R G H"]:
    """Returns the queries by row and KV head."""
    batch, heads, size = q.shape
    return q.reshape(batch * num_kv_heads, heads // num_kv_heads, size)


def per_head(mask: Bool[Array, "B S"], num_kv_heads: int) -> Bool[Array, "R S"]:
    """Returns a mask of rows for every KV head."""
    return jnp.repeat(mask, num_kv_heads, axis=0)
