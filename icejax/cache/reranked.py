"""Tokens ranked among more pages than the budget holds: how many are fetched, and attention to the best of their tokens."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int

from icejax.cache.found import Found
from icejax.cache.policy import Heads
from icejax.cache.retrieval import Near, Pages
from icejax.cache.slots import joined
from icejax.ops.attention import Attended
from icejax.ops.paged_attention import attend_paged

LEAST_FETCHED = 896  # tokens of fetched pages; with a quarter of them look-ups were missed (bench/results/pages.md)


def pages_for(wanted: int, page_size: int, candidates: int | None) -> int:
    """Returns how many pages are fetched for the best tokens of `wanted` pages; see `Clustered.candidates`."""
    return candidates * wanted if candidates else max(4 * wanted, LEAST_FETCHED // page_size)


def attend_best(
    heads: Heads, near: Near, pages: Pages, found: Found, *, budget: int | Int[Array, "B K"], most: int, tail: bool
) -> tuple[Attended, Float[Array, "B K M p"], Float[Array, "B K G"]]:
    """Returns what `attend_paged` does, of every row and KV head, for a budget that sinks and window take their part of.

    Args:
        most: page tokens attended exactly at most, beside the smallest window.
    """
    attended = attend_paged(
        joined(heads.by_group()),
        tuple(map(joined, near)),
        tuple(map(joined, pages)),
        tuple(map(joined, found.rest)),
        jax.tree.map(joined, found.from_keys),
        scoring=heads.scoring,
        room=joined(budget - near[2].sum(-1)),
        most=most,
        tail=tail,
    )
    return jax.tree.map(lambda x: x.reshape(*pages[2].shape[:2], *x.shape[1:]), attended)
