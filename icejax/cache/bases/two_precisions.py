"""Attention in two precisions: all tokens of pages in codes of a few bits, and the best of them exactly.

Policies Packed, Clustered and Tolerant call it in a decode step. Codes are `CodedPages` [B, K, P, ...].
"""

from __future__ import annotations

from jaxtyping import Array, Float

from icejax.cache.bases.retrieval import Near, Pages
from icejax.cache.protocol import Heads
from icejax.ops.attention.dense import Attended, attend_with_lse, merge_by_lse
from icejax.ops.pages.code_attention import CodedPages, CodedTokens, attend_codes
from icejax.ops.pages.code_error import CodeNoise, relative_error
from icejax.ops.pages.paged_attention import attend_beside
from icejax.ops.slots import merge_heads, split_heads

BITS = (2, 3, 4, 8)
# By bits of a code: by how much the estimate is too small where many tokens are exact (bench/results/calibrate.md).
COVERED = {2: 1.4, 3: 1.0, 4: 1.0, 8: 2.4}


def tokens_by_codes(
    heads: Heads,
    near: Near,
    pages: CodedPages,
    tail: Attended | None = None,
    *,
    page_size: int,
    bits: int,
    wanted: int,
    estimate: bool = False,
) -> CodedTokens:
    """Returns the best tokens of pages by their codes, and the attention to all other tokens: of pages, `near` and `tail`.

    Args:
        near: keys, values and mask of sinks and window, which are attended exactly.
        tail: attention to the tokens outside the pages and `near`; None: there are none.
        bits: bits of a code.
        wanted: how many of the best tokens to return.
        estimate: whether to estimate the error that codes leave.
    """
    q = heads.by_group()
    outside = attend_with_lse(merge_heads(q), *map(merge_heads, near), scoring=heads.scoring)
    if tail is not None:
        outside = merge_by_lse(*outside, *map(merge_heads, tail))
    outside = Attended(*(split_heads(x, q.shape[1]) for x in outside))
    sizes = dict(page_size=page_size, bits=bits, wanted=wanted, estimate=estimate)
    return attend_codes(q, pages, outside, scoring=heads.scoring, **sizes)


def attend_best_tokens(heads: Heads, tokens: Pages, rest: Attended) -> tuple[Attended, Float[Array, "B K M 1"]]:
    """Returns the attention to the best tokens, exactly, and to the `rest`, and the tokens' weights summed over query heads."""
    q, (keys, values, mask) = heads.by_group(), (merge_heads(x[:, :, :, 0]) for x in tokens)
    attended, weights = attend_beside(
        merge_heads(q), keys, values, mask, Attended(*map(merge_heads, rest)), scoring=heads.scoring
    )
    return Attended(*(split_heads(x, q.shape[1]) for x in attended)), weights.reshape(tokens[2].shape)


def error_of_codes(noise: CodeNoise, attended: Attended, bits: int) -> Float[Array, "B K G"]:
    """Returns the estimated error of an attention's coded tokens, relative to its output."""
    return COVERED[bits] * relative_error(noise, attended)
