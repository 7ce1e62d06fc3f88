"""What a retrieval policy found for a query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from icejax.ops.attention.dense import Attended
from icejax.ops.pages.value_fit import FromKeys


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Selection:
    """What a query is to attend to beside sinks and window: pages, or single slots of them as if each were a page of one.

    Attributes:
        ids: pages of each KV head, or slots: page * page size + slot.
        counts: tokens of each; 0 where there is no page.
        bias: added to the scores that each query head, or all, give its keys: -inf hides the page; None: nothing.
        tail: attention to all tokens that no selected page holds, as far as it is estimated; None: not at all.
        uneven: how far the weights of tokens of the rest are from their means, as `tree.Selection` has it; None: not known.
        from_keys: values from keys, for tokens found that are not attended exactly; None: they count as their mean.
        choice: what followers need to find the same.
    """

    ids: jax.Array  # i32[B, K, M]
    counts: jax.Array  # i32[B, K, M]
    bias: jax.Array | None = None  # f32[B, K, G or 1, M]
    tail: Attended | None = None  # f32[B, K, G, Hv], f32[B, K, G]
    uneven: jax.Array | None = None  # f32[B, K, G]
    from_keys: FromKeys | None = None
    choice: Any = None


def of_query_heads(ids: Int[Array, "B K G M"], counts: Int[Array, "B K G M"], which: Bool[Array, "B K G P"]) -> Selection:
    """Returns the pages that each query head found for itself, with how many tokens they hold, as the KV head's.

    A page that several found counts once, and each head sees its own.

    Args:
        which: the same, of all pages.
    """
    heads, most = ids.shape[2:]
    ids, counts = (x.reshape(*x.shape[:2], -1) for x in (ids, counts))
    found_by = jnp.take_along_axis(which, ids[:, :, None], axis=3)
    earlier = jnp.arange(heads)[:, None] < jnp.repeat(jnp.arange(heads), most)[None, :]
    again = (found_by & earlier[None, None]).any(2)
    return Selection(ids, jnp.where(again, 0, counts), bias=jnp.where(found_by, 0.0, -jnp.inf))
