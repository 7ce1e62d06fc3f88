"""What a retrieval policy found for a query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from icejax.ops.attention import Attended
from icejax.ops.value_fit import FromKeys


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Found:
    """What a query is to attend to beside sinks and window: pages, or single slots of them as if each were a page of one.

    Attributes:
        ids: pages of each KV head, or slots: page * page size + slot.
        counts: tokens of each; 0 where there is no page.
        bias: added to the scores that each query head, or all, give its keys: -inf hides the page; None: nothing.
        rest: attention to all that is in no page found, as far as it is estimated; None: not at all.
        uneven: how far the weights of tokens of the rest are from their means, as `tree.Selection` has it; None: not known.
        from_keys: values from keys, for tokens found that are not attended exactly; None: they count as their mean.
        choice: what followers need to find the same.
    """

    ids: jax.Array  # i32[B, K, M]
    counts: jax.Array  # i32[B, K, M]
    bias: jax.Array | None = None  # f32[B, K, G or 1, M]
    rest: Attended | None = None  # f32[B, K, G, Hv], f32[B, K, G]
    uneven: jax.Array | None = None  # f32[B, K, G]
    from_keys: FromKeys | None = None
    choice: Any = None


def of_query_heads(page_ids: Int[Array, "B K G M"], counts: Int[Array, "B K G M"]) -> Found:
    """Returns the pages that each query head found for itself, with how many tokens they hold, as the KV head's.

    A page that several found counts once, and each head sees its own.
    """
    ids, tokens = (x.reshape(*x.shape[:2], -1) for x in (page_ids, counts))
    same = (ids[..., :, None] == ids[..., None, :]) & (tokens > 0)[..., None, :]
    again = (same & jnp.tri(ids.shape[-1], k=-1, dtype=bool)[None, None]).any(-1)
    found_by = (page_ids[..., None] == ids[:, :, None, None]) & (counts > 0)[..., None]
    return Found(ids, jnp.where(again, 0, tokens), bias=jnp.where(found_by.any(3), 0.0, -jnp.inf))
