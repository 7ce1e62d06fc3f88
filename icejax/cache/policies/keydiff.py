"""KeyDiff (arXiv 2504.15364): the tokens whose keys are least like the others."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.cache.bases.eviction import Eviction, Slots
from icejax.cache.protocol import Heads, View
from icejax.checks.numbers import integer
from icejax.ops.attention.dense import Attended
from icejax.ops.slots import apart


@dataclass(frozen=True)
class KeyDiff(Eviction):
    """KeyDiff: of a text the keys of least cosine with the mean direction of all; no query decides. Decoded tokens stay.

    The score is that of kvpress's KeyDiffPress, which takes a prompt at once, as is done here. The paper takes it in blocks:
    here, more text behind a cache is such a block, compared with what was kept before it.

    Attributes:
        budget: tokens kept per KV head and layer after a text; decoded tokens come on top.

    Raises:
        InputError: the budget is out of range.
    """

    budget: int = 256

    def __post_init__(self) -> None:
        integer("budget", self.budget)

    on_top = True

    def score(self, tokens: Slots, heads: Heads, attended: Attended, view: View) -> Float[Array, "B K S"]:
        keys = apart(self.keys(tokens, view), heads.k.shape[2]).astype(jnp.float32)
        directions = keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-12)  # 0 in an empty slot
        # The length of the mean is the same for all tokens of a KV head and changes no order.
        return -(directions * directions.sum(2, keepdims=True)).sum(-1)
