"""What a decode step counts of each row, by name. One array brings all of it to the host."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

NOT_FINITE = -1  # in the place of a token: its logits are not all finite, so that there is nothing to choose
MILLION = 1e6  # the error crosses as a whole number


class StepCounters(NamedTuple):
    """The counters of one step: an array per counter with a number per row, or the numbers of one row.

    A page is a single slot where the policy fetches single slots.

    Attributes:
        token: the token that was chosen, or NOT_FINITE.
        pages_attended: pages attended to exactly, summed over layers and KV heads.
        pages_fetched: pages that came from host memory, likewise.
        pages_needed: pages that the queries asked for, likewise.
        experts_taken: experts that the row's token took, summed over layers; 0 unless experts are in host memory.
        experts_fetched: experts that came from host memory for it, likewise.
        error_millionths: the policy's estimate of the step's relative error, mean over layers and KV heads; 0 without one.
        tokens_attended: tokens attended to exactly, mean over layers and KV heads; 0 of a policy without an estimate.
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
        """Returns the counters that `pack` packed, on the host."""
        return cls(*np.asarray(packed))

    def row(self, index: int) -> StepCounters:
        """Returns the numbers of one row."""
        return StepCounters(*(int(counter[index]) for counter in self))

    def plus(self, other: StepCounters) -> StepCounters:
        """Returns the sums of two steps' numbers; the sum of tokens means nothing."""
        return StepCounters(*(a + b for a, b in zip(self, other, strict=True)))


NOTHING = StepCounters(*(0,) * len(StepCounters._fields))


def pack(
    token: Int[Array, " B"], pages: Int[Array, "3 B"], experts: Int[Array, "2 B"], estimates: Int[Array, "2 B"]
) -> Int[Array, "8 B"]:
    """Returns the counters of a step as one array, in the order of `StepCounters`."""
    return jnp.concatenate([token[None], pages, experts, estimates])


def pack_token(token: Int[Array, " B"]) -> Int[Array, "8 B"]:
    """Returns the counters of a prompt, which brings a token and nothing else."""
    return jnp.pad(token[None], ((0, len(StepCounters._fields) - 1), (0, 0)))
