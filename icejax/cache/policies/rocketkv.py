"""RocketKV (arXiv 2502.14051): SnapKV keeps some prompt tokens, and each step attends to the best of them by page scores.

`--cache rocketkv`. Kept keys are [B K, S, H], page scores f32[B, K, G, P].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.cache.bases.eviction import ScoreGroup, Slots
from icejax.cache.policies.snapkv import Pooling, SnapKV
from icejax.cache.protocol import Heads, Outcome, View
from icejax.checks.numbers import integer
from icejax.ops.attention.dense import EINSUM, Attended, Scoring, attend_with_lse
from icejax.ops.slots import merge_heads, split_heads
from icejax.ops.topk import best


@dataclass(frozen=True)
class RocketKV(SnapKV):
    """RocketKV: SnapKV keeps some tokens of a text, and a decoded token attends to the best of these and of the decoded ones.

    Kept tokens are ranked by their page, a run of a few kept tokens. A page's score uses only the channels in which the queries
    of a KV head are largest, with the page's largest key where the sum of the queries is positive and its least key elsewhere.
    `kept` and `budget` determine the page size and the number of channels, as in the authors' code. Their token budget is twice
    `budget`: half of it pays for reading the pages. They derive the number of kept tokens from the length of the text, count
    decoded tokens among them, and keep two layers dense for some models. Their code for speed stores the pages' bounds; here,
    as in their code for quality, every step computes them. Their variant for many turns, which keeps all tokens, is not here.

    Attributes:
        budget: tokens attended exactly per KV head and layer.
        window: last tokens of a text, which are kept and whose queries score the others.
        kernel: neighbouring tokens over which attention is pooled, an odd number.
        pooling: max (the authors' code) or avg (SnapKV's).
        group: how the weights of a KV head's query heads are combined to choose the kept tokens: mean, max or sum.
        kept: tokens kept per KV head and layer after a text, on the device; decoded tokens come on top; None: 8 budgets.

    Raises:
        InputError: an option is out of range.
    """

    kernel: int = 63
    pooling: Pooling = "max"
    group: ScoreGroup = "sum"
    kept: int | None = None
    by_head = False  # not tested

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kept is not None:
            integer("kept", self.kept, least=self.budget)

    def most(self, kv_heads: int) -> int:
        return 8 * self.budget if self.kept is None else self.kept

    @property
    def _reduction(self) -> float:
        """Factor by which the second stage reads less than the kept tokens.

        With the default of 8 budgets kept it is 4, split into pages of 2 tokens and half of the channels.
        """
        return max(1.0, self.most(1) / (2 * self.budget))

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return min(math.floor(self._reduction), math.ceil(math.sqrt(self._reduction)))

    def channels(self, size: int) -> int:
        """Returns how many of the `size` channels of a key are scored."""
        return max(1, int(size * self.page_size / self._reduction))

    def decode(self, state: Slots, heads: Heads, view: View) -> Outcome:
        state = self.appended(state, heads, view)
        with jax.named_scope("select"):
            worth = jnp.where(state.there, self.approximate(heads.by_group(), state, heads.scoring), -jnp.inf)
            chosen = state.at(best(worth, min(self.budget, worth.shape[-1]))[0])
        with jax.named_scope("attend"):
            parts = merge_heads(heads.by_group()), chosen.k, chosen.v, merge_heads(chosen.there)
            out, lse = attend_with_lse(*parts, scoring=heads.scoring)
        shape, tokens = heads.q.shape[:3], chosen.there.sum(-1).mean(1)
        attended = Attended(out.reshape(*shape, -1).astype(heads.q.dtype), lse.reshape(shape))
        return Outcome(state, attended, tokens=jnp.stack([tokens, tokens]))

    def approximate(self, q: Float[Array, "B K G H"], tokens: Slots, scoring: Scoring) -> Float[Array, "B K S"]:
        """Returns the softmax weights of the slots by their pages' scores, summed over query heads."""
        q, filled = q.astype(jnp.float32), tokens.there[..., None]
        signs = jnp.where(q.sum(2) > 0, 1.0, -1.0)[:, :, None]  # 1: a page's largest key counts in this channel, -1: its least
        keys = jnp.where(filled, split_heads(tokens.k, q.shape[1]).astype(jnp.float32) * signs, -jnp.inf)
        slots = keys.shape[2]
        keys = jnp.pad(keys, ((0, 0), (0, 0), (0, -slots % self.page_size), (0, 0)), constant_values=-jnp.inf)
        pages = keys.reshape(*keys.shape[:2], -1, self.page_size, keys.shape[3]).max(3)
        sizes = jnp.abs(q)
        channels = best(sizes.sum(2), self.channels(q.shape[-1]))[0]
        largest_q, pages = (jnp.take_along_axis(x, channels[:, :, None], axis=3) for x in (q * signs, pages))
        share = jnp.abs(largest_q).sum(-1) / jnp.maximum(sizes.sum(-1), 1e-30)
        products = EINSUM("bkgc,bkpc->bkgp", largest_q, jnp.where(jnp.isneginf(pages), 0, pages))
        scores = scoring(products / jnp.sqrt(jnp.maximum(share, 1e-30))[..., None])
        scores = jnp.repeat(scores, self.page_size, axis=3)[..., :slots]
        return jax.nn.softmax(jnp.where(tokens.there[:, :, None], scores, -jnp.inf), axis=-1).sum(2)
