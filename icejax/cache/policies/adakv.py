"""AdaKV (arXiv 2407.11550): SnapKV whose KV heads share one budget by the scores of their tokens (`--cache adakv`).

Scores are f32[B, K, S]; budgets are i32[B, K], one per row and KV head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from icejax.cache.bases.eviction import Slots
from icejax.cache.policies.snapkv import SnapKV
from icejax.checks.numbers import number


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """AdaKV: of a text the best tokens of all KV heads of a layer stay, by SnapKV's score, so that heads have unequal budgets.

    Beside the window, a head wins as many tokens as it has among the layer's best `KV heads * (budget - window)`. It keeps
    `1 - floor` of that number, and `floor` of an even share on top. With a budget of 10, a window of 2, `floor` 0.25, and two
    heads that win 12 and 4 of 16 tokens:

        first head     2 + 0.75 * 12 + 0.25 * 8 = 13
        second head    2 + 0.75 * 4  + 0.25 * 8 = 7

    Both terms are rounded, so that the sum may differ by half a token per head. This is the authors' rule; in kvpress's
    AdaKVPress heads compete only for tokens beyond a fixed number of each head's best, window included. The authors' runs have
    kernel 7 and pooling max; their README has a floor of 0.5. The budgets of a text are not known beforehand, so every KV head
    has slots for the largest possible budget.

    Attributes:
        budget: tokens kept per KV head and layer after a text, the mean over KV heads; decoded tokens come on top.
        window: last tokens of a text, which stay and whose queries score the others.
        kernel: neighbouring tokens over which attention is pooled, an odd number.
        pooling: avg (SnapKV's code) or max (AdaKV's).
        group: how the weights of a KV head's query heads are combined: mean (as kvpress), max or sum.
        floor: share of the budget without the window that all KV heads get in equal parts.

    Raises:
        InputError: an option is out of range.
    """

    floor: float = 0.2
    by_head = False  # the heads of a layer compete

    def __post_init__(self) -> None:
        super().__post_init__()
        number("floor", self.floor, least=0, most=1)

    def most(self, kv_heads: int) -> int:
        return self.window + int(self._beside_window(np.float32(kv_heads * (self.budget - self.window))))

    def _beside_window(self, won: Any) -> Any:
        """Returns how many tokens a head that won `won` keeps besides the window; rounded in fp32, as in the authors' code."""
        return (won * np.float32(1 - self.floor)).round() + np.float32(int(self.floor * (self.budget - self.window)))

    def budgets(self, tokens: Slots) -> Int[Array, "B K"]:
        heads, count = tokens.there.shape[1:]
        num_tokens, total = tokens.there.sum(-1, dtype=jnp.int32), heads * (self.budget - self.window)
        worth = jax.lax.top_k(jnp.where(tokens.there, tokens.scores, -jnp.inf), min(self.window + total, count))[0]
        beside = worth[..., self.window :]
        best, chosen = jax.lax.top_k(beside.reshape(-1, heads * beside.shape[2]), min(total, heads * beside.shape[2]))
        winning_heads = jnp.where(best > -jnp.inf, chosen // max(beside.shape[2], 1), heads)
        won = (winning_heads[:, None] == jnp.arange(heads)[None, :, None]).sum(-1, dtype=jnp.float32)
        all_fit = num_tokens.sum(1, keepdims=True) <= heads * self.budget
        return jnp.minimum(
            self.most(heads), jnp.where(all_fit, num_tokens, self.window + self._beside_window(won).astype(jnp.int32))
        )
