"""The protocol every cache policy follows: frozen options, state in, state out."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from icejax.cache.pool.host_pool import PoolLayer
from icejax.cache.sizes import CacheSpec, PoolSpec
from icejax.checks.numbers import integer
from icejax.ops.attention.dense import Attended, Scoring
from icejax.ops.slots import by_head


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Lengths:
    """How far a cache has come; kept once for all layers.

    The clock is one for all rows, so that the pages of all become full at the same step. A row may join at any step: one of
    100 tokens that joins when the clock stands at 40 has its origin at 60.

    Attributes:
        origin: tokens of each row so far, less the clock; below 0 for a short text that joined late.
        clock: steps of the batch.
        next_page: the page of the pool that the newest tokens will fill, the same for all rows, heads and layers.
    """

    origin: jax.Array  # i32[B]
    clock: jax.Array  # i32[]
    next_page: jax.Array  # i32[]

    @classmethod
    def of(cls, tokens: Int[Array, " B"], pages: Int[Array, ""] | int = 0) -> Lengths:
        """Returns those behind texts, of which no token has been decoded."""
        return cls(tokens, jnp.int32(0), jnp.asarray(pages, jnp.int32))

    @classmethod
    def none(cls, batch: int) -> Lengths:
        """Returns those of an empty cache."""
        return cls.of(jnp.zeros(batch, jnp.int32))

    @property
    def seen(self) -> Int[Array, " B"]:
        """Tokens of each row so far: the position of the token that comes next."""
        return self.origin + self.clock


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """The device part of a cache.

    Attributes:
        layers: a state of each, of the shape its policy made it.
        lengths: how far it has come.
        table: the extents of the pool that every row has; None without a pool.
    """

    layers: tuple[Any, ...]
    lengths: Lengths
    table: jax.Array | None = None  # i32[B, X]


@functools.partial(jax.tree_util.register_dataclass, meta_fields=["scoring"], data_fields=["q", "k", "v", "lengths"])
@dataclass(frozen=True)
class Heads:
    """What new tokens bring to a layer's attention: a prompt, more text behind it, or one decoded token.

    Attributes:
        q: queries after RoPE.
        k: keys after RoPE.
        v: values, those of a latent layer too.
        lengths: tokens of each row; the rest is padding on the right, which may hold anything.
        scoring: how products of queries and keys become scores.
    """

    q: jax.Array  # dtype[B, T, N, H]
    k: jax.Array  # dtype[B, T, K, H]
    v: jax.Array  # dtype[B, T, K, Hv]
    lengths: jax.Array  # i32[B]
    scoring: Scoring

    def by_group(self) -> Float[Array, "B K G H"]:
        """Returns the queries of one decoded token by the KV head they belong to."""
        batch, _, heads, size = self.k.shape
        return self.q.reshape(batch, heads, -1, size)

    def planes(self, count: int) -> tuple[Float[Array, "B K T _"], ...]:
        """Returns what a cache of so many planes keeps of the tokens."""
        return tuple(by_head(x) for x in (self.k, self.v)[:count])

    def of_planes(
        self, planes: tuple[Float[Array, "B K *S _"], ...]
    ) -> tuple[Float[Array, "B K *S H"], Float[Array, "B K *S Hv"]]:
        """Returns the keys and the values in planes of any tokens, which the pool fills up to one width."""
        return planes[0][..., : self.k.shape[-1]], planes[-1][..., : self.v.shape[-1]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shared:
    """What one layer found and layers after it may follow.

    Attributes:
        order: i32[B, K, T], in which order tokens were packed into pages.
        choice: what was chosen in a step, in a form that the policy knows.
    """

    order: jax.Array | None = None
    choice: Any = None


@dataclass(frozen=True)
class View:
    """What a policy may look at beside its state and the new tokens; made anew wherever a layer runs.

    Attributes:
        lengths: before the new tokens; none while a prompt runs.
        pool: the layer's pages in host memory; None for a policy that keeps nothing there, and while a prompt runs.
        shared: what the layers before found.
        guess: returns queries [B, T, N, H] that are known before the layer's own, from the input of the layer before; None in
            the first layer and where there is none to be had.
        rerotate: takes heads after RoPE, [B, T, N, H], and by how many positions to turn each token [B, T]; returns them as if
            they had been projected there. For policies that say `rerotates`.
        project: takes heads [B, T, N, H] to the layer's output [B, T, D], as the attention block does.
    """

    lengths: Lengths
    pool: PoolLayer | None = None
    shared: Shared | None = None
    guess: Callable[[], jax.Array] | None = None
    rerotate: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    project: Callable[[jax.Array], jax.Array] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outcome:
    """What comes back from a policy.

    Attributes:
        state: after the new tokens.
        attended: what their queries attended to; None after a prompt, which attends exactly.
        pages: dtype[P', B, K, planes, p, W] for the pool; None if there are none to write.
        used: how many of them are not empty; None: all.
        shared: for the layers that follow.
        tokens: after a decoded one how many tokens were attended to exactly, by a query head and by any of a KV head, means
            over heads.
    """

    state: Any
    attended: Attended | None = None
    pages: jax.Array | None = None
    used: jax.Array | None = None
    shared: Shared | None = None
    tokens: jax.Array | None = None  # f32[2, B]


@functools.partial(
    jax.tree_util.register_dataclass, meta_fields=["allocated", "digest_bytes"], data_fields=["pages", "slots", "estimates"]
)
@dataclass(frozen=True)
class Report:
    """What a layer's state says of the newest step, and of itself.

    Attributes:
        found: pages, or single slots where the policy finds those, that were attended to exactly, brought from the host and
            needed, over KV heads, i32[3, B]; None without a pool.
        slots: tokens that stand on the device, over KV heads, i32[B].
        allocated: slots that there are for them in each row, over KV heads.
        digest_bytes: bytes of the state that describe tokens and are no keys or values.
        own: the estimate of the step's relative error, and tokens attended exactly, means over KV heads; None: no estimate.
    """

    pages: jax.Array | None
    slots: jax.Array
    allocated: int
    digest_bytes: int
    estimates: jax.Array | None = None  # f32[2, B]


class CachePolicy(abc.ABC):
    """Decides what of the keys and values is kept, where, and what a query attends to.

    A policy is a frozen dataclass, its fields are its options, and jit takes it as a static argument. It sees one layer at a
    time and never the model. Most are one of two kinds: `Eviction` keeps some tokens on the device, `Retrieval` keeps all
    tokens in host memory and fetches those that a query needs.
    """

    budget: int | None = None  # tokens attended exactly per KV head and layer; None: all
    dense_layers: int | None = 0  # first layers that keep the full cache; None: 2 of 16 and more, as in IceCache, else 0
    rerotates: bool = False  # whether `View.rerotate` is called, which not every RoPE allows

    def for_platform(self, platform: str, *, latent: bool) -> CachePolicy:
        """Returns the policy for a platform (cpu, gpu or tpu) and a kind of layers, where its options leave that open."""
        del platform, latent
        return self

    def for_layers(self, full: Sequence[int], *, of: int) -> list[CachePolicy]:
        """Returns a policy for each of the layers `full`: those of `of` with full attention, behind the dense ones."""
        del of
        return [self] * len(full)

    def pool(self, spec: CacheSpec) -> PoolSpec | None:
        """Returns what a layer of `spec` keeps in the pool; None for a policy that keeps nothing there."""
        del spec
        return None

    @abc.abstractmethod
    def init(self, spec: CacheSpec) -> Any:
        """Returns the empty state of a layer: a pytree whose arrays have rows, or rows and KV heads, as their first axis."""

    @abc.abstractmethod
    def prefill(self, state: Any, heads: Heads, attended: Attended, view: View) -> Outcome:
        """Returns what is kept of a prompt, which has attended exactly.

        What stands in padding, NaN included, must not be kept.
        """

    @abc.abstractmethod
    def decode(self, state: Any, heads: Heads, view: View) -> Outcome:
        """Appends one token per row, at position `view.lengths.seen`, and attends as the policy does."""

    def extend(self, state: Any, heads: Heads, view: View) -> Outcome:
        """Appends more text behind a cache.

        Here token by token, as if it were decoded, for policies that keep nothing in the pool.
        """
        batch, tokens, num_heads, _ = heads.q.shape

        def one(i: jax.Array, carry: tuple[Any, Attended]) -> tuple[Any, Attended]:
            state, attended = carry
            q, k, v = (jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1) for x in (heads.q, heads.k, heads.v))
            lengths = Lengths.of(view.lengths.seen + i, view.lengths.next_page)
            token = Heads(q, k, v, jnp.ones(batch, jnp.int32), heads.scoring)
            outcome = self.decode(state, token, replace(view, lengths=lengths))
            there = i < heads.lengths

            def put_in(old: jax.Array, x: jax.Array) -> jax.Array:
                return jnp.where(jnp.repeat(there, len(x) // batch).reshape(-1, *(1,) * (x.ndim - 1)), x, old)

            state = jax.tree.map(put_in, state, outcome.state)
            pairs = zip(attended, outcome.attended, strict=True)
            return state, Attended(*(jax.lax.dynamic_update_slice_in_dim(x, y, i, axis=1) for x, y in pairs))

        nothing = Attended(
            jnp.zeros((batch, tokens, num_heads, heads.v.shape[-1]), heads.q.dtype), jnp.zeros(heads.q.shape[:3])
        )
        state, attended = jax.lax.fori_loop(0, heads.lengths.max(), one, (state, nothing))
        return Outcome(state, attended)

    def joining(self, state: Any, lengths: Lengths, clock: Int[Array, ""]) -> Any:
        """Returns the state of rows right after their prompts for a batch whose clock stands at `clock`."""
        del lengths, clock
        return state

    @abc.abstractmethod
    def report(self, state: Any, lengths: Lengths) -> Report:
        """Returns what the state says of itself after so many tokens."""


def check_dense_layers(dense: int | None) -> None:
    """Raises InputError for a number of dense layers that there cannot be."""
    if dense is not None:
        integer("dense_layers", dense, least=0, most=1024)
