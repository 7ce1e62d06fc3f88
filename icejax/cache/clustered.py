"""The clustered cache: pages of tokens that mean similar things, in host memory, fetched by need (arXiv 2604.10539)."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from icejax.cache import growth
from icejax.cache.host import PoolLayer
from icejax.cache.policy import CachePolicy, CacheSpec, Lengths
from icejax.cache.state import NO_PAGE, ClusteredState, per_head, rows, take
from icejax.errors import InputError, quoted
from icejax.ops import tree
from icejax.ops.digests import NARROW, Digests, Score, digest, empty, put
from icejax.ops.paged import attend_paged
from icejax.ops.pages import pack
from icejax.ranges import whole

RANGES = dict(
    budget=(1, 2**30), page_size=(4, 128), sinks=(0, 2**20), window=(1, 2**20), candidates=(1, 2**20), opened=(1, 2**20),
    compact_every=(0, 2**20), dense_layers=(0, 1024), reuse=(1, 1024),
)  # fmt: skip
LEAST_FETCHED = 896  # tokens of fetched pages; with a quarter of them look-ups were missed (bench/results/pages.md)


def pages_for(wanted: int, page_size: int, candidates: int | None) -> int:
    """Returns how many pages are fetched for the best tokens of `wanted` pages; see `Clustered.candidates`."""
    return candidates * wanted if candidates else max(4 * wanted, LEAST_FETCHED // page_size)


@dataclass(frozen=True)
class Clustered(CachePolicy):
    """IceCache's budgeted cache, with a second-order page score that knows a page's outlier, a digest tree and a tail.

    A step attends exactly to the sinks, to the best tokens of the pages of highest score, and to the window; never to more
    than `budget` tokens per KV head and layer. All others contribute by their means.

    Attributes:
        budget: tokens attended exactly per KV head and layer, sinks and window included.
        page_size: tokens of a page.
        sinks: first tokens kept on the device; None: an eighth of the budget, at most 32 (the paper's two pages).
        window: newest tokens kept on the device; None: an eighth of the budget and a page, at most two pages.
        candidates: pages fetched for every page of tokens attended exactly; the best tokens of all of them are. None: 4, and
            never fewer pages than at a budget of 256.
        tail: whether tokens not attended exactly contribute the mean value of their page or node; IceCache's do not.
        score: how a page is scored by its digest; `mean` is by the mean of all its keys alone.
        group: how the query heads of a KV head agree on pages; `interleave` is IceCache's rule.
        digest_dtype: `int8` or `float8_e4m3fn`, with a scale per vector; None: the model's.
        page_dtype: `int8` stores pages with a scale per page and channel, in 56% of a 16-bit model's host memory (not on TPU);
            None: in the model's dtype.
        resident: whether the pages of the newest step stay on the device, so that only others are fetched; their memory
            is that of the fetched pages.
        opened: nodes of the digest tree opened per level.
        compact_every: decoded tokens after which the pages that hold them are sorted by meaning; 0: never.
        dense_layers: first layers that keep the full cache; None: 2 for models of 16 layers and more (as in the
            paper), else 0.
        reuse: clustered layers that share pages: the first of so many packs and selects by its own keys and queries, the
            others follow it. IceCache(reuse) has 3.
        prefetch: whether pages are selected by a guess of the queries, made of the input of the layer before (IceCache's),
            so that they can be on their way while that layer runs.

    Raises:
        InputError: an option is out of range, or the budget leaves no room for a page.
    """

    budget: int = 256
    page_size: int = 16
    sinks: int | None = None
    window: int | None = None
    candidates: int | None = None
    tail: bool = True
    score: Score = "second-order"
    group: tree.Group = "sum"
    digest_dtype: str | None = None
    page_dtype: str | None = None
    resident: bool = False
    opened: int = 56
    compact_every: int = 1024
    dense_layers: int | None = None
    reuse: int = 1
    prefetch: bool = False

    def __post_init__(self) -> None:
        for name, default in ((field.name, field.default) for field in dataclasses.fields(self)):
            value = getattr(self, name)
            if name in RANGES and not (value is None and default is None):
                whole(name, value, least=RANGES[name][0], most=RANGES[name][1])
            if isinstance(default, bool) and not isinstance(value, bool):
                raise InputError(f"{name} must be true or false, got {quoted(value)}")
        for name, allowed in (
            ("score", typing.get_args(Score)),
            ("group", typing.get_args(tree.Group)),
            ("digest_dtype", (None, *NARROW)),
            ("page_dtype", (None, "int8")),
        ):
            if getattr(self, name) not in allowed:
                raise InputError(f"{name} must be one of {', '.join(map(str, allowed))}, got {quoted(getattr(self, name))}")
        for name in ("page_size", "compact_every"):
            if getattr(self, name) & (getattr(self, name) - 1):
                raise InputError(f"{name} must be a power of two, got {getattr(self, name)}")
        if 0 < self.compact_every < 2 * self.page_size:
            raise InputError(f"compact_every must be 0 or at least two pages ({2 * self.page_size}), got {self.compact_every}")
        if self.window is not None and self.window <= self.page_size:
            raise InputError(f"window must be larger than page_size ({self.page_size}), got {self.window}")
        least = max(8, (self.sinks or 0) + (self.window or 0) + self.page_size)
        while sum(self._resident(least)) + self.page_size > least:
            least += 1
        if self.budget < least:
            sinks, window = self._resident(least)
            raise InputError(
                f"budget must hold {sinks} sinks, a window of {window} and a page of {self.page_size}: "
                f"at least {least}, got {self.budget}"
            )

    def _resident(self, budget: int) -> tuple[int, int]:
        """Returns the sinks and the window of a budget."""
        sinks = min(32, budget // 8) if self.sinks is None else self.sinks
        return sinks, min(2 * self.page_size, budget // 8 + self.page_size) if self.window is None else self.window

    @property
    def num_sinks(self) -> int:
        """First tokens kept on the device."""
        return self._resident(self.budget)[0]

    @property
    def num_window(self) -> int:
        """Slots of the window."""
        return self._resident(self.budget)[1]

    def num_pages(self, spec: CacheSpec) -> int:
        return (spec.prompt_capacity + spec.new_capacity) // self.page_size

    @property
    def _most_paged(self) -> int:
        """Page tokens attended exactly at most: beside the smallest window."""
        return self.budget - self.num_sinks - self._fill - 1

    def num_fetched(self, pages: int) -> int:
        """Returns how many of `pages` pages a step fetches per KV head."""
        return min(pages, pages_for(-(-self._most_paged // self.page_size) + 1, self.page_size, self.candidates))

    def init(self, spec: CacheSpec) -> ClusteredState:
        heads = (spec.batch_size, spec.num_kv_heads)
        sinks, window = (jnp.zeros((*heads, n, spec.head_dim), spec.dtype) for n in (self.num_sinks, self.num_window))
        levels = tree.build(empty((*heads, self.num_pages(spec)), spec.head_dim, self.digest_dtype or spec.dtype))
        page_ids = jnp.full((*heads, self.num_fetched(levels[0].count.shape[-1])), NO_PAGE)
        weights = jnp.zeros((*page_ids.shape, self.page_size))
        slots = (*page_ids.shape[:2], page_ids.shape[2] if self.resident else 0, self.page_size, spec.head_dim)
        held = (jnp.zeros(slots, spec.dtype),) * 2
        none = jnp.zeros(spec.batch_size, jnp.int32)
        return ClusteredState(none, sinks, sinks, window, window, levels, page_ids, weights, held, none)

    def prefill(self, state: ClusteredState, q, k, v, lengths: Lengths, guide=None):
        tokens = k.shape[1]
        k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        prompt = lengths.prompt[:, None]
        sinks, num_sinks = jnp.arange(self.num_sinks)[None, :], jnp.minimum(self.num_sinks, prompt)
        sinks_k, sinks_v = (take(x, sinks, sinks < prompt) for x in (k, v))
        recent = self.window_positions(lengths)
        held = (recent >= num_sinks) & (recent < prompt)
        window_k, window_v = (take(x, recent, held) for x in (k, v))
        # The middle, in pages. A full window page is left free, so that pages are flushed at the same step in all rows.
        middle = jnp.arange(tokens)[None, :] + self.num_sinks
        valid = middle < self.window_start(lengths)
        k, v = (take(x, middle, valid) for x in (k, v))
        k, v, digests, guide = self.paged(k, v, valid, guide)
        state = dataclasses.replace(
            state,
            num_sinks=num_sinks[:, 0],
            sinks_k=sinks_k,
            sinks_v=sinks_v,
            window_k=window_k,
            window_v=window_v,
            levels=tree.build(put(state.levels[0], digests, jnp.int32(0))),
        )
        return state, jnp.stack([k, v], axis=3).transpose(2, 0, 1, 3, 4, 5), guide

    def decode(self, state: ClusteredState, q, k, v, lengths: Lengths, pool: PoolLayer, guide=None, guess=None):
        with jax.named_scope("append"):
            slot = self._fill + lengths.decoded % self.page_size
            window_k, window_v = (
                jax.lax.dynamic_update_slice_in_dim(old, new[:, :, None], slot, axis=2)
                for old, new in ((state.window_k, k), (state.window_v, v))
            )
            sinks_mask, window_mask = self.resident_masks(state, lengths, seen=lengths.seen + 1)
        resident = tuple(
            jnp.concatenate([first, last], axis=2)
            for first, last in (
                (state.sinks_k, window_k),
                (state.sinks_v, window_v),
                (per_head(sinks_mask, k), per_head(window_mask, k)),
            )
        )
        with jax.named_scope("select"):
            queries = q.reshape(*k.shape[:2], -1, k.shape[2])
            fetched = self.num_fetched(state.levels[0].count.shape[-1])
            # Twice the pages wanted come to light at least, so that a budget for all pages finds all.
            opened = max(self.opened, 2 * -(-fetched // tree.FAN_OUT))
            found = tree.walk(
                queries,
                state.levels,
                opened=opened,
                selected=fetched,
                tail=self.tail,
                rule=self.score,
                group=self.group,
                guess=None if guess is None else guess.reshape(queries.shape),
                path=guide,
            )
        with jax.named_scope("fetch"):
            there = found.counts > 0
            if self.resident:
                held, fetched = pool.fetch_missing(found.page_ids, there, state.held, state.page_ids)
            else:
                held, fetched = pool.fetch_live(found.page_ids, there)
        with jax.named_scope("attend"):
            slots_mask = jnp.arange(self.page_size)[None, None, None, :] < found.counts[..., None]  # tokens come first
            room = self.budget - resident[2].sum(-1)
            out, weights = attend_paged(
                rows(queries),
                tuple(map(rows, resident)),
                tuple(map(rows, (*held, slots_mask))),
                (rows(found.tail_out), rows(found.tail_lse)),
                room=rows(room),
                most=self._most_paged,
                tail=self.tail,
            )
        weights = weights.reshape(slots_mask.shape)
        state = dataclasses.replace(
            state,
            window_k=window_k,
            window_v=window_v,
            page_ids=jnp.where(there, found.page_ids, NO_PAGE),
            weights=weights,
            held=held if self.resident else state.held,
            fetched=fetched,
        )
        return out.reshape(q.shape).astype(q.dtype), state, found.path

    def extend(self, state: ClusteredState, q, k, v, lengths: Lengths, new: jax.Array, pool: PoolLayer, guide=None):
        return growth.extend(self, state, q, k, v, lengths, new, pool, guide)

    def compact(self, state: ClusteredState, pages: jax.Array, lengths: Lengths, guide=None):
        return growth.compact(self, state, pages, lengths, guide)

    def flush(self, state: ClusteredState, lengths: Lengths):
        return growth.flush(self, state, lengths)

    def flushed(self, state: ClusteredState, news, lengths: Lengths):
        return growth.flushed(self, state, news, lengths)

    def page_counts(self, state: ClusteredState) -> jax.Array:
        selected, needed = (state.weights > 0).any(-1), state.page_ids != NO_PAGE
        return jnp.stack([selected.sum((1, 2)), state.fetched, needed.sum((1, 2))])

    def digest_bytes(self, state: ClusteredState) -> int:
        return sum(
            x.nbytes for x in jax.tree.leaves((state.levels, state.num_sinks, state.page_ids, state.weights, state.fetched))
        )

    def paged(
        self, k: jax.Array, v: jax.Array, valid: jax.Array, order: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, Digests, jax.Array | None]:
        """Packs tokens [B, K, T, H] of which `valid` [B, T] says which there are into pages [B, K, P, p, H].

        In the given order or a new one, which comes back if other layers are to have it.
        """
        order = pack(k, valid, page_size=self.page_size) if order is None else order
        shape = (*k.shape[:2], -1, self.page_size)
        mask = jnp.take_along_axis(jnp.broadcast_to(valid[:, None, :], order.shape), order, axis=2).reshape(shape)
        k, v = (jnp.take_along_axis(x, order[..., None], axis=2).reshape(*shape, k.shape[-1]) for x in (k, v))
        return k, v, digest(k, v, mask, self.digest_dtype), order if self.reuse > 1 else None

    @property
    def _fill(self) -> int:
        """Tokens in the window after a prompt and after every flush."""
        return self.num_window - self.page_size

    def resident_masks(self, state: ClusteredState, lengths: Lengths, *, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns which slots of the sinks and of the window hold a token, bool[B, S], when `seen` [B] tokens have come."""
        recent, sinks = self.window_positions(lengths), state.num_sinks[:, None]
        return jnp.arange(self.num_sinks)[None, :] < sinks, (recent >= sinks) & (recent < seen[:, None])

    def window_start(self, lengths: Lengths) -> jax.Array:
        """Position of the window's first slot, i32[B, 1]; below the sinks' end for short prompts."""
        flushed = lengths.decoded // self.page_size * self.page_size
        return lengths.prompt[:, None] - self._fill + flushed

    def window_positions(self, lengths: Lengths) -> jax.Array:
        return self.window_start(lengths) + jnp.arange(self.num_window)[None, :]
