"""Base of the retrieval policies: all tokens are in pages in host memory, and a step fetches the pages that its query needs.

Called by the layer walk through `CachePolicy`. Pages are [P, B, K, planes, p, W], fetched ones [B, K, M, p, H].
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.bases.selection import Selection, num_attended
from icejax.cache.bases.window import Planes, Window, WindowState
from icejax.cache.index.base import PageIndex
from icejax.cache.pool.attention import Read, attend_pages
from icejax.cache.pool.host_pool import Fetched
from icejax.cache.pool.page_format import PagePlanes, Stored, stack_planes
from icejax.cache.protocol import CachePolicy, Heads, Lengths, Outcome, Report, Shared, View
from icejax.cache.sizes import CacheSpec, PoolSpec, StepReads
from icejax.checks.errors import InputError
from icejax.ops.attention.dense import Attended, attend_all, causal_with_lse, merge_by_lse
from icejax.ops.pages.paged_attention import attend_whole
from icejax.ops.slots import merge_heads, per_head

NOTHING = np.int32(-1)
PAGE = 16  # page size of policies that select single slots: to them it is only how many tokens leave the window at once
# Keys, values and mask: of sinks and window, and of the selected pages (a single slot is a page of one token).
Near = tuple[Float[Array, "B K S H"], Float[Array, "B K S Hv"], Bool[Array, "B K S"]]
Pages = tuple[Float[Array, "B K M p H"], Float[Array, "B K M p Hv"], Bool[Array, "B K M p"]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedState:
    """The device state of a layer.

    Attributes:
        window: sinks and window.
        index: the policy's page index.
        ids: `Selection.ids` of the newest step; NOTHING for padding, and before the first step.
        weights: weights of the exactly attended tokens in `ids`, summed over query heads; 0 for all other tokens.
        held: planes of the selected pages, if they stay on the device.
        fetched: how many of the selected pages came from the host, summed over KV heads.
    """

    window: WindowState
    index: Any
    ids: jax.Array  # i32[B, K, M]
    weights: jax.Array  # f32[B, K, M, p]
    held: tuple[jax.Array, ...]  # dtype[B, K, M or 0, p, W] each
    fetched: jax.Array  # i32[B]


class Retrieval(CachePolicy):
    """Sinks and window on the device, all other tokens in pages of the pool, and an index of the pages on the device.

    A policy supplies the order of tokens in pages (`order`), the `index`, and the pages that a query needs (`find`).
    """

    page_size: int
    page_dtype: str | None = None  # dtype of the pool's pages: int8; None: the model's
    resident: bool = False  # whether the selected pages of the newest step stay on the device
    compact_every: int = 0  # decoded tokens after which their pages are packed again; 0: never
    by_slot: bool = False  # whether it selects and fetches single slots of pages
    shares: bool = False  # whether later layers may follow it
    packs_by_head = True

    @property
    @abc.abstractmethod
    def window_layout(self) -> Window:
        """Sinks and window."""

    @property
    @abc.abstractmethod
    def index(self) -> PageIndex:
        """The kind of index that `find` reads."""

    def num_fetched(self, pages: int) -> int:
        """Returns how many of `pages` pages, or of their slots, a step selects per KV head (`per_query_head`: per query head).

        Default: as many as fit the budget besides sinks and window: 12 pages of 16 for a budget of 256, 32 sinks and 32 slots.
        """
        room = self.budget - self.window_layout.sinks - self.window_layout.slots
        return min(pages * self.page_size, room) // self._unit

    @abc.abstractmethod
    def find(self, heads: Heads, index: Any, view: View) -> Selection:
        """Returns the pages that the queries of a decoded token need; reads the index, not the pool."""

    def order(self, k: Float[Array, "B K T H"], valid: Bool[Array, "B T"]) -> Int[Array, "B K S"] | None:
        """Returns the indices of tokens in the order in which they fill pages, for whole pages; None: by position."""
        return None

    def attend(self, heads: Heads, near: Near, pages: Pages, found: Selection) -> tuple[Attended, Float[Array, "B K M p"]]:
        """Returns the attention, f32[B, K, G, Hv] and f32[B, K, G], and page tokens' weights summed over query heads.

        Default: attends to all selected pages and merges the tail. Assumes that every row has a token in sinks or window.
        """
        parts = (merge_heads(heads.by_group()), tuple(map(merge_heads, near)), tuple(map(merge_heads, pages)))
        attended, weights = attend_whole(*parts, jax.tree.map(merge_heads, found.bias), scoring=heads.scoring)
        if found.tail is not None:
            attended = merge_by_lse(*attended, *map(merge_heads, found.tail))
        shape = pages[2].shape
        return Attended(*(x.reshape(*shape[:2], *x.shape[1:]) for x in attended)), weights.reshape(shape)

    @property
    def _unit(self) -> int:
        """Slots fetched per id."""
        return 1 if self.by_slot else self.page_size

    def pool(self, spec: CacheSpec) -> PoolSpec:
        if self.by_slot and self.page_dtype is not None:  # a token with the scales of its page takes more bytes than in bf16
            got = f"page_dtype={self.page_dtype}"
            raise InputError(f"{got} is not possible for a policy that fetches single tokens: leave page_dtype out")
        return PoolSpec(
            pages=spec.capacity // self.page_size,
            page_size=self.page_size,
            unit=self._unit,
            planes=len(spec.planes),
            dtype=self.page_dtype or spec.dtype,
            compact_every=self.compact_every,
        )

    def step_reads(self, spec: CacheSpec) -> StepReads:
        return replace(super().step_reads(spec), host=self.num_fetched(self.pool(spec).pages) * self._unit * spec.token_bytes)

    def init(self, spec: CacheSpec) -> PagedState:
        heads = (spec.batch_size, spec.num_kv_heads)
        index = self.index.empty(spec, self.pool(spec).pages)
        fetched = self.num_fetched(self.index.counts(index).shape[-1])
        fetched *= spec.num_heads // spec.num_kv_heads if self.per_query_head else 1
        ids, weights = jnp.full((*heads, fetched), NOTHING), jnp.zeros((*heads, fetched, self._unit))
        slots = (*heads, fetched if self.resident else 0, self._unit, max(spec.planes))
        held = (jnp.zeros(slots, spec.dtype),) * len(spec.planes)
        zeros = jnp.zeros(spec.batch_size, jnp.int32)
        return PagedState(self.window_layout.init(spec), index, ids, weights, held, zeros)

    def prefill(self, state: PagedState, heads: Heads, attended: Attended, view: View) -> Outcome:
        window, middle = self.window_layout.after_prompt(heads.planes(len(state.window.sinks)), Lengths.of(heads.lengths))
        pages, described, shared = self._packed(*middle, view.shared)
        state = replace(state, window=window, index=self.index.of_prompt(state.index, described))
        return Outcome(state, pages=pages, shared=shared)

    def decode(self, state: PagedState, heads: Heads, view: View) -> Outcome:
        lengths, num_heads = view.lengths, heads.k.shape[2]
        with jax.named_scope("append"):
            window = self.window_layout.append(state.window, heads, lengths)
            masks = tuple(per_head(x, num_heads) for x in self.window_layout.masks(window, lengths, seen=lengths.seen + 1))
        *planes, mask = (jnp.concatenate(x, axis=2) for x in (*zip(window.sinks, window.newest, strict=True), masks))
        near = (*heads.from_planes(tuple(planes)), mask)
        with jax.named_scope("select"):
            selection = self.find(heads, state.index, replace(view, near=near))
        attended, selection, state = self.fetch_and_attend(replace(state, window=window), heads, near, selection, view)
        state = replace(state, ids=jnp.where(selection.counts > 0, selection.ids, NOTHING))
        shape = heads.q.shape[:3]
        attended = Attended(attended.out.reshape(*shape, -1).astype(heads.q.dtype), attended.lse.reshape(shape))
        tokens = num_attended(mask, selection, state.weights)
        return Outcome(state, attended, tokens=tokens, shared=Shared(choice=selection.choice))

    def fetch_and_attend(
        self, state: PagedState, heads: Heads, near: Near, found: Selection, view: View
    ) -> tuple[Attended, Selection, PagedState]:
        """Returns the attention of a decoded token, the selection that it attended to, and the new state."""
        with jax.named_scope("fetch"):
            wanted, pool = found.counts > 0, replace(view.pool, single_slots=self.by_slot)
            ids = jnp.where(wanted, found.ids, 0)  # an empty page may hold another row's values that are not finite
            if self.resident:
                pages, fetched = pool.fetch_missing(ids, wanted, state.held, state.ids)
            else:
                pages, fetched = pool.fetch_live(ids, wanted)
        with jax.named_scope("attend"):
            attended, weights = self.attend(heads, near, self._of_planes(heads, pages, found.counts), found)
        return attended, found, replace(state, weights=weights, held=pages if self.resident else state.held, fetched=fetched)

    def _of_planes(self, heads: Heads, pages: Fetched, counts: Int[Array, "B K M"]) -> Pages:
        """Returns keys, values and mask of fetched pages that hold `counts` tokens."""
        return *heads.from_planes(pages), jnp.arange(self._unit)[None, None, None, :] < counts[..., None]  # tokens come first

    def extend(self, state: PagedState, heads: Heads, view: View) -> Outcome:
        """Appends new text, which attends exactly to all earlier tokens: pages come from the pool in blocks."""
        with jax.named_scope("attend"):
            attended = self._attend_all(state, heads, view)
        with jax.named_scope("pack"):
            window, leaving = self.window_layout.extended(state.window, heads, view.lengths)
            pages, described, shared = self._packed(*leaving, view.shared)
            index = self.index.with_pages(state.index, described, view.lengths.next_page)
        used = (leaving[1].sum(1).max() + self.page_size - 1) // self.page_size
        return Outcome(replace(state, window=window, index=index), attended, pages, used, shared)

    def _attend_all(self, state: PagedState, heads: Heads, view: View) -> Attended:
        attended = causal_with_lse(heads.q, heads.k, heads.v, lengths=heads.lengths, window=None, scoring=heads.scoring)
        masks = self.window_layout.masks(state.window, view.lengths, seen=view.lengths.seen)
        for planes, mask in zip((state.window.sinks, state.window.newest), masks, strict=True):
            near = (*heads.from_planes(planes), per_head(mask, heads.k.shape[2]))
            attended = merge_by_lse(*attended, *attend_all(heads.q, *near, scoring=heads.scoring))
        return attend_pages(Attended(*attended), heads, self.reader(state, view), self.counts(state), view.lengths.next_page)

    def reader(self, state: PagedState, view: View) -> Read:
        """Returns a function that reads pages for a new text; the pool's are exact."""
        return view.pool.fetch

    def stored(self, planes: PagePlanes, mask: Bool[Array, "B K P p"]) -> Stored:
        """Returns pages as the pool keeps them; a policy may add codes."""
        return stack_planes(planes)

    def _packed(self, planes: Planes, valid: Bool[Array, "B T"], shared: Shared | None) -> tuple[Stored, Any, Shared | None]:
        """Returns pages of the tokens in `valid`, their entries in the index, and the order for follower layers."""
        order = shared.order if self.follows and shared is not None else None
        order = self.order(planes[0], valid) if order is None else order
        shared = Shared(order=order) if self.shares else None
        parts = (*planes, jnp.broadcast_to(valid[:, None, :], planes[0].shape[:3]))
        if order is None:
            missing = -valid.shape[1] % self.page_size
            parts = (jnp.pad(x, [(0, 0), (0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 3)) for x in parts)
        else:
            parts = (jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 3)), axis=2) for x in parts)
        *pages, mask = (x.reshape(*x.shape[:2], -1, self.page_size, *x.shape[3:]) for x in parts)
        described, stored = self._described(pages, mask), self.stored(pages, mask)
        return jax.tree.map(lambda x: x.transpose(2, 0, 1, 3, 4, 5), stored), described, shared

    def _described(self, pages: PagePlanes, mask: Bool[Array, "B K P p"]) -> Any:
        """Returns the index's entries of pages; `pages` are their planes."""
        return self.index.describe(pages[0], pages[1] if len(pages) > 1 else None, mask)

    def flush_slice(self, state: PagedState, lengths: Lengths) -> PagedState:
        """Returns the part of the state that `flush` reads, so that the states of several layers can be joined as rows."""
        return replace(state, index=self.index.flush_slice(state.index, lengths.next_page))

    def flush(self, state: PagedState, lengths: Lengths) -> tuple[Stored, Any]:
        """Returns the page that leaves the window and the update for `after_flush`, from a state or its `flush_slice`.

        Called between steps whenever `page_size` tokens have been decoded.
        """
        planes, mask = self.window_layout.oldest(state.window, lengths)
        parts = [x[:, :, None] for x in planes], mask[:, :, None]
        described, stored = self._described(*parts), jax.tree.map(lambda x: x[:, :, 0], self.stored(*parts))
        return stored, self.index.page_update(state.index, described, lengths.next_page)

    def after_flush(self, state: PagedState, prepared: Any, lengths: Lengths) -> PagedState:
        """Returns the state after `flush`, whose `lengths` and update (`prepared`) it takes.

        Separate from `flush`, because XLA copies a large array that one program both reads and writes: this one only writes.
        """
        window = self.window_layout.without_oldest(state.window)
        return replace(state, window=window, index=self.index.apply_update(state.index, prepared, lengths.next_page))

    def compact(self, state: PagedState, pages: Float[Array, "P B K planes p W"], view: View) -> Outcome:
        """Packs the newest `pages` of the pool again, by similarity of keys, and returns them.

        Called between steps whenever `compact_every` tokens have been decoded, with the pages of these tokens.
        """
        count, batch, heads, _, p, _ = pages.shape
        first, tokens = view.lengths.next_page - count, count * p
        counts = jax.lax.dynamic_slice_in_dim(self.index.counts(state.index), first, count, axis=2)
        filled = (jnp.arange(p)[None, None, :] < counts[:, 0, :, None]).reshape(batch, tokens)  # pages may be partly filled
        parts = (pages[:, :, :, i, :, : x.shape[-1]] for i, x in enumerate(state.window.sinks))
        planes = (x.transpose(1, 2, 0, 3, 4).reshape(batch, heads, tokens, -1) for x in parts)
        # Empty slots may hold what another row left in the pool.
        planes = tuple(jnp.where(filled[:, None, :, None], x, 0) for x in planes)
        pages, described, shared = self._packed(planes, filled, view.shared)
        index = self.index.with_pages(state.index, described, first)
        # The pages held on the device no longer match the pool.
        state = replace(state, index=index, ids=jnp.full_like(state.ids, NOTHING))
        return Outcome(state, pages=pages, shared=shared)

    def counts(self, state: PagedState) -> Int[Array, "B K P"]:
        """Returns how many tokens every page holds."""
        return self.index.counts(state.index)

    def after_move(
        self, state: PagedState, ids: Int[Array, " M"], there: Bool[Array, " M"], first: Int[Array, ""], *, behind: int
    ) -> PagedState:
        """Returns the state after pages have moved in the pool; see `PageIndex.after_move`."""
        return replace(state, index=self.index.after_move(state.index, ids, there, first, behind=behind))

    def can_trim(self, tokens: int) -> bool:
        return True

    def trimmed(self, state: PagedState, tokens: Int[Array, " B"], page: Int[Array, ""]) -> PagedState:
        """Empties the window and the pages from `page` on. An index's sums over all tokens still include forgotten ones."""
        none = jnp.zeros(1, jnp.int32)
        index = self.index.after_move(state.index, none, none > 0, page, behind=page)
        # The pages held on the device may be written again.
        return replace(state, window=replace(state.window, first=tokens), index=index, ids=jnp.full_like(state.ids, NOTHING))

    def joining(self, state: PagedState, lengths: Lengths, clock: Int[Array, ""]) -> PagedState:
        return replace(state, window=self.window_layout.joining(state.window, lengths, clock))

    def report(self, state: PagedState, lengths: Lengths) -> Report:
        selected, needed = (state.weights > 0).any(-1), state.ids != NOTHING
        pages = jnp.stack([selected.sum((1, 2)), state.fetched, needed.sum((1, 2))])
        masks, heads = self.window_layout.masks(state.window, lengths, seen=lengths.seen), state.window.sinks[0].shape[1]
        slots, allocated = heads * sum(mask.sum(1) for mask in masks), heads * sum(mask.shape[1] for mask in masks)
        described = jax.tree.leaves((state.index, state.window.first, state.ids, state.weights, state.fetched))
        return Report(pages, slots, allocated, sum(x.nbytes for x in described))
