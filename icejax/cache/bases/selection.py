"""The pages that a retrieval policy selected for a query.

Made by `Retrieval.find`, read by the fetch and the attention. Ids and counts are i32[B, K, M].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.ops.attention.dense import Attended
from icejax.ops.pages.code_error import CodeNoise
from icejax.ops.pages.value_fit import FromKeys


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Selection:
    """Pages that a query attends to besides sinks and window; a single slot counts as a page of one token.

    Attributes:
        ids: pages of each KV head; of single slots page * page size + slot, so slot 3 of page 5 of 16 tokens is 83.
        counts: tokens of each page; 0 for an id that is padding.
        bias: added to the scores of a page's keys, per query head or for all of a KV head; -inf hides the page; None: 0.
        tail: estimated attention to all tokens outside the selected pages; None: these tokens are left out.
        uneven: expected sum over tail tokens of (weight - mean weight of their node)^2, as `WalkResult.tail_uneven`; None: not
            known.
        from_keys: predicts values from keys, for tokens of selected pages that are not attended exactly; None: those tokens
            count with the mean value of their page.
        noise: the expected error of codes in the tail; None: not known.
        choice: the selection in the form that follower layers read.
    """

    ids: jax.Array  # i32[B, K, M]
    counts: jax.Array  # i32[B, K, M]
    bias: jax.Array | None = None  # f32[B, K, G or 1, M]
    tail: Attended | None = None  # f32[B, K, G, Hv], f32[B, K, G]
    uneven: jax.Array | None = None  # f32[B, K, G]
    from_keys: FromKeys | None = None
    noise: CodeNoise | None = None
    choice: Any = None


def of_query_heads(ids: Int[Array, "B K G M"], counts: Int[Array, "B K G M"], which: Bool[Array, "B K G P"]) -> Selection:
    """Returns one selection per KV head from the pages that each of its query heads selected.

    Of a page that several query heads selected the first copy keeps its count, the others get 0; `bias` hides from a query
    head the pages that it did not select. Two query heads, pages of 4 tokens:

        ids       [[2, 5], [5, 0]] -> [2, 5, 5, 0]
        counts    [[4, 4], [4, 4]] -> [4, 4, 0, 4]
        bias      head 0: [0, 0, 0, -inf], head 1: [-inf, 0, 0, 0]

    Args:
        ids: pages that each query head selected.
        counts: tokens of these pages.
        which: mask of the selected pages, over all pages.
    """
    heads, num_ids = ids.shape[2:]
    ids, counts = (x.reshape(*x.shape[:2], -1) for x in (ids, counts))
    visible = jnp.take_along_axis(which, ids[:, :, None], axis=3)
    earlier = jnp.arange(heads)[:, None] < jnp.repeat(jnp.arange(heads), num_ids)[None, :]
    repeated = (visible & earlier[None, None]).any(2)
    return Selection(ids, jnp.where(repeated, 0, counts), bias=jnp.where(visible, 0.0, -jnp.inf))


def num_attended(near: Bool[Array, "B K S"], selection: Selection, weights: Float[Array, "B K M p"]) -> Float[Array, "2 B"]:
    """Returns the mean numbers of tokens attended to exactly: per query head, and per KV head by any of its query heads."""
    near = near.sum(-1, dtype=jnp.float32)
    per_kv_head = near + (weights > 0).sum((2, 3), dtype=jnp.float32)
    per_query_head = per_kv_head
    if selection.bias is not None:
        seen = jnp.where(selection.bias > -jnp.inf, selection.counts[:, :, None], 0)
        per_query_head = near + seen.sum(-1, dtype=jnp.float32).mean(2)
    return jnp.stack([per_query_head.mean(1), per_kv_head.mean(1)])
