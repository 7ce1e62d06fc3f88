"""The rows of finished runs: scores with their intervals, paired differences, times and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.evaluation.runs import Run
from bench.needle.evaluate import wilson
from icejax.evaluation.paired import difference
from icejax.evaluation.report import runs as reports
from icejax.evaluation.scores import Metric, Scores
from icejax.evaluation.tasks.generation import SCORE

POOLED = f"{SCORE},none"  # the metric whose samples are put together where a run has several tasks


def of_runs(runs: Sequence[Run], out: Path) -> list[dict[str, Any]]:
    """Returns a row per finished run, task and metric, as JSON; a run of several tasks has rows of all its samples too."""
    finished = {(run.name, run.cache): (run, report) for run in runs for report in _report(run, out)}
    return [
        _row(run, report, metric, values, None if other is None else other[1])
        for run, report in finished.values()
        for other in (finished.get(run.base) if run.base != (run.name, run.cache) else None,)
        for metric, values in _samples(run, report.scores).items()
    ]


def _report(run: Run, out: Path) -> list[reports.Run]:
    folder = run.folder(out)
    return reports.read([folder]) if (folder / "results.json").is_file() else []


def _samples(run: Run, scores: Scores) -> dict[Metric, dict[str, float]]:
    """Returns the scores of the samples by metric and name."""
    found = dict(scores.samples)
    pooled = [metric for metric in found if metric[1] == POOLED]
    if len(pooled) > 1:
        found[run.name, POOLED] = {f"{task} {name}": x for task, _ in pooled for name, x in found[task, POOLED].items()}
    return found


def _row(run: Run, report: reports.Run, metric: Metric, values: dict[str, float], other: reports.Run | None) -> dict:
    about, took = report.about, report.about["tasks"].get(metric[0]) or _of_all(report.about["tasks"])
    score, low, high = interval(list(values.values()))
    row = dict(
        question=run.question,
        run=run.name,
        model=about["model"],
        weights=run.weights,
        cache=about["cache"],
        budget=about["budget"],
        batch=about["batch_size"],
        task=metric[0],
        metric=metric[1].removesuffix(",none"),
        samples=len(values),
        score=score,
        low=low,
        high=high,
    )
    theirs = {} if other is None else _samples(run, other.scores).get(metric, {})
    common = [name for name in values if name in theirs]
    if common:
        mean, *ends = difference([values[name] for name in common], [theirs[name] for name in common])
        row |= dict(against=other.label, pairs=len(common), difference=mean, difference_low=ends[0], difference_high=ends[1])
    names = ("prompt_tokens", "new_tokens", "device_bytes", "host_bytes", "tokens_per_s")
    row |= {name: took[name] for name in names} | dict(weight_bytes=about["weight_bytes"])
    return row | dict(device=about["device"], versions=about["versions"])


def _of_all(tasks: dict[str, dict]) -> dict[str, Any]:
    """Returns the cost of the answers to several tasks: the most bytes; medians of single tasks are of no other."""
    most = {name: max(took[name] for took in tasks.values()) for name in ("device_bytes", "host_bytes")}
    return dict.fromkeys(("prompt_tokens", "new_tokens", "tokens_per_s")) | most


def interval(values: list[float]) -> tuple[float, float | None, float | None]:
    """Returns the mean and its 95% interval: Wilson's of a share, else 1.96 standard errors; None of a single score."""
    mean = float(np.mean(values))
    if set(values) <= {0.0, 1.0}:
        return mean, *wilson(int(sum(values)), len(values))
    if len(values) == 1:
        return mean, None, None
    half = 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, mean - half, mean + half
