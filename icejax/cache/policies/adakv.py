"""AdaKV (arXiv 2407.11550): SnapKV whose KV heads share one budget by what their tokens are worth."""

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
    """AdaKV: the best tokens of all KV heads of a layer stay, by SnapKV's score; how many of a head's these are is its budget.

    Beside the window a head has won as many tokens as it has among the best of all heads; its budget is that number times
    `1 - floor`, and the floor of an even budget on top, rounded, so that the sum may differ by half a token a head. This is the
    authors' rule; kvpress's AdaKVPress lets heads compete behind so many of each one's best, window included. The authors' runs
    have kernel 7 and pooling max; their README has a floor of 0.5. As the budgets of a text are not known beforehand, every KV
    head has slots for the largest there may be.

    Attributes:
        budget: tokens kept per KV head and layer after a text, the mean over KV heads; decoded tokens come on top.
        window: last tokens of a text, which stay and whose queries decide.
        kernel: neighbours over which attention is pooled, an odd number.
        pooling: avg (SnapKV's own code) or max (AdaKV's).
        group: how the query heads of a KV head agree: mean (as kvpress), max or sum.
        floor: share of the budget beside the window that is dealt evenly.

    Raises:
        InputError: an option is out of range.
    """

    floor: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        number("floor", self.floor, least=0, most=1)

    def most(self, kv_heads: int) -> int:
        return self.window + int(self._dealt(np.float32(kv_heads * (self.budget - self.window))))

    def _dealt(self, won: Any) -> Any:
        """Returns what heads that have won so many tokens keep beside the window; rounded in single precision, as its code."""
        return (won * np.float32(1 - self.floor)).round() + np.float32(int(self.floor * (self.budget - self.window)))

    def budgets(self, tokens: Slots) -> Int[Array, "B K"]:
        heads, count = tokens.there.shape[1:]
        there, most = tokens.there.sum(-1, dtype=jnp.int32), heads * (self.budget - self.window)
        worth = jax.lax.top_k(jnp.where(tokens.there, tokens.scores, -jnp.inf), min(self.window + most, count))[0]
        beside = worth[..., self.window :]
        best, chosen = jax.lax.top_k(beside.reshape(-1, heads * beside.shape[2]), min(most, heads * beside.shape[2]))
        of = jnp.where(best > -jnp.inf, chosen // max(beside.shape[2], 1), heads)
        won = (of[:, None] == jnp.arange(heads)[None, :, None]).sum(-1, dtype=jnp.float32)
        all_fit = there.sum(1, keepdims=True) <= heads * self.budget
        return jnp.minimum(self.most(heads), jnp.where(all_fit, there, self.window + self._dealt(won).astype(jnp.int32)))
