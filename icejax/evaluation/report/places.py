"""Scores by the length of the prompt, and by the depth of the answer in it."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from icejax.evaluation.report.runs import Run
from icejax.evaluation.scores import Metric

PERPLEXITY = "nll,none"  # a metric whose mean is shown as a perplexity


class Mean(NamedTuple):
    """The mean of some samples, and the ends of its 95% interval by its standard error; a perplexity of log-likelihoods."""

    value: float
    low: float
    high: float


def by_length(run: Run, metric: Metric) -> dict[int, Mean]:
    """Returns the mean score of each length, in tokens, from short to long."""
    values = defaultdict(list)
    for (length, _), value in _placed(run, metric):
        values[length].append(value)
    return {length: _mean(values[length], metric) for length in sorted(values)}


def by_depth(run: Run, metric: Metric) -> tuple[list[int], list[float], np.ndarray]:
    """Returns lengths, depths, and the mean score f64[depths, lengths] of each pair; NaN where no sample is."""
    values = defaultdict(list)
    for place, value in _placed(run, metric):
        if place[1] is not None:
            values[place].append(value)
    lengths, depths = (sorted({place[i] for place in values}) for i in (0, 1))
    means = [[np.mean(values.get((length, depth), [np.nan])) for length in lengths] for depth in depths]
    return lengths, depths, np.asarray(means)


def _placed(run: Run, metric: Metric) -> list[tuple[tuple[int, float | None], float]]:
    places = run.scores.places.get(metric[0], {})
    return [(places[name], value) for name, value in run.scores.samples.get(metric, {}).items() if name in places]


def _mean(values: list[float], metric: Metric) -> Mean:
    mean = float(np.mean(values))
    half = 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    ends = mean, mean - half, mean + half
    return Mean(*map(math.exp, ends)) if metric[1] == PERPLEXITY else Mean(*ends)
