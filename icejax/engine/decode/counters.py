"""Counters of a decode step for each row, by name, packed into one array i32[8, B], so that one transfer reads them all.

The step's program packs them; the decode loop reads them on the host and sums them per row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

NOT_FINITE = -1  # stands for the token of a row whose logits are not all finite
MILLION = 1e6  # the estimated error is packed as an integer, in millionths


class StepCounters(NamedTuple):
    """The counters of one step: one array i32[B] per counter, or the integers of one row.

    For a policy that fetches single slots, a page here means a slot.

    Attributes:
        token: the chosen token, or NOT_FINITE.
        pages_attended: pages attended to exactly, summed over layers and KV heads.
        pages_fetched: pages read from host memory, summed likewise.
        pages_needed: pages that the queries selected, on the device or not, summed likewise.
        experts_taken: experts that the row's token was routed to, summed over layers; 0 unless experts are in host memory.
        experts_fetched: experts read from host memory for that token, summed likewise.
        error_millionths: the policy's estimate of the step's relative error, mean over layers and KV heads; 0 if the policy
            has no estimate.
        tokens_attended: tokens attended to exactly, mean over layers and KV heads; 0 if the policy has no estimate.
    """

    token: int | np.ndarray
    pages_attended: int | np.ndarray
    pages_fetched: int | np.ndarray
    pages_needed: int | np.ndarray
    experts_taken: int | np.ndarray
    experts_fetched: int | np.ndarray
    error_millionths: int | np.ndarray
    tokens_attended: int | np.ndarray

    @classmethod
    def read(cls, packed: jax.Array) -> StepCounters:
        """Returns the counters of a packed array i32[8, B], on the host."""
        return cls(*np.asarray(packed))

    def row(self, index: int) -> StepCounters:
        """Returns the counters of one row as integers."""
        return StepCounters(*(int(counter[index]) for counter in self))

    def plus(self, other: StepCounters) -> StepCounters:
        """Returns the sums of two steps' counters; the sum of tokens has no meaning."""
        return StepCounters(*(a + b for a, b in zip(self, other, strict=True)))


NOTHING = StepCounters(*(0,) * len(StepCounters._fields))


def pack(
    token: Int[Array, " B"], pages: Int[Array, "3 B"], experts: Int[Array, "2 B"], estimates: Int[Array, "2 B"]
) -> Int[Array, "8 B"]:
    """Returns the counters of a step as one array, in the order of `StepCounters`.

    Args:
        pages: attended, fetched and needed pages.
        experts: chosen and fetched experts.
        estimates: the error in millionths, and the tokens attended.
    """
    return jnp.concatenate([token[None], pages, experts, estimates])


def pack_nothing(rows: int) -> Int[np.ndarray, "8 B"]:
    """Returns the packed counters of rows before the choice of their first token."""
    return np.zeros((len(StepCounters._fields), rows), np.int32)


def with_tokens(counters: Int[Array, "8 B"], tokens: Int[Array, " B"]) -> Int[Array, "8 B"]:
    """Returns packed counters with `tokens` as the chosen ones."""
    return counters.at[0].set(tokens)
