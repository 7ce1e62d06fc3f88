"""Two caches on the same samples: the difference of their scores, and its interval by the paired bootstrap (Koehn 2004)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

DRAWS, BLOCK = 10_000, 100  # resamples, and how many of them are in memory at once
SEED = 0


class Difference(NamedTuple):
    """The mean difference of two scores over the same samples, and its 95% interval."""

    mean: float
    low: float
    high: float


def difference(scores: Sequence[float], others: Sequence[float]) -> Difference:
    """Returns the mean of `scores - others`, sample by sample, and the 2.5th and 97.5th percentiles of its bootstrap means."""
    differences = np.asarray(scores, float) - np.asarray(others, float)
    rng, size = np.random.default_rng(SEED), (BLOCK, len(differences))
    means = [differences[rng.integers(len(differences), size=size)].mean(1) for _ in range(DRAWS // BLOCK)]
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return Difference(float(differences.mean()), float(low), float(high))
