"""Finished runs of `icejax evaluate`, read from their folders, and their scores as rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icejax.checks.errors import InputError
from icejax.evaluation.paired import difference
from icejax.evaluation.report.about import ABOUT
from icejax.evaluation.scores import RESULTS, Metric, Scores

TOOK = ("prompt_tokens", "new_tokens", "device_bytes", "host_bytes", "seconds_per_token", "tokens_per_s")
# Names in the record of `about` whose values are equal for two runs that differ in the cache alone.
SAME = ("model", "weights", "quantize", "dtype", "context_length", "chat", "system")


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, the record of `about`, and its scores."""

    folder: Path
    about: dict[str, Any]
    scores: Scores

    @property
    def label(self) -> str:
        """The cache, with its budget."""
        return self.about["cache"] + ("" if self.about["budget"] is None else f" {self.about['budget']}")


def read(folders: Iterable[Path]) -> list[Run]:
    """Returns the runs in folders, by model, cache and budget; a folder without scores stands for those in it that have some.

    Raises:
        InputError: a folder has no run, or one that cannot be read.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        inside = [folder] if (folder / RESULTS).is_file() else sorted(file.parent for file in folder.glob(f"*/{RESULTS}"))
        if not inside:
            raise InputError(f"{folder} has no {RESULTS}, nor has a folder in it: expected one that icejax evaluate wrote")
        found |= dict.fromkeys(inside)
    return sorted(map(_read, found), key=lambda run: (run.about["model"], run.about["cache"], run.about["budget"] or 0))


def _read(folder: Path) -> Run:
    scores = Scores.read(folder)
    about = scores.results.get(ABOUT)
    if not isinstance(about, dict) or not {"model", "cache", "budget", "tasks", "versions", "device"} <= about.keys():
        raise InputError(f"{folder}/{RESULTS} does not say which cache it scored: run icejax evaluate again")
    return Run(folder, about, scores)


def rows(runs: list[Run], against: str | Path) -> list[dict[str, Any]]:
    """Returns a row for each score, as JSON.

    A row has the difference from another run over the samples that both have, where the score is their mean.

    Args:
        against: the folder of the other run, or the name of its cache. A name means the first run with equal values of `SAME`,
            and a run in the same parent folder comes first.
    """
    metrics = dict.fromkeys(metric for run in runs for metric in run.scores.totals)
    return [_row(run, metric, _other(run, runs, against)) for metric in metrics for run in runs if metric in run.scores.totals]


def _other(run: Run, runs: list[Run], against: str | Path) -> Run | None:
    if isinstance(against, Path):
        others = [other for other in runs if other.folder == against]
    else:
        others = [other for other in runs if other.about["cache"] == against and _same(other) == _same(run)]
        others.sort(key=lambda other: other.folder.parent != run.folder.parent)
    return others[0] if others and others[0] is not run else None


def _same(run: Run) -> list[Any]:
    return [run.about.get(name) for name in SAME]


def _row(run: Run, metric: Metric, other: Run | None) -> dict[str, Any]:
    about, samples = run.about, run.scores.samples.get(metric, {})
    took = about["tasks"].get(metric[0], {})
    row = dict(
        model=about["model"],
        cache=about["cache"],
        budget=about["budget"],
        task=metric[0],
        metric=metric[1].removesuffix(",none"),
        score=run.scores.totals[metric],
        stderr=run.scores.errors.get(metric),
        higher_is_better=run.scores.higher_is_better[metric],
        samples=len(samples),
    )
    theirs = {} if other is None else other.scores.samples.get(metric, {})
    common = [name for name in samples if name in theirs]
    if common and run.scores.is_mean(metric) and other.scores.is_mean(metric):
        mean, low, high = difference([samples[name] for name in common], [theirs[name] for name in common])
        row |= dict(against=other.label, pairs=len(common), difference=mean, low=low, high=high)
    return row | {name: took.get(name) for name in TOOK} | dict(
        device=about["device"], versions=about["versions"], folder=str(run.folder)
    )  # fmt: skip
