"""The protocol every cache policy follows: frozen options, state in, state out.

The engine calls a policy layer by layer with `Heads`, arrays [B, T, N or K, H], and a `View`; it gets an `Outcome` back. A
prompt goes through `prefill`, one generated token per row through `decode`, further text through `extend`.
"""

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
from icejax.cache.pool.page_format import NoPages, PagesWithCodes
from icejax.cache.sizes import CacheSpec, PoolSpec, StepReads, num_bytes
from icejax.checks.numbers import integer
from icejax.ops.attention.dense import Attended, Scoring
from icejax.ops.slots import by_head


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Lengths:
    """Token counts of a cache, one record for all layers.

    All rows share one clock, so that their window pages become full at the same step. A row may join at any step. A prompt of
    100 tokens that joins at clock 40 has origin 60; after 3 decode steps the clock is 43 and `seen` is 103.

    Attributes:
        origin: tokens of each row minus the clock; negative for a short prompt that joined late.
        clock: decode steps of the batch.
        next_page: the pool page that the next flush fills, the same for all rows, heads and layers.
    """

    origin: jax.Array  # i32[B]
    clock: jax.Array  # i32[]
    next_page: jax.Array  # i32[]

    @classmethod
    def of(cls, tokens: Int[Array, " B"], pages: Int[Array, ""] | int = 0) -> Lengths:
        """Returns the lengths right after prefill: `tokens` per row, `pages` pages of the pool in use, no token decoded."""
        return cls(tokens, jnp.int32(0), jnp.asarray(pages, jnp.int32))

    @classmethod
    def none(cls, batch: int) -> Lengths:
        """Returns the lengths of an empty cache."""
        return cls.of(jnp.zeros(batch, jnp.int32))

    @property
    def seen(self) -> Int[Array, " B"]:
        """Tokens of each row so far, which is the position of the next token."""
        return self.origin + self.clock


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """The device part of a cache.

    Attributes:
        layers: the state of each layer, a pytree that its policy defines.
        lengths: token counts, the same for all layers.
        table: the extents of each row in the pool; None without a pool.
    """

    layers: tuple[Any, ...]
    lengths: Lengths
    table: jax.Array | None = None  # i32[B, X]


@functools.partial(jax.tree_util.register_dataclass, meta_fields=["scoring"], data_fields=["q", "k", "v", "lengths"])
@dataclass(frozen=True)
class Heads:
    """Queries, keys and values of a layer's new tokens: a prompt, further text, or one decoded token.

    Attributes:
        q: queries after RoPE.
        k: keys after RoPE.
        v: values, also for a latent layer, whose keys hold them.
        lengths: real tokens of each row; padding on the right may hold anything, NaN included.
        scoring: how query-key products become scores.
    """

    q: jax.Array  # dtype[B, T, N, H]
    k: jax.Array  # dtype[B, T, K, H]
    v: jax.Array  # dtype[B, T, K, Hv]
    lengths: jax.Array  # i32[B]
    scoring: Scoring

    def by_group(self) -> Float[Array, "B K G H"]:
        """Returns the queries of one decoded token, grouped by KV head."""
        batch, _, heads, size = self.k.shape
        return self.q.reshape(batch, heads, -1, size)

    def planes(self, count: int) -> tuple[Float[Array, "B K T _"], ...]:
        """Returns the keys and values in cache layout; keys alone where `count` is 1."""
        return tuple(by_head(x) for x in (self.k, self.v)[:count])

    def from_planes(
        self, planes: tuple[Float[Array, "B K *S _"], ...]
    ) -> tuple[Float[Array, "B K *S H"], Float[Array, "B K *S Hv"]]:
        """Returns the keys and values held in `planes`, cut to their own widths: the pool pads its planes to one width."""
        return planes[0][..., : self.k.shape[-1]], planes[-1][..., : self.v.shape[-1]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shared:
    """The selection that a layer passes to later layers, which follow it.

    Attributes:
        order: the token order of the packed pages, i32[B, K, T].
        choice: the selection of a decode step, in the policy's own form.
    """

    order: jax.Array | None = None
    choice: Any = None


@dataclass(frozen=True)
class View:
    """The arrays that a policy may read besides its state and the new tokens; built for each layer.

    Attributes:
        lengths: token counts before the new tokens; all 0 during prefill.
        pool: the layer's pages in host memory; None during prefill, and for a policy without a pool.
        shared: what earlier layers pass on.
        guess: returns the layer's queries [B, T, N, H] as predicted from the input of the layer before; None in the first
            layer and in phases without a prediction.
        rerotate: takes heads after RoPE [B, T, N, H] and a shift in positions for each token [B, T]; returns the heads at
            the shifted positions. For policies with `rerotates`.
        project: takes heads [B, T, N, H] to the layer's output [B, T, D], as the attention block does.
        near: keys, values and mask of sinks and window, in a decode step of a retrieval policy.
    """

    lengths: Lengths
    pool: PoolLayer | None = None
    shared: Shared | None = None
    guess: Callable[[], jax.Array] | None = None
    rerotate: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    project: Callable[[jax.Array], jax.Array] | None = None
    near: tuple[jax.Array, jax.Array, jax.Array] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outcome:
    """The result of a policy's call.

    Attributes:
        state: the state after the new tokens.
        attended: attention of the new tokens' queries; None after prefill, whose attention is exact.
        pages: new pages for the pool, dtype[P', B, K, planes, p, W], and the codes that the policy keeps of them, or None.
        used: how many of `pages`, from the first on, hold tokens; None: all.
        shared: passed to later layers.
        tokens: tokens attended exactly in a decode step: the mean over query heads, and the mean over KV heads, for each of
            which a token counts if any of its query heads attends to it.
    """

    state: Any
    attended: Attended | None = None
    pages: jax.Array | PagesWithCodes | NoPages | None = None
    used: jax.Array | None = None
    shared: Shared | None = None
    tokens: jax.Array | None = None  # f32[2, B]


@functools.partial(
    jax.tree_util.register_dataclass, meta_fields=["allocated", "digest_bytes"], data_fields=["pages", "slots", "estimates"]
)
@dataclass(frozen=True)
class Report:
    """Counters of a layer's newest step and of its state; counts are sums over KV heads.

    Attributes:
        pages: pages, or slots where the policy selects single slots, that were attended exactly, fetched from the host, and
            needed, i32[3, B]; None without a pool.
        slots: tokens on the device, i32[B].
        allocated: device slots of each row.
        digest_bytes: bytes of the state that describe tokens and hold no keys or values.
        estimates: means over KV heads of the step's estimated relative error and of the tokens attended exactly; or None.
    """

    pages: jax.Array | None
    slots: jax.Array
    allocated: int
    digest_bytes: int
    estimates: jax.Array | None = None  # f32[2, B]


class CachePolicy(abc.ABC):
    """Decides which keys and values the cache keeps, where it keeps them, and which of them a query attends to.

    A policy is a frozen dataclass whose fields are its options; jit takes it as a static argument. It sees one layer at a time
    and never the model. `Eviction` keeps some tokens on the device; `Retrieval` fetches from host memory those a query needs.
    """

    budget: int | None = None  # tokens attended exactly per KV head and layer; None: all
    dense_layers: int | None = 0  # first layers with the full cache; None: 2 in a model of 16 or more, as in IceCache, else 0
    rerotates: bool = False  # whether the policy calls `View.rerotate`, which not every RoPE allows
    prefetch: bool = False  # whether a decode step calls `View.guess`
    follows: bool = False  # whether the policy reads `View.shared`, and so follows an earlier layer
    evicts: bool = False  # whether it drops tokens that a later text would attend to
    packs_by_head: bool = False  # whether `prefill` treats each KV head as it would alone, so that heads can take turns
    by_head: bool = False  # whether every phase does, so that devices can share the heads
    by_queries: bool = True  # whether queries choose tokens; devices with copies of a KV head have different queries
    per_query_head: bool = False  # whether every query head selects pages of its own

    def for_platform(self, platform: str, *, latent: bool) -> CachePolicy:
        """Returns the policy with open options settled for a platform (cpu, gpu or tpu) and for latent or other layers."""
        return self

    def for_layers(self, full: Sequence[int], *, of: int) -> list[CachePolicy]:
        """Returns a policy for each layer in `full`.

        Args:
            full: indices of the full-attention layers after the dense ones.
            of: layers of the model.
        """
        return [self] * len(full)

    def pool(self, spec: CacheSpec) -> PoolSpec | None:
        """Returns the sizes of a layer of `spec` in the pool; None for a policy without a pool."""
        return None

    def step_reads(self, spec: CacheSpec) -> StepReads:
        """Returns the bytes that a decode step reads of a layer of `spec`; default: the whole state."""
        return StepReads(device=num_bytes(jax.eval_shape(lambda: self.init(spec))))

    @abc.abstractmethod
    def init(self, spec: CacheSpec) -> Any:
        """Returns the empty state of a layer: a pytree whose arrays have B, or B times K, as their first axis."""

    @abc.abstractmethod
    def prefill(self, state: Any, heads: Heads, attended: Attended, view: View) -> Outcome:
        """Returns the state after a prompt, whose attention `attended` is exact.

        The state may hold nothing from padding, NaN included.
        """

    @abc.abstractmethod
    def decode(self, state: Any, heads: Heads, view: View) -> Outcome:
        """Appends one token per row, at position `view.lengths.seen`, and attends to the policy's selection."""

    def extend(self, state: Any, heads: Heads, view: View) -> Outcome:
        """Appends further text to a cache.

        This default decodes token by token; it serves policies without a pool.
        """
        batch, tokens, num_heads, _ = heads.q.shape

        def append_token(i: jax.Array, carry: tuple[Any, Attended]) -> tuple[Any, Attended]:
            state, attended = carry
            q, k, v = (jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1) for x in (heads.q, heads.k, heads.v))
            lengths = Lengths.of(view.lengths.seen + i, view.lengths.next_page)
            token = Heads(q, k, v, jnp.ones(batch, jnp.int32), heads.scoring)
            outcome = self.decode(state, token, replace(view, lengths=lengths))
            is_real = i < heads.lengths

            def keep_in_padding(old: jax.Array, new: jax.Array) -> jax.Array:
                return jnp.where(jnp.repeat(is_real, len(new) // batch).reshape(-1, *(1,) * (new.ndim - 1)), new, old)

            state = jax.tree.map(keep_in_padding, state, outcome.state)
            pairs = zip(attended, outcome.attended, strict=True)
            return state, Attended(*(jax.lax.dynamic_update_slice_in_dim(x, y, i, axis=1) for x, y in pairs))

        zeros = Attended(jnp.zeros((batch, tokens, num_heads, heads.v.shape[-1]), heads.q.dtype), jnp.zeros(heads.q.shape[:3]))
        state, attended = jax.lax.fori_loop(0, heads.lengths.max(), append_token, (state, zeros))
        return Outcome(state, attended)

    def joining(self, state: Any, lengths: Lengths, clock: Int[Array, ""]) -> Any:
        """Returns the state of freshly prefilled rows for a batch whose clock is `clock`."""
        return state

    def can_trim(self, tokens: int) -> bool:
        """Says whether a cache of `tokens` tokens can forget its last ones; a cache that has evicted tokens cannot."""
        return False

    def trimmed(self, state: Any, tokens: Int[Array, " B"], page: Int[Array, ""]) -> Any:
        """Returns the state of one row with its first `tokens` tokens alone, of which none is in the pages from `page` on.

        Called where `can_trim`, and followed by `extend`.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot trim")

    @abc.abstractmethod
    def report(self, state: Any, lengths: Lengths) -> Report:
        """Returns the counters of the newest step and of the state; `lengths` are the token counts after it."""


def check_dense_layers(dense: int | None) -> None:
    """Raises InputError if `dense` is neither None nor an integer from 0 to 1024."""
    if dense is not None:
        integer("dense_layers", dense, least=0, most=1024)
