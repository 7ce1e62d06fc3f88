"""Attention to the best tokens of more pages than the budget holds, which are ranked one by one by their keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from icejax.cache.bases.retrieval import Near, Pages
from icejax.cache.bases.selection import Selection
from icejax.cache.pool.host_pool import PoolLayer
from icejax.cache.protocol import Heads
from icejax.ops.attention.dense import Attended
from icejax.ops.pages.digests import Digests
from icejax.ops.pages.paged_attention import attend_paged
from icejax.ops.pages.ranked_attention import rank_tokens
from icejax.ops.slots import joined

LEAST_FETCHED = 896  # tokens of fetched pages; with a quarter of them look-ups were missed (bench/results/pages.md)
TWICE = 2  # pages whose keys are as many bytes as the keys and values of one
KEYS, VALUES = range(2)  # planes of a page


def pages_for(wanted: int, page_size: int, candidates: int | None) -> int:
    """Returns how many pages are fetched for the best tokens of `wanted` pages; see `DigestPages.candidates`."""
    return candidates * wanted if candidates else max(4 * wanted, LEAST_FETCHED // page_size)


def attend_best(
    heads: Heads, near: Near, pages: Pages, found: Selection, budget: int | Int[Array, "B K"], *, most: int, tail: bool
) -> tuple[Attended, Float[Array, "B K M p"], Float[Array, "B K G"]]:
    """Returns what `attend_paged` does, of every row and KV head.

    Args:
        budget: tokens attended exactly, of which sinks and window take their part.
        most: page tokens attended exactly at most.
        tail: whether all others count by their pages.
    """
    attended = attend_paged(
        joined(heads.by_group()),
        tuple(map(joined, near)),
        tuple(map(joined, pages)),
        tuple(map(joined, found.tail)),
        jax.tree.map(joined, found.from_keys),
        scoring=heads.scoring,
        room=joined(budget - near[2].sum(-1)),
        most=most,
        tail=tail,
    )
    return jax.tree.map(lambda x: x.reshape(*pages[2].shape[:2], *x.shape[1:]), attended)


def attend_keys_first(
    heads: Heads, near: Near, digests: Digests, found: Selection, pool: PoolLayer, *, budget: int, page_size: int, most: int
) -> tuple[Attended, Selection, Float[Array, "R m"], Int[Array, " B"]]:
    """Fetches the keys of the pages found, and then the values of their best tokens alone.

    For the bytes of keys and values of one page the keys of two come.

    Args:
        digests: of all pages.
        budget: tokens attended exactly per KV head, of which sinks and window take their part.
        most: page tokens attended exactly at most.

    Returns:
        What the queries attend to, the slots attended to exactly, what these weighed, and how many slots of keys and values
        came from the host.
    """
    ids, p = found.ids, page_size
    with jax.named_scope("fetch"):
        (keys,), pages = replace(pool, plane=KEYS).fetch_live(ids, found.counts > 0)
    with jax.named_scope("attend"):
        known = rank_tokens(
            joined(heads.by_group()),
            (joined(near[0]), joined(near[2])),
            joined(keys[..., : heads.k.shape[-1]]),
            jax.tree.map(joined, replace(at(digests, ids), count=found.counts)),
            Attended(*map(joined, found.tail)),
            jax.tree.map(joined, found.from_keys),
            scoring=heads.scoring,
            room=joined(budget - near[2].sum(-1)),
            most=most,
        )
        best, counts = (x.reshape(*ids.shape[:2], -1) for x in (known.best, known.there.astype(jnp.int32)))
        slots = jnp.take_along_axis(ids, best // p, axis=2, mode="promise_in_bounds") * p + best % p
    with jax.named_scope("fetch"):
        (values,), single = replace(pool, plane=VALUES, single_slots=True).fetch_live(slots, counts > 0)
    with jax.named_scope("attend"):
        values = values[..., 0, : heads.v.shape[-1]]
        attended = known.attended(joined(near[1]), joined(values))
        attended = Attended(*(x.reshape(*ids.shape[:2], *x.shape[1:]) for x in attended))
        weights = jnp.where(known.there, jnp.maximum(known.weights.sum(1), jnp.finfo(jnp.float32).tiny), 0)
    fetched = (pages * p + single + 1) // TWICE  # as slots of keys and values
    return attended, replace(found, ids=slots, counts=counts), weights, fetched


def at(index: Any, ids: Int[Array, "B K M"]) -> Any:
    """Returns what arrays [B, K, P, ...] hold of pages."""

    def one(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, ids.reshape(*ids.shape, *(1,) * (x.ndim - 3)), axis=2, mode="promise_in_bounds")

    return jax.tree.map(one, index)
