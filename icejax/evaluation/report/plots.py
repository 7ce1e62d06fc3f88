"""Plots of a report, as SVG: scores against budget, bytes and time, by length, and heat maps of depth and length."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from icejax.evaluation.report.places import PERPLEXITY, by_depth, by_length
from icejax.evaluation.report.runs import Run
from icejax.evaluation.scores import Metric

# The axes of the plots of cost: their name, and the value of a row.
COSTS: tuple[tuple[str, Callable[[dict[str, Any]], float | None]], ...] = (
    ("budget (tokens)", lambda row: row["budget"]),
    ("cache on the device (MiB)", lambda row: _mib(row["device_bytes"])),
    ("cache in host memory (MiB)", lambda row: _mib(row["host_bytes"])),
    ("ms per token", lambda row: None if row["seconds_per_token"] is None else 1000 * row["seconds_per_token"]),
)
SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "icejax", "font.size": 9}
SETTINGS |= {"axes.spines.top": False, "axes.spines.right": False}


def _mib(count: int | None) -> float | None:
    return None if count is None else count / 2**20


@matplotlib.rc_context(SETTINGS)
def costs(rows: list[dict[str, Any]]) -> str:
    """Returns the scores of one task against their cost, a line of panels for each metric.

    A cache without a budget attends to all tokens: it is a dashed line across the panel of budgets.
    """
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    caches = list(dict.fromkeys((row["model"], row["cache"]) for row in rows))
    several = len({model for model, _ in caches}) > 1
    figure = Figure(figsize=(13, 0.9 + 2.5 * len(metrics)), layout="constrained")
    grid = figure.subplots(len(metrics), len(COSTS), squeeze=False, sharey="row")
    for axes, metric in zip(grid, metrics, strict=True):
        for number, (model, cache) in enumerate(caches):
            same = [row for row in rows if (row["metric"], row["model"], row["cache"]) == (metric, model, cache)]
            style = dict(color=f"C{number % 10}", label=f"{model}: {cache}" if several else cache)
            for panel, (name, cost) in zip(axes, COSTS, strict=True):
                _line(panel, [(cost(row), row) for row in same], style, across=name.startswith("budget"))
        for panel, (name, _) in zip(axes, COSTS, strict=True):
            panel.set(xlabel=name)
            panel.grid(alpha=0.3)
        axes[0].set(ylabel=metric)
        if axes[0].get_lines() and any(row["budget"] for row in rows):
            axes[0].set_xscale("log", base=2)
            axes[0].xaxis.set_major_formatter("{x:g}")
    _legend(figure, grid[0][0], loc="outside upper center", ncols=6)
    return _svg(figure)


def _line(panel: Axes, points: list[tuple[float | None, dict[str, Any]]], style: dict[str, Any], *, across: bool) -> None:
    placed = sorted(((x, row) for x, row in points if x is not None), key=lambda point: point[0])
    for x, row in points:
        if x is None and across:
            panel.axhline(row["score"], linestyle="--", **style)
    if placed:
        scores, errors = ([row[name] or 0 for _, row in placed] for name in ("score", "stderr"))
        panel.errorbar([x for x, _ in placed], scores, yerr=errors, marker="o", capsize=2, **style)


@matplotlib.rc_context(SETTINGS)
def lengths(runs: list[tuple[str, Run]], metrics: list[Metric]) -> str:
    """Returns the scores of a task by length, a panel for each metric; `runs` are named for the legend."""
    figure = Figure(figsize=(4.5 * len(metrics) + 2.5, 3.4), layout="constrained")
    [axes] = figure.subplots(1, len(metrics), squeeze=False)
    for panel, metric in zip(axes, metrics, strict=True):
        for name, run in runs:
            means = by_length(run, metric)
            values = np.asarray([means[length] for length in means]).reshape(-1, 3)
            ends = np.abs(values[:, 1:] - values[:, :1]).T
            panel.errorbar(list(means), values[:, 0], yerr=ends, marker="o", capsize=2, label=name)
        panel.set(xlabel="length (tokens)", ylabel="perplexity" if metric[1] == PERPLEXITY else metric[1].removesuffix(",none"))
        panel.set_xscale("log", base=2)
        panel.set_xticks(sorted({length for _, run in runs for length in by_length(run, metric)}))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.grid(alpha=0.3)
    _legend(figure, axes[0], loc="outside right upper")
    return _svg(figure)


@matplotlib.rc_context(SETTINGS)
def heat(runs: list[tuple[str, Run]], metric: Metric) -> str:
    """Returns a heat map for each run: depths down, lengths across, scores from red (0) to green (1)."""
    figure = Figure(figsize=(4.2 * len(runs) + 0.8, 3.8), layout="constrained")
    [axes] = figure.subplots(1, len(runs), squeeze=False)
    for panel, (name, run) in zip(axes, runs, strict=True):
        across, down, means = by_depth(run, metric)
        image = panel.imshow(np.ma.masked_invalid(means), cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        panel.set(xticks=range(len(across)), yticks=range(len(down)), xlabel="length (tokens)", ylabel="depth (%)", title=name)
        panel.set_xticklabels(across, rotation=30)
        panel.set_yticklabels([f"{depth:g}" for depth in down])
    figure.colorbar(image, ax=list(axes), label=metric[1].removesuffix(",none"))
    return _svg(figure)


def drawn(metric: Metric, runs: list[tuple[str, Run]]) -> defaultdict[str, list[tuple[str, Run]]]:
    """Returns the runs that have samples of a metric by what can be drawn of them: `lengths`, `heat`."""
    kinds = defaultdict(list)
    for name, run in runs:
        if len(by_length(run, metric)) > 1:
            kinds["lengths"].append((name, run))
        if by_depth(run, metric)[0]:
            kinds["heat"].append((name, run))
    return kinds


def _legend(figure: Figure, axes: Axes, **place: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))  # a label once
    figure.legend(by_label.values(), by_label, frameon=False, **place)


def _svg(figure: Figure) -> str:
    with io.StringIO() as file:
        # Without these the file would name its date, its maker and their addresses.
        figure.savefig(file, format="svg", metadata=dict(Date=None, Creator=None, Format=None, Type=None))
        return file.getvalue()
