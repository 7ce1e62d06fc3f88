"""KeyDiff (arXiv 2504.15364): keeps the tokens whose keys are least similar to the others (`--cache keydiff`).

Scores are negative cosines, f32[B, K, S].
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.cache.bases.eviction import Eviction, Slots
from icejax.cache.protocol import Heads, View
from icejax.checks.numbers import integer
from icejax.ops.attention.dense import Attended
from icejax.ops.slots import split_heads


@dataclass(frozen=True)
class KeyDiff(Eviction):
    """KeyDiff: keeps a text's keys of least cosine with the mean direction of all keys; queries play no part.

    Decoded tokens stay. The score is that of kvpress's KeyDiffPress, which scores a prompt at once, as here. The paper scores
    a prompt in blocks; here a later text is scored together with the kept tokens.

    Attributes:
        budget: tokens kept per KV head and layer after a text; decoded tokens come on top.

    Raises:
        InputError: the budget is out of range.
    """

    budget: int = 256

    def __post_init__(self) -> None:
        integer("budget", self.budget)

    on_top = True
    by_head = True
    by_queries = False

    def score(self, tokens: Slots, heads: Heads, attended: Attended, view: View) -> Float[Array, "B K S"]:
        keys = split_heads(self.keys(tokens, view), heads.k.shape[2]).astype(jnp.float32)
        directions = keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-12)  # 0 in an empty slot
        # The length of the mean direction scales all scores of a KV head alike, so that it is left out.
        return -(directions * directions.sum(2, keepdims=True)).sum(-1)
