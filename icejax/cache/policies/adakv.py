"""AdaKV (arXiv 2407.11550): SnapKV whose KV heads share one budget by what their tokens are worth."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from icejax.cache.eviction import Slots
from icejax.cache.policies.snapkv import SnapKV
from icejax.ranges import number


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """AdaKV: the best tokens of all KV heads of a layer stay, by SnapKV's score; how many of a head's these are is its budget.

    The floor is that of kvpress's AdaKVPress, `alpha_safeguard`: so many of each head's best tokens, its window among them,
    stay before heads compete. The authors' code scales what each head won beside the window by `1 - floor_alpha` (0.5) and
    adds the floor, so that rounding moves the sum; its settings are kernel 7 and pooling max. As the budgets of a text are not
    known beforehand, every KV head has slots for the largest there may be: K budgets less K - 1 floors, of K heads.

    Attributes:
        budget: tokens kept per KV head and layer after a text, the mean over KV heads; decoded tokens come on top.
        window: last tokens of a text, which stay and whose queries decide.
        kernel: neighbours over which attention is pooled, an odd number.
        pooling: avg (SnapKV's own code) or max (AdaKV's).
        group: how the query heads of a KV head agree: mean (as kvpress), max or sum.
        floor: share of the budget that each KV head keeps in any case, window included.

    Raises:
        InputError: an option is out of range.
    """

    floor: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        number("floor", self.floor, least=0, most=1)

    @property
    def _safe(self) -> int:
        return int(self.floor * self.budget)

    def most(self, kv_heads: int) -> int:
        return kv_heads * self.budget - (kv_heads - 1) * self._safe

    def budgets(self, tokens: Slots) -> Int[Array, "B K"]:
        batch, heads, count = tokens.positions.shape
        several = min(self.most(heads), count)
        worth = jax.lax.top_k(jnp.where(tokens.there, tokens.scores, -jnp.inf), several)[0]
        safe = (jnp.arange(several)[None, None] < self._safe) & (worth > -jnp.inf)
        worth = jnp.where(safe, jnp.inf, worth).reshape(batch, -1)
        best, chosen = jax.lax.top_k(worth, heads * min(self.budget, several))
        of = jnp.where(best > -jnp.inf, chosen // several, heads)
        return (of[:, None] == jnp.arange(heads)[None, :, None]).sum(-1, dtype=jnp.int32)
