"""LaCache (arXiv 2507.14204): first and newest tokens, and between them different tokens per layer, sparser with age.

`--cache lacache`. Scores are f32[B, K, S]: 1 for tokens that a round has passed, 0 for the rest, below 0 for tokens to evict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.cache.bases.eviction import NO_TOKEN, Eviction, Slots
from icejax.cache.protocol import Heads, View
from icejax.checks.errors import InputError, quoted
from icejax.checks.numbers import LARGEST, integer
from icejax.ops.attention.dense import Attended
from icejax.ops.slots import by_head, merge_heads, order, split_heads


@dataclass(frozen=True)
class LaCache(Eviction):
    """LaCache: when slots are full, one of the next `rungs` tokens after the sinks stays, a different one in each layer.

    A round continues so up to the newest tokens; the next round begins at the sinks again. Attention plays no part, and
    all KV heads keep the same tokens. A text longer than one round is thinned as in the authors' code, by a second round with
    as many tokens per rung as needed. Their code evicts the tokens of a rung at once; here tokens leave one by one as others
    come, so that every token in their cache is in this one: `budget`, which includes the newest token, is their cache size plus
    (rungs - 1) // 2, which they add, plus 1. Their number of tokens per rung is layers / span: 2 for 32 layers; the overlap
    that they offer is not here.

    Attributes:
        budget: tokens attended exactly per KV head and layer, the newest included.
        sinks: first tokens that stay; 128 for LongBench.
        recent: newest tokens that no round reaches; None: as many as the model has layers (as in the authors' code).
        rungs: tokens per rung, of which one stays.
        reassign: whether tokens get new positions inside the cache, as in the authors' code; else they keep their own.

    Raises:
        InputError: an option is out of range, or the budget leaves no room for a rung.
    """

    budget: int = 256
    sinks: int = 4
    recent: int | None = None
    rungs: int = 2
    reassign: bool = True
    layer = 0  # not an option: set by `LaCacheLayer`

    def __post_init__(self) -> None:
        integer("sinks", self.sinks, least=0, most=2**20)
        if self.recent is not None:
            integer("recent", self.recent, least=0, most=2**20)
        integer("rungs", self.rungs, least=2, most=1024)
        integer("budget", self.budget, least=self.sinks + (self.recent or 0) + 2, most=LARGEST // self.rungs)
        if not isinstance(self.reassign, bool):
            raise InputError(f"reassign must be true or false, got {quoted(self.reassign)}")

    @property
    def rerotates(self) -> bool:
        return self.reassign

    def for_layers(self, full: Sequence[int], *, of: int) -> list[LaCache]:
        recent = of if self.recent is None else self.recent
        return [LaCacheLayer(**asdict(self) | dict(recent=recent), layer=layer) for layer in full]

    def _room(self, cursor: jax.Array | int) -> jax.Array | int:
        """Returns how many rungs a round may make from the place `cursor` on: they end before the `recent` newest tokens."""
        return self.budget - 1 - self.recent - cursor

    def score(self, tokens: Slots, heads: Heads, attended: Attended, view: View) -> Float[Array, "B K S"]:
        """Returns 1 for tokens that the round has passed, 0 for later tokens, below 0 for tokens to evict, the first lowest."""
        positions, scores = tokens.positions[:, 0], tokens.scores[:, 0]
        counted = (positions != NO_TOKEN) & (scores >= 0)
        places, count = order(positions, counted), counted.sum(1, keepdims=True, dtype=jnp.int32)
        cursor = jnp.maximum((scores > 0).sum(1, keepdims=True, dtype=jnp.int32), self.sinks)
        per_rung, excess, room = (
            self.rungs - 1,
            jnp.maximum(count - self.budget + 1, 0),
            jnp.maximum(self._room(cursor), 0),
        )
        second_round = excess > room * per_rung
        rungs = jnp.where(second_round, room, -(-excess // per_rung))
        stays, new_places = _thinned(places, cursor, rungs, self.rungs, self.layer)
        remaining = jnp.where(second_round, excess - room * per_rung, 0)
        size = 1 + per_rung * -(-remaining // (self._room(self.sinks) * per_rung))
        second_rungs = -(-remaining // jnp.maximum(size - 1, 1))
        stays_again, new_places = _thinned(new_places, self.sinks, second_rungs, size, self.layer)
        passed = new_places < jnp.where(second_round, self.sinks + second_rungs, cursor + rungs)
        new_scores = jnp.where(stays & stays_again, passed.astype(jnp.int32), places - count).astype(jnp.float32)
        new_scores = jnp.where(counted, new_scores, scores - count.astype(jnp.float32))
        return jnp.broadcast_to(new_scores[:, None], tokens.scores.shape)

    def keys(self, tokens: Slots, view: View) -> Float[Array, "R S H"]:
        """Returns the keys rotated as if the tokens had no gaps before the newest position: only distances count."""
        if not self.reassign:
            return tokens.k
        positions, filled = tokens.positions[:, 0], tokens.there[:, 0]
        first = positions.max(1, keepdims=True) + 1 - filled.sum(1, keepdims=True, dtype=jnp.int32)
        keys = split_heads(tokens.k, tokens.positions.shape[1]).transpose(0, 2, 1, 3)
        return merge_heads(by_head(view.rerotate(keys, jnp.where(filled, first + order(positions, filled) - positions, 0))))

    def update(self, tokens: Slots, weights: Float[Array, "B K G S"]) -> Float[Array, "B K S"]:
        """Returns the scores; if slots are full and no token is marked to leave, marks all but one token of the next rung."""
        positions, scores, filled = tokens.positions[:, 0], tokens.scores[:, 0], tokens.there[:, 0]
        opens = (filled.sum(1) == self.budget) & (scores >= 0).all(1)
        cursor = jnp.maximum((scores > 0).sum(1, keepdims=True), self.sinks)
        cursor = jnp.where(self._room(cursor) < 1, self.sinks, cursor)
        places = order(positions, filled)
        passed = (places < cursor) | (places == cursor + self.layer % self.rungs)
        leaves = (places < cursor + self.rungs) & ~passed
        new_scores = jnp.where(leaves, places - cursor - self.rungs, passed.astype(jnp.int32)).astype(jnp.float32)
        return jnp.broadcast_to(jnp.where(opens[:, None], new_scores, scores)[:, None], tokens.scores.shape)


@dataclass(frozen=True)
class LaCacheLayer(LaCache):
    """LaCache in one layer; `layer` decides which token of a rung stays."""

    recent: int = 0
    layer: int = 0


def _thinned(places: jax.Array, start: jax.Array | int, rungs: jax.Array, size: jax.Array | int, layer: int):
    """Returns which places stay if one of every `size` from `start` on stays, `rungs` times, and their new places.

    Places 0 to 8 with start=2, rungs=2, size=3, layer=1: of 2 3 4 stays 3, of 5 6 7 stays 6.

        stay         0 1 3 6 8
        new places   0 1 2 3 4
    """
    offset = places - start
    inside = (offset >= 0) & (offset < rungs * size)
    new_places = jnp.where(inside, start + offset // size, places - rungs * (size - 1))
    return ~inside | (offset % size == layer % size), jnp.where(offset < 0, places, new_places)
