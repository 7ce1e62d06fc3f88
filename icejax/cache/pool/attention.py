"""Attention of new text to all pages, in blocks of pages.

Called by `Retrieval.extend`; queries are [B, T, N, H], a block of pages [B, K, 128, p, H] (32 on a CPU).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from icejax.cache.protocol import Heads
from icejax.ops.attention.dense import Attended, attend_all, merge_by_lse
from icejax.runtime import devices

BLOCKS = {"cpu": 32}  # pages fetched and attended to at once, by platform: on a CPU 1,024 keys and more leave its cache
BLOCK = 128


Read = Callable[[Int[Array, "B K M"]], tuple[Float[Array, "B K M p _"], ...]]  # from ids of pages to their planes


def attend_pages(attended: Attended, heads: Heads, read: Read, counts: Int[Array, "B K P"], used: Int[Array, ""]) -> Attended:
    """Returns `attended` merged with the attention to all pages, in fp32.

    Args:
        attended: attention to the tokens outside pages, f32[B, T, N, Hv] and f32[B, T, N].
        counts: tokens of every page.
        used: pages up to the last that has tokens.
    """
    batch, num_heads, pages = counts.shape
    block, last = min(BLOCKS.get(devices.platform(), BLOCK), pages), pages - 1

    def page_block(i: jax.Array, attended: Attended) -> Attended:
        ids = i * block + jnp.arange(block, dtype=jnp.int32)
        planes = read(jnp.broadcast_to(jnp.minimum(ids, last)[None, None], (batch, num_heads, block)))
        filled = jnp.where((ids <= last)[None, None], jnp.take(counts, ids, axis=2, mode="clip"), 0)
        mask = (jnp.arange(planes[0].shape[3])[None, None, None] < filled[..., None]).reshape(batch, num_heads, -1)
        keys, values = (x.reshape(*mask.shape, -1) for x in heads.from_planes(planes))
        values = jnp.where(mask[..., None], values, 0)
        return Attended(*merge_by_lse(*attended, *attend_all(heads.q, keys, values, mask, scoring=heads.scoring)))

    return jax.lax.fori_loop(0, (used + block - 1) // block, page_block, attended)
