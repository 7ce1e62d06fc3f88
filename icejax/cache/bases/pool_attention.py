"""Exact attention of new text to all pages of the pool, in blocks of pages.

Called by `Retrieval.extend`; queries are [B, T, N, H], a block of pages [B, K, 128, p, H] (32 on a CPU).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from icejax.cache.protocol import Heads, View
from icejax.ops.attention.dense import Attended, attend_all, merge_by_lse
from icejax.runtime import devices

BLOCKS = {"cpu": 32}  # pages fetched and attended to at once, by platform: on a CPU 1,024 keys and more leave its cache
BLOCK = 128


def attend_pages(attended: Attended, heads: Heads, view: View, counts: Int[Array, "B K P"]) -> Attended:
    """Returns `attended` merged with the attention to all pages of the pool, in fp32.

    Args:
        attended: attention to the tokens outside the pool, f32[B, T, N, Hv] and f32[B, T, N].
        counts: tokens of every page.
    """
    batch, num_heads, pages = counts.shape
    block, last = min(BLOCKS.get(devices.platform(), BLOCK), pages), pages - 1

    def page_block(i: jax.Array, attended: Attended) -> Attended:
        ids = i * block + jnp.arange(block, dtype=jnp.int32)
        planes = view.pool.fetch(jnp.broadcast_to(jnp.minimum(ids, last)[None, None], (batch, num_heads, block)))
        filled = jnp.where((ids <= last)[None, None], jnp.take(counts, ids, axis=2, mode="clip"), 0)
        mask = (jnp.arange(planes[0].shape[3])[None, None, None] < filled[..., None]).reshape(batch, num_heads, -1)
        keys, values = (x.reshape(*mask.shape, -1) for x in heads.from_planes(planes))
        values = jnp.where(mask[..., None], values, 0)
        return Attended(*merge_by_lse(*attended, *attend_all(heads.q, keys, values, mask, scoring=heads.scoring)))

    return jax.lax.fori_loop(0, (view.lengths.next_page + block - 1) // block, page_block, attended)
