"""StreamingLLM (arXiv 2309.17453): keeps the first and the newest tokens (`--cache streaming`).

Scores are positions, f32[B, K, S]; those of sinks are inf.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.cache.bases.eviction import Eviction, Slots
from icejax.cache.protocol import Heads, View
from icejax.checks.errors import InputError, quoted
from icejax.checks.numbers import integer
from icejax.ops.attention.dense import Attended
from icejax.ops.slots import by_head, merge_heads, split_heads


@dataclass(frozen=True)
class Streaming(Eviction):
    """StreamingLLM: keeps the newest tokens and the first ones (sinks), which get much attention whatever their content.

    As in the authors' code, tokens get new positions inside the cache, without gaps.

    Attributes:
        budget: tokens attended exactly per KV head and layer, sinks included.
        sinks: first tokens that stay.
        reassign: whether tokens get new positions inside the cache; else they keep their own, as in kvpress.

    Raises:
        InputError: an option is out of range, or the budget leaves no room for a token after the sinks.
    """

    budget: int = 256
    sinks: int = 4
    reassign: bool = True
    by_head = True
    by_queries = False

    def __post_init__(self) -> None:
        integer("sinks", self.sinks, least=0, most=2**20)
        integer("budget", self.budget, least=self.sinks + 1)
        if not isinstance(self.reassign, bool):
            raise InputError(f"reassign must be true or false, got {quoted(self.reassign)}")

    @property
    def rerotates(self) -> bool:
        return self.reassign

    def score(self, tokens: Slots, heads: Heads, attended: Attended, view: View) -> Float[Array, "B K S"]:
        return self._newest(tokens)

    def update(self, tokens: Slots, weights: Float[Array, "B K G S"]) -> Float[Array, "B K S"]:
        return self._newest(tokens)

    def _newest(self, tokens: Slots) -> Float[Array, "B K S"]:
        return jnp.where(tokens.positions < self.sinks, jnp.inf, tokens.positions.astype(jnp.float32))

    def keys(self, tokens: Slots, view: View) -> Float[Array, "R S H"]:
        """Returns the keys with the sinks rotated to the positions just before the newest tokens: only distances count.

        With 4 sinks and the newest tokens at positions 10 to 15, 6 tokens are gone: the sinks move from 0-3 to 6-9.
        """
        if not self.reassign or not self.sinks:
            return tokens.k
        gap = tokens.positions.max((1, 2)) + 1 - tokens.there[:, 0].sum(1)  # number of evicted tokens
        # Sinks never leave the first slots.
        sinks = split_heads(tokens.k[:, : self.sinks], tokens.positions.shape[1]).transpose(0, 2, 1, 3)
        rotated = view.rerotate(sinks, jnp.broadcast_to(gap[:, None], sinks.shape[:2]))
        # Not written in place: XLA:CPU would then rotate in place, and read halves that it has already rotated.
        return jnp.concatenate([merge_heads(by_head(rotated)), tokens.k[:, self.sinks :]], axis=1)
