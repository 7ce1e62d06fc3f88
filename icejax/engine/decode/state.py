"""The arrays of a batch between two decode steps, and the results of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from icejax.cache.protocol import KVCache
from icejax.engine.penalties import RowPenalties
from icejax.engine.plan import Plan
from icejax.engine.sampling import RowSampling
from icejax.runtime.mesh import WHOLE


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """All arrays that change from step to step, except the pool.

    Attributes:
        cache: the device part of the cache.
        last_tokens: the newest token of every row, not yet in the cache.
        done: rows that have ended. They repeat their last token, which callers ignore.
        key: the random key of every row.
        draw_origin: length of each row when its first token was drawn with `key`. Each draw folds the row's length less this
            origin into the key, so draws do not depend on when the row joined a batch.
        sampling: sampling options of the rows; None if all are greedy.
        penalties: penalties and logit bias of the rows; None if no row has one.
    """

    cache: KVCache
    last_tokens: jax.Array  # i32[B]
    done: jax.Array  # bool[B]
    key: jax.Array  # key[B]
    draw_origin: jax.Array  # i32[B]
    sampling: RowSampling | None = None
    penalties: RowPenalties | None = None

    def without_layers(self) -> DecodeState:
        """Returns the state for programs that need nothing of the layers."""
        return self.with_layers(())

    def with_layers(self, layers: tuple[Any, ...]) -> DecodeState:
        """Returns the state with the layers' caches."""
        return replace(self, cache=replace(self.cache, layers=layers))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """The results of a decode step.

    Attributes:
        counters: the chosen tokens and the step's counters, packed for `StepCounters.read`.
        logits: the logits that the tokens were chosen from.
    """

    counters: jax.Array  # i32[8, B]
    logits: jax.Array  # f32[B, V]

    @property
    def tokens(self) -> Int[Array, " B"]:
        """The chosen tokens, on the device."""
        return self.counters[0]

    def of_rows(self, count: int) -> Step:
        """Returns a step of `count` rows in the form of this one, with zeros, for `with_row` to fill."""
        counters = jnp.zeros((len(self.counters), count), jnp.int32)
        logits = jnp.zeros((count, self.logits.shape[1]), self.logits.dtype)
        return jax.device_put(Step(counters, logits), self.logits.sharding)

    def with_row(self, at: int, row: Step) -> Step:
        """Returns the step with the results of `row`, a step of one row, at the place `at`."""
        return Step(self.counters.at[:, at].set(row.counters[:, 0]), self.logits.at[at].set(row.logits[0]))


def decode_cuts(plan: Plan) -> DecodeState:
    """Returns how the arrays of a state are cut for the plan's mesh."""
    return DecodeState(plan.cuts, *(WHOLE,) * 6)
