"""RocketKV (arXiv 2502.14051): of a prompt the tokens that SnapKV keeps, and of these in every step the best by pages."""

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
from icejax.ops.slots import apart, joined
from icejax.ops.topk import best


@dataclass(frozen=True)
class RocketKV(SnapKV):
    """RocketKV: SnapKV keeps some tokens of a text, and a decoded one attends to the best of them and of those decoded since.

    These are the best by their page, which are a few kept tokens behind one another: of the channels in which the queries of a
    KV head are largest, by the page's least or largest key there, whichever the sum of the queries asks for. How many tokens
    are a page and how many channels count follows from `kept` and `budget`, as in its code. Its token budget is twice the
    budget here: half of it is what reading the pages costs. There the length of the text says how many tokens are kept,
    and decoded ones are part of them; for some models two layers are dense. Its code for speed keeps the pages' bounds; here,
    as in that for quality, they are made anew in every step. Its variant for many turns, which keeps all tokens, is not here.

    Attributes:
        budget: tokens attended exactly per KV head and layer.
        window: last tokens of a text, which are kept and whose queries decide.
        kernel: neighbours over which attention is pooled, an odd number.
        pooling: max (its own code) or avg (that of SnapKV).
        group: how the query heads of a KV head agree on what to keep: mean, max or sum.
        kept: tokens kept per KV head and layer after a text, on the device; decoded tokens come on top; None: 8 budgets.

    Raises:
        InputError: an option is out of range.
    """

    kernel: int = 63
    pooling: Pooling = "max"
    group: ScoreGroup = "sum"
    kept: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kept is not None:
            integer("kept", self.kept, least=self.budget)

    def most(self, kv_heads: int) -> int:
        return 8 * self.budget if self.kept is None else self.kept

    @property
    def _left(self) -> float:
        """How many times the second stage is to leave out what the first has kept."""
        return max(1.0, self.most(1) / (2 * self.budget))

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return min(math.floor(self._left), math.ceil(math.sqrt(self._left)))

    def channels(self, size: int) -> int:
        """Returns how many channels of a key count, of so many."""
        return max(1, int(size * self.page_size / self._left))

    def decode(self, state: Slots, heads: Heads, view: View) -> Outcome:
        state = self.appended(state, heads, view)
        with jax.named_scope("select"):
            worth = jnp.where(state.there, self.approximate(heads.by_group(), state, heads.scoring), -jnp.inf)
            chosen = state.at(best(worth, min(self.budget, worth.shape[-1]))[0])
        with jax.named_scope("attend"):
            parts = joined(heads.by_group()), chosen.k, chosen.v, joined(chosen.there)
            out, lse = attend_with_lse(*parts, scoring=heads.scoring)
        shape, tokens = heads.q.shape[:3], chosen.there.sum(-1).mean(1)
        attended = Attended(out.reshape(*shape, -1).astype(heads.q.dtype), lse.reshape(shape))
        return Outcome(state, attended, tokens=jnp.stack([tokens, tokens]))

    def approximate(self, q: Float[Array, "B K G H"], tokens: Slots, scoring: Scoring) -> Float[Array, "B K S"]:
        """Returns the softmax weights that queries give to the slots as their pages have them, summed over query heads."""
        q, there = q.astype(jnp.float32), tokens.there[..., None]
        asked = jnp.where(q.sum(2) > 0, 1.0, -1.0)[:, :, None]  # whether for the largest or the least, by channel
        keys = jnp.where(there, apart(tokens.k, q.shape[1]).astype(jnp.float32) * asked, -jnp.inf)
        slots = keys.shape[2]
        keys = jnp.pad(keys, ((0, 0), (0, 0), (0, -slots % self.page_size), (0, 0)), constant_values=-jnp.inf)
        pages = keys.reshape(*keys.shape[:2], -1, self.page_size, keys.shape[3]).max(3)
        sizes = jnp.abs(q)
        channels = best(sizes.sum(2), self.channels(q.shape[-1]))[0]
        some, pages = (jnp.take_along_axis(x, channels[:, :, None], axis=3) for x in (q * asked, pages))
        share = jnp.abs(some).sum(-1) / jnp.maximum(sizes.sum(-1), 1e-30)
        products = EINSUM("bkgc,bkpc->bkgp", some, jnp.where(jnp.isneginf(pages), 0, pages))
        scores = scoring(products / jnp.sqrt(jnp.maximum(share, 1e-30))[..., None])
        scores = jnp.repeat(scores, self.page_size, axis=3)[..., :slots]
        return jax.nn.softmax(jnp.where(tokens.there[:, :, None], scores, -jnp.inf), axis=-1).sum(2)
