"""Scores of a model on tasks of lm-evaluation-harness, whole and sample by sample, and the files that hold them."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from icejax.checks.errors import InputError
from icejax.files import private

Metric = tuple[str, str]  # a task, and a metric with its filter, as in ("gsm8k", "exact_match,strict-match")
RESULTS = "results.json"


@dataclass(frozen=True)
class Scores:
    """The scores of one model with one cache.

    Attributes:
        results: the harness's results, with its version, the tasks' options and the number of samples.
        totals: the harness's score of each metric.
        errors: its standard error; a metric without one is left out.
        samples: scores of the single samples by the sample's name, of metrics that have one number per sample. Two samples
            with the same name have the same question and prompt.
        higher_is_better: whether a higher score of each metric is better; None if the task does not say.
        places: for a task whose samples name their length, the length in tokens and the depth in percent (None: it has none) of
            each sample, by its name.
    """

    results: dict[str, Any]
    totals: dict[Metric, float]
    errors: dict[Metric, float]
    higher_is_better: dict[Metric, bool | None]
    samples: dict[Metric, dict[str, float]]
    places: dict[str, dict[str, tuple[int, float | None]]]

    @classmethod
    def of(cls, results: dict[str, Any]) -> Scores:
        """Returns the scores in the results of `lm_eval.simple_evaluate` with log_samples."""
        totals, errors = _totals(results)
        said = results.get("higher_is_better", {})
        higher = {(task, name): said.get(task, {}).get(name.partition(",")[0]) for task, name in totals}
        return cls(results, totals, errors, higher, *_by_sample(results["samples"]))

    @classmethod
    def read(cls, folder: Path) -> Scores:
        """Returns the scores that `save` wrote.

        Raises:
            InputError: the folder has no scores, or they are damaged.
        """
        try:
            [results] = _read(folder / RESULTS)
            names = results["n-samples"]
            return cls.of(results | dict(samples={name: _read(folder / _file(name)) for name in names}))
        except FileNotFoundError as error:
            missing = Path(error.filename).name
            raise InputError(f"{folder} has no {missing}: expected a folder that a finished icejax evaluate wrote") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{folder} has scores that cannot be read ({error}): run icejax evaluate again") from None

    def is_mean(self, metric: Metric) -> bool:
        """Returns whether a score is the mean of its samples' values; lm-eval's `perplexity`, for one, is exp(-mean)."""
        values = self.samples.get(metric, {}).values()
        return bool(values) and math.isclose(self.totals[metric], sum(values) / len(values), rel_tol=1e-9, abs_tol=1e-12)

    def save(self, folder: Path) -> None:
        """Writes `results.json` and a `samples_TASK.jsonl` for each task, which only the user may read."""
        private.make_folder(folder)
        parts = {_file(task): rows for task, rows in self.results["samples"].items()}
        parts[RESULTS] = [{key: value for key, value in self.results.items() if key != "samples"}]
        for name, rows in parts.items():
            with private.new_file(folder / name) as file:
                file.write("".join(json.dumps(row, default=str) + "\n" for row in rows).encode())


def _file(task: str) -> str:
    return f"samples_{task.replace('/', '_')}.jsonl"


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_bytes().splitlines()]


def _totals(results: dict[str, Any]) -> tuple[dict[Metric, float], dict[Metric, float]]:
    totals, errors = {}, {}
    for task, row in results["results"].items():
        for name, value in row.items():
            if not isinstance(value, Real):
                continue
            metric, comma, filter_name = name.partition(",")
            if comma and metric.endswith("_stderr"):
                errors[task, f"{metric.removesuffix('_stderr')},{filter_name}"] = float(value)
            elif comma:
                totals[task, name] = float(value)
    return totals, errors


def _by_sample(samples: dict[str, list[dict[str, Any]]]) -> tuple[dict[Metric, dict[str, float]], dict[str, dict]]:
    """Returns the scores of the samples by metric and name, and the places of samples that have one."""
    values: dict[Metric, dict[str, float]] = defaultdict(dict)
    places: dict[str, dict[str, tuple[int, float | None]]] = defaultdict(dict)
    for task, rows in samples.items():
        for row in rows:
            name = f"{row['doc_id']} {row['doc_hash']} {row['prompt_hash']}"
            for metric in row["metrics"]:
                if isinstance(row[metric], Real):
                    values[task, f"{metric},{row['filter']}"][name] = float(row[metric])
            if isinstance(row["doc"], dict) and isinstance(row["doc"].get("length"), int):
                places[task][name] = row["doc"]["length"], row["doc"].get("depth")
    return dict(values), dict(places)
