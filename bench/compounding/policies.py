"""Caches for comparison that are no option of icejax: tokens in pages that are not theirs, and pages chosen at random.

Names have options after colons, as those of `bench.compare` have: `misplaced:share=0.05:page_size=8`, `random-pages`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bench.compare import cells
from bench.compare.cells import Contender
from icejax.cache.bases.selection import Selection
from icejax.cache.index.digest_tree import Digested
from icejax.cache.protocol import CachePolicy, Heads, View
from icejax.cache.registry import POLICIES, Clustered
from icejax.checks.errors import InputError
from icejax.checks.numbers import number


@dataclass(frozen=True)
class Misplaced(Clustered):
    """The clustered cache, with a share of the prompt's tokens moved to other pages before digests are made.

    Attributes:
        share: share of the tokens that are moved; 1: pages of random tokens.
        seed: seed of the moves, which have the same slots in all layers.
    """

    share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        number("share", self.share, least=0, most=1)

    def order(self, k: Float[Array, "B K T H"], valid: Bool[Array, "B T"]) -> Int[Array, "B K T"]:
        order = super().order(k, valid)
        mask = jnp.broadcast_to(valid[:, None, :], order.shape)
        return moved(order, jnp.take_along_axis(mask, order, axis=2), self.share, jax.random.key(self.seed))


def moved(order: Int[Array, "B K T"], filled: Bool[Array, "B K T"], share: float, key: jax.Array) -> Int[Array, "B K T"]:
    """Returns an order of tokens in slots, in which a share of the tokens in `filled` slots have moved on in a random cycle.

    No page changes its size. For example, a share of 0.3 of slots 0 to 9 may draw the slots 7, 2 and 4: the token of slot 7
    goes to slot 2, that of 2 to 4, and that of 4 to 7.
    """
    drawn = jnp.where(filled, jax.random.uniform(key, order.shape), 2.0).argsort(axis=2)  # filled slots first
    count = jnp.ceil(share * filled.sum(2, keepdims=True, dtype=jnp.float32)).astype(jnp.int32)
    place = jnp.arange(order.shape[2])[None, None, :]
    following = jnp.take_along_axis(drawn, (place + 1) % jnp.maximum(count, 1), axis=2)
    target = jnp.where(place < count, following, drawn)
    return jnp.put_along_axis(order, target, jnp.take_along_axis(order, drawn, axis=2), axis=2, inplace=False)


@dataclass(frozen=True)
class RandomPages(Clustered):
    """Sinks, window and pages drawn at random in every step, attended exactly; all other tokens are left out.

    Attributes:
        seed: seed of the draws, which are the same in all layers.
    """

    rerank: bool = False
    tail: bool = False
    seed: int = 0

    def find(self, heads: Heads, index: Digested, view: View) -> Selection:
        counts = index.levels[0].count
        draws = jax.random.uniform(jax.random.fold_in(jax.random.key(self.seed), view.lengths.clock), counts.shape)
        ids = jax.lax.top_k(jnp.where(counts > 0, draws, -1.0), self.num_fetched(counts.shape[-1]))[1]
        return Selection(ids, jnp.take_along_axis(counts, ids, axis=2))


KINDS = {"misplaced": Misplaced, "random-pages": RandomPages}


def contenders(names: Sequence[str], budgets: Sequence[str], length: int) -> tuple[list[Contender], list[str]]:
    """Returns what `cells.contenders` does, where `KINDS` have names too; the seed is not an option here."""
    for name in names:
        if ":seed=" in name:
            raise InputError(f"--policies must leave the seed to --seeds, got {name}")
    with mock.patch.dict(POLICIES, KINDS):  # only while names are read
        return cells.contenders(names, budgets, length)


def seeded(policy: CachePolicy, seed: int) -> CachePolicy:
    """Returns the policy with a seed, if it draws anything."""
    return dataclasses.replace(policy, seed=seed) if hasattr(policy, "seed") else policy
