"""Attention in two precisions: all tokens of pages in codes of a few bits, and the best of them exactly.

Policies Packed and Clustered call it in a decode step. Codes are `CodedPages` [B, K, P, ...].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from icejax.cache.bases.retrieval import Near
from icejax.cache.protocol import Heads
from icejax.ops.attention.dense import Attended, masked_scores
from icejax.ops.pages.code_attention import CodedPages, CodedTokens, attend_codes
from icejax.ops.slots import merge_heads

BITS = (2, 3, 4, 8)


def tokens_by_codes(
    heads: Heads, near: Near, pages: CodedPages, tail: Attended | None = None, *, page_size: int, bits: int, wanted: int
) -> CodedTokens:
    """Returns the best tokens of pages by their codes, and the attention to the pages' other tokens and to the tail.

    Args:
        near: keys, values and mask of sinks and window, which are attended exactly.
        tail: attention to the tokens outside the pages and `near`; None: there are none.
        bits: bits of a code.
        wanted: how many of the best tokens to return.
    """
    q, (keys, _, mask) = heads.by_group(), map(merge_heads, near)
    scores = masked_scores(merge_heads(q), keys, mask[:, None], scoring=heads.scoring)
    outside = jax.nn.logsumexp(scores, axis=-1).reshape(q.shape[:3])
    return attend_codes(
        q,
        pages,
        outside if tail is None else jnp.logaddexp(outside, tail.lse),
        scoring=heads.scoring,
        page_size=page_size,
        bits=bits,
        wanted=wanted,
        value_size=heads.v.shape[-1],
        tail=tail,
    )
