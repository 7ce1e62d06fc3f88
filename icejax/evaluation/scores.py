"""Scores of a model on tasks of lm-evaluation-harness, whole and sample by sample, and the files that hold them."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from icejax.files import private

Metric = tuple[str, str]  # a task, and a metric with its filter, as in ("gsm8k", "exact_match,strict-match")


@dataclass(frozen=True)
class Scores:
    """The scores of one model with one cache.

    Attributes:
        results: the harness's results, with its version, the tasks' options and the number of samples.
        totals: the harness's score of each metric.
        errors: its standard error; a metric without one is left out.
        samples: scores of the single samples, in their order, of metrics that have one number per sample.
    """

    results: dict[str, Any]
    totals: dict[Metric, float]
    errors: dict[Metric, float]
    samples: dict[Metric, list[float]]

    @classmethod
    def of(cls, results: dict[str, Any]) -> Scores:
        """Returns the scores in the results of `lm_eval.simple_evaluate` with log_samples."""
        return cls(results, *_totals(results), _by_sample(results["samples"]))

    def save(self, folder: Path) -> None:
        """Writes `results.json` and a `samples_TASK.jsonl` for each task, which only the user may read."""
        private.make_folder(folder)
        parts = {"results.json": [{key: value for key, value in self.results.items() if key != "samples"}]}
        parts |= {f"samples_{task.replace('/', '_')}.jsonl": rows for task, rows in self.results["samples"].items()}
        for name, rows in parts.items():
            with private.new_file(folder / name) as file:
                file.write("".join(json.dumps(row, default=str) + "\n" for row in rows).encode())


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


def _by_sample(samples: dict[str, list[dict[str, Any]]]) -> dict[Metric, list[float]]:
    values: dict[Metric, dict[int, float]] = defaultdict(dict)
    for task, rows in samples.items():
        for row in rows:
            for metric in row["metrics"]:
                if isinstance(row[metric], Real):
                    values[task, f"{metric},{row['filter']}"][row["doc_id"]] = float(row[metric])
    return {metric: [by_sample[i] for i in sorted(by_sample)] for metric, by_sample in values.items()}
