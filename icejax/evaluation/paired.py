"""Two caches on the same samples: the difference of their scores, and its interval by the paired bootstrap (Koehn 2004)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

DRAWS = 10_000
SEED = 0


class Difference(NamedTuple):
    """The mean difference of two scores over the same samples, and its 95% interval."""

    mean: float
    low: float
    high: float


def difference(scores: Sequence[float], others: Sequence[float]) -> Difference:
    """Returns the mean of `scores - others`, sample by sample, and the 2.5th and 97.5th percentiles of its bootstrap means."""
    differences = np.asarray(scores, float) - np.asarray(others, float)
    chosen = np.random.default_rng(SEED).integers(len(differences), size=(DRAWS, len(differences)))
    low, high = np.percentile(differences[chosen].mean(1), [2.5, 97.5])
    return Difference(float(differences.mean()), float(low), float(high))
