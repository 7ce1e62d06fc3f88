"""Policies that rank the tokens of more pages than the budget holds, and attend exactly to the best of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from icejax.cache.bases.channel_scaling import Balanced
from icejax.cache.bases.retrieval import Near, PagedState, Pages
from icejax.cache.bases.selection import Found
from icejax.cache.protocol import Heads, Lengths, Report, View
from icejax.checks.errors import InputError
from icejax.ops.attention.dense import Attended
from icejax.ops.pages.paged_attention import attend_paged
from icejax.ops.pages.ranked_attention import ranked
from icejax.ops.slots import joined

LEAST_FETCHED = 896  # tokens of fetched pages; with a quarter of them look-ups were missed (bench/results/pages.md)
TWICE = 2  # pages whose keys are as many bytes as the keys and values of one
KEYS, VALUES = range(2)  # planes of a page


def pages_for(wanted: int, page_size: int, candidates: int | None) -> int:
    """Returns how many pages are fetched for the best tokens of `wanted` pages; see `Clustered.candidates`."""
    return candidates * wanted if candidates else max(4 * wanted, LEAST_FETCHED // page_size)


class Reranked(Balanced):
    """A policy that finds pages by digests, and ranks their tokens by their keys.

    Values of tokens that are not attended exactly are estimated from keys and need not come: for the same bytes the keys of
    twice as many pages do.

    Attributes:
        keys_first: whether the keys of twice as many pages are fetched, and then the values of their best tokens alone: not of
            pages of int8, nor `resident`, nor of latent layers, nor on TPU, whose host memory is read in tiles of several
            rows. None: wherever that can be.
    """

    candidates: int | None
    rerank: bool
    tail: bool
    keys_first: bool | None = None

    def settled(self, platform: str, *, latent: bool) -> Reranked:
        if self.keys_first and latent:
            raise InputError("keys_first=true needs values apart from keys, which latent layers have not: leave it out")
        if self.keys_first is not None:
            return self
        able = self.rerank and self.tail and not (self.resident or self.page_dtype or latent or platform == "tpu")
        return replace(self, keys_first=able)

    @property
    def by_slot(self) -> bool:
        return bool(self.keys_first)

    @property
    def _most_exact(self) -> int:
        """Page tokens attended exactly at most: beside the smallest window, of a prompt that fills no sink."""
        return self.budget - self.window_of.fill - 1

    def num_ranked(self, pages: int) -> int:
        """Returns of how many of `pages` pages the tokens are ranked."""
        return self._pages(pages, TWICE if self.keys_first else 1)

    def num_fetched(self, pages: int) -> int:
        if self.keys_first:
            return min(self.num_ranked(pages) * self.page_size, self._most_exact)
        return self._pages(pages, 1) if self.rerank else super().num_fetched(pages)

    def _pages(self, pages: int, times: int) -> int:
        wanted = -(-(self._most_exact - self.window_of.sinks) // self.page_size) + 1
        return min(pages, times * pages_for(wanted, self.page_size, self.candidates))

    def look(self, state: PagedState, heads: Heads, near: Near, found: Found, view: View) -> tuple[Attended, Found, PagedState]:
        if not self.keys_first:
            return super().look(state, heads, near, found, view)
        ids, digests, p = found.ids, state.index.levels[0], self.page_size
        with jax.named_scope("fetch"):
            (keys,), pages = replace(view.pool, plane=KEYS).fetch_live(ids, found.counts > 0)
        with jax.named_scope("attend"):
            known = ranked(
                joined(heads.by_group()),
                (joined(near[0]), joined(near[2])),
                joined(keys[..., : heads.k.shape[-1]]),
                jax.tree.map(joined, replace(at(digests, ids), count=found.counts)),
                Attended(*map(joined, found.rest)),
                jax.tree.map(joined, found.from_keys),
                scoring=heads.scoring,
                room=joined(self.budget - near[2].sum(-1)),
                most=self.num_fetched(digests.count.shape[-1]),
            )
            best, counts = (x.reshape(*ids.shape[:2], -1) for x in (known.best, known.there.astype(jnp.int32)))
            slots = jnp.take_along_axis(ids, best // p, axis=2, mode="promise_in_bounds") * p + best % p
        with jax.named_scope("fetch"):
            (values,), single = replace(view.pool, plane=VALUES, singly=True).fetch_live(slots, counts > 0)
        with jax.named_scope("attend"):
            values = values[..., 0, : heads.v.shape[-1]]
            attended = known.attended(joined(near[1]), joined(values))
            attended = Attended(*(x.reshape(*ids.shape[:2], *x.shape[1:]) for x in attended))
            weights = jnp.where(known.there, jnp.maximum(known.weights.sum(1), jnp.finfo(jnp.float32).tiny), 0)
        fetched = (pages * p + single + 1) // TWICE  # as slots of keys and values
        state = replace(state, weights=weights.reshape(state.weights.shape), fetched=fetched)
        return attended, replace(found, ids=slots, counts=counts), state

    def report(self, state: PagedState, lengths: Lengths) -> Report:
        report = super().report(state, lengths)
        if not self.keys_first:
            return report
        return replace(report, found=report.found.at[2].set(state.fetched))  # all that came was needed

    def attend(self, heads: Heads, near: Near, pages: Pages, found: Found) -> tuple[Attended, Float[Array, "B K M p"]]:
        if self.by_slot or not self.rerank:
            return super().attend(heads, near, pages, found)
        return self._attended(heads, near, pages, found, self.budget)[:2]

    def _attended(
        self, heads: Heads, near: Near, pages: Pages, found: Found, budget: int | Int[Array, "B K"]
    ) -> tuple[Attended, Float[Array, "B K M p"], Float[Array, "B K G"]]:
        """Returns what `attend_paged` does, of every row and KV head, for a budget that sinks and window take their part of."""
        attended = attend_paged(
            joined(heads.by_group()),
            tuple(map(joined, near)),
            tuple(map(joined, pages)),
            tuple(map(joined, found.rest)),
            jax.tree.map(joined, found.from_keys),
            scoring=heads.scoring,
            room=joined(budget - near[2].sum(-1)),
            most=self._most_exact,
            tail=self.tail,
        )
        return jax.tree.map(lambda x: x.reshape(*pages[2].shape[:2], *x.shape[1:]), attended)


def at(index: Any, ids: Int[Array, "B K M"]) -> Any:
    """Returns what arrays [B, K, P, ...] hold of pages."""

    def one(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, ids.reshape(*ids.shape, *(1,) * (x.ndim - 3)), axis=2, mode="promise_in_bounds")

    return jax.tree.map(one, index)
