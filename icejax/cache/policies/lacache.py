"""LaCache (arXiv 2507.14204): first and newest tokens, and between them others in other layers, the sparser the older."""

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
from icejax.ops.slots import apart, by_head, joined, order


@dataclass(frozen=True)
class LaCache(Eviction):
    """LaCache: where there is no room, of the next `rungs` tokens behind the sinks one stays, another one in each layer.

    So it goes on up to the newest tokens, then from the sinks on again. No attention decides, and all KV heads keep the same. A
    text longer than one such round is thinned as in the authors' code, by one more round of as many tokens to a rung as needed.
    There those that are to leave do so at once, here one by one as others come, so that all it keeps is kept here: `budget`,
    which the newest token is part of, is its cache size, (rungs - 1) // 2 more, which it adds, and 1. Its rungs are the layers
    by its span, without the overlap that it offers: 2 for 32 layers.

    Attributes:
        budget: tokens attended exactly per KV head and layer, the newest included.
        sinks: first tokens that stay; for LongBench 128.
        recent: newest tokens that no round reaches; None: as many as the model has layers (as in its code).
        rungs: how many tokens become one.
        reassign: whether tokens have new positions inside the cache, as in its code; else they keep their own.

    Raises:
        InputError: an option is out of range, or the budget leaves no room for a rung.
    """

    budget: int = 256
    sinks: int = 4
    recent: int | None = None
    rungs: int = 2
    reassign: bool = True
    layer = 0  # no option

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
        """Returns how many rungs there may be from the place `cursor` on, up to the newest tokens."""
        return self.budget - 1 - self.recent - cursor

    def score(self, tokens: Slots, heads: Heads, attended: Attended, view: View) -> Float[Array, "B K S"]:
        """Returns 1 for what a round has passed, 0 for what it has not, and less for what is to leave, the first the least."""
        positions, scores = tokens.positions[:, 0], tokens.scores[:, 0]
        counted = (positions != NO_TOKEN) & (scores >= 0)
        places, count = order(positions, counted), counted.sum(1, keepdims=True, dtype=jnp.int32)
        cursor = jnp.maximum((scores > 0).sum(1, keepdims=True, dtype=jnp.int32), self.sinks)
        fewer, over, room = self.rungs - 1, jnp.maximum(count - self.budget + 1, 0), jnp.maximum(self._room(cursor), 0)
        again = over > room * fewer
        rungs = jnp.where(again, room, -(-over // fewer))
        stays, places_then = _climbed(places, cursor, rungs, self.rungs, self.layer)
        left = jnp.where(again, over - room * fewer, 0)
        size = 1 + fewer * -(-left // (self._room(self.sinks) * fewer))
        more = -(-left // jnp.maximum(size - 1, 1))
        still, places_then = _climbed(places_then, self.sinks, more, size, self.layer)
        passed = places_then < jnp.where(again, self.sinks + more, cursor + rungs)
        found = jnp.where(stays & still, passed.astype(jnp.int32), places - count).astype(jnp.float32)
        found = jnp.where(counted, found, scores - count.astype(jnp.float32))
        return jnp.broadcast_to(found[:, None], tokens.scores.shape)

    def keys(self, tokens: Slots, view: View) -> Float[Array, "R S H"]:
        """Returns the keys as those of tokens that stand behind one another up to the newest: only distances count."""
        if not self.reassign:
            return tokens.k
        positions, there = tokens.positions[:, 0], tokens.there[:, 0]
        ahead = positions.max(1, keepdims=True) + 1 - there.sum(1, keepdims=True, dtype=jnp.int32)
        keys = apart(tokens.k, tokens.positions.shape[1]).transpose(0, 2, 1, 3)
        return joined(by_head(view.rerotate(keys, jnp.where(there, ahead + order(positions, there) - positions, 0))))

    def update(self, tokens: Slots, weights: Float[Array, "B K G S"]) -> Float[Array, "B K S"]:
        """Returns the scores; of the next rung's tokens all but one are to leave, if the slots are full and none else is to."""
        positions, scores, there = tokens.positions[:, 0], tokens.scores[:, 0], tokens.there[:, 0]
        opens = (there.sum(1) == self.budget) & (scores >= 0).all(1)
        cursor = jnp.maximum((scores > 0).sum(1, keepdims=True), self.sinks)
        cursor = jnp.where(self._room(cursor) < 1, self.sinks, cursor)
        places = order(positions, there)
        passed = (places < cursor) | (places == cursor + self.layer % self.rungs)
        leaves = (places < cursor + self.rungs) & ~passed
        found = jnp.where(leaves, places - cursor - self.rungs, passed.astype(jnp.int32)).astype(jnp.float32)
        return jnp.broadcast_to(jnp.where(opens[:, None], found, scores)[:, None], tokens.scores.shape)


@dataclass(frozen=True)
class LaCacheLayer(LaCache):
    """LaCache in one layer; the `layer` says which token of a rung stays."""

    recent: int = 0
    layer: int = 0


def _climbed(places: jax.Array, start: jax.Array | int, rungs: jax.Array, size: jax.Array | int, layer: int):
    """Returns which places stay if one of every `size` from `start` on does, `rungs` times, and where these then are."""
    number = places - start
    inside = (number >= 0) & (number < rungs * size)
    after = jnp.where(inside, start + number // size, places - rungs * (size - 1))
    return ~inside | (number % size == layer % size), jnp.where(number < 0, places, after)
