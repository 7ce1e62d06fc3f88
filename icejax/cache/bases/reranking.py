"""Re-ranking: more pages are fetched than the budget holds, their tokens scored by key, and the best attended exactly.

Called by the clustered policies; fetched pages are [B, K, M, p, H].
"""

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
from icejax.ops.slots import merge_heads

LEAST_FETCHED = 896  # least tokens of fetched pages; with a quarter of that look-ups failed (bench/results/pages.md)
KEY_ONLY_FACTOR = 2  # pages whose keys take the bytes of one page of keys and values
KEYS, VALUES = range(2)  # planes of a page


def pages_for(wanted: int, page_size: int, candidates: int | None) -> int:
    """Returns how many pages are fetched to attend to the best tokens of `wanted` pages; see `DigestPages.candidates`.

    With pages of 16 tokens and candidates=None: 14 pages wanted take 56 (4 times 14, and 896 tokens), 5 take 56, 20 take 80.
    """
    return candidates * wanted if candidates else max(4 * wanted, LEAST_FETCHED // page_size)


def attend_best(
    heads: Heads, near: Near, pages: Pages, found: Selection, budget: int | Int[Array, "B K"], *, most: int, tail: bool
) -> tuple[Attended, Float[Array, "B K M p"], Float[Array, "B K G"]]:
    """Returns `ops.pages.paged_attention.attend_paged` for every row and KV head.

    Args:
        budget: tokens attended exactly, sinks and window included.
        most: page tokens attended exactly at most.
        tail: whether all other tokens contribute estimated values, by their pages or nodes.
    """
    attended = attend_paged(
        merge_heads(heads.by_group()),
        tuple(map(merge_heads, near)),
        tuple(map(merge_heads, pages)),
        tuple(map(merge_heads, found.tail)),
        jax.tree.map(merge_heads, found.from_keys),
        scoring=heads.scoring,
        room=merge_heads(budget - near[2].sum(-1)),
        most=most,
        tail=tail,
    )
    return jax.tree.map(lambda x: x.reshape(*pages[2].shape[:2], *x.shape[1:]), attended)


def attend_keys_first(
    heads: Heads, near: Near, digests: Digests, found: Selection, pool: PoolLayer, *, budget: int, page_size: int, most: int
) -> tuple[Attended, Selection, Float[Array, "R m"], Int[Array, " B"]]:
    """Fetches the keys of the selected pages, and then the values of their best tokens alone.

    The keys of two pages take the bytes of one whole page.

    Args:
        found: the selected pages.
        digests: digests of all pages.
        budget: tokens attended exactly per KV head, sinks and window included.
        most: page tokens attended exactly at most.

    Returns:
        The attention, the slots attended exactly, their weights summed over query heads, and how many slots came from the host:
        a key or a value alone is half a slot, so that 2 pages of 16 keys and 8 values are 20.
    """
    ids, p = found.ids, page_size
    with jax.named_scope("fetch"):
        (keys,), pages = replace(pool, plane=KEYS).fetch_live(ids, found.counts > 0)
    with jax.named_scope("attend"):
        ranked = rank_tokens(
            merge_heads(heads.by_group()),
            (merge_heads(near[0]), merge_heads(near[2])),
            merge_heads(keys[..., : heads.k.shape[-1]]),
            jax.tree.map(merge_heads, replace(at(digests, ids), count=found.counts)),
            Attended(*map(merge_heads, found.tail)),
            jax.tree.map(merge_heads, found.from_keys),
            scoring=heads.scoring,
            room=merge_heads(budget - near[2].sum(-1)),
            most=most,
        )
        best, counts = (x.reshape(*ids.shape[:2], -1) for x in (ranked.best, ranked.there.astype(jnp.int32)))
        slots = jnp.take_along_axis(ids, best // p, axis=2, mode="promise_in_bounds") * p + best % p
    with jax.named_scope("fetch"):
        (values,), single = replace(pool, plane=VALUES, single_slots=True).fetch_live(slots, counts > 0)
    with jax.named_scope("attend"):
        values = values[..., 0, : heads.v.shape[-1]]
        attended = ranked.attended(merge_heads(near[1]), merge_heads(values))
        attended = Attended(*(x.reshape(*ids.shape[:2], *x.shape[1:]) for x in attended))
        weights = jnp.where(ranked.there, jnp.maximum(ranked.weights.sum(1), jnp.finfo(jnp.float32).tiny), 0)
    fetched = (pages * p + single + 1) // KEY_ONLY_FACTOR  # in slots of keys and values, rounded up
    return attended, replace(found, ids=slots, counts=counts), weights, fetched


def at(index: Any, ids: Int[Array, "B K M"]) -> Any:
    """Returns the entries of pages `ids` in arrays [B, K, P, ...]."""

    def gather(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, ids.reshape(*ids.shape, *(1,) * (x.ndim - 3)), axis=2, mode="promise_in_bounds")

    return jax.tree.map(gather, index)
