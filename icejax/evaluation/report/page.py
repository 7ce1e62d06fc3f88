"""The report as one HTML page, which asks no host for anything, and as JSON lines."""

from __future__ import annotations

import base64
import json
from collections import Counter
from pathlib import Path
from typing import Any

import jinja2

from icejax.evaluation.report import plots, table
from icejax.evaluation.report.places import PERPLEXITY, by_length
from icejax.evaluation.report.runs import Run, rows
from icejax.evaluation.scores import Metric
from icejax.files import private

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>icejax evaluate: {{ models|join(", ") }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1em 0; }
th, td { padding: 0.25em 0.8em; border-bottom: 1px solid #ddd; text-align: left; white-space: nowrap; }
th { border-bottom: 2px solid #888; }
td.worse { color: #a40000; } td.better { color: #006b1b; }
img { max-width: 100%; } .wide { overflow-x: auto; } small { color: #666; }
</style>
</head>
<body>
<h1>{{ models|join(", ") }}</h1>
<p>A difference is the mean over the samples that both caches answered, with its 95% interval by the paired bootstrap. Where
the interval leaves out 0, it is green if the cache is better and red if it is worse. Bytes are reserved for one row. Time per
token is that of a row among those that decode together.</p>
{% for task in tasks %}
<h2>{{ task.name }}</h2>
<div class="wide"><table>
<tr>{% for head in heads %}<th>{{ head }}</th>{% endfor %}</tr>
{% for row in task.rows %}<tr>{% for cell in row.cells %}
<td{% if loop.index0 == row.coloured %} class="{{ row.side }}"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% for figure in task.figures %}<h3>{{ figure.title }}</h3>
<p><img alt="{{ figure.title }}: the values are in the tables" src="data:image/svg+xml;base64,{{ figure.data }}"></p>
{% endfor %}
{% for part in task.lengths %}<h3>{{ part.title }}</h3>
<div class="wide"><table><tr>{% for head in part.heads %}<th>{{ head }}</th>{% endfor %}</tr>
{% for line in part.lines %}<tr>{% for cell in line %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>{% endfor %}
{% endfor %}
<h2>Runs</h2>
<div class="wide"><table>
<tr><th>folder</th><th>model</th><th>dtype</th><th>quantize</th><th>cache</th><th>context</th><th>batch</th><th>chat</th>
<th>device</th><th>versions</th></tr>
{% for run in runs %}<tr>{% for cell in run %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
</body>
</html>
"""


def write(folder: Path, runs: list[Run], against: str | Path) -> list[dict[str, Any]]:
    """Writes `report.jsonl` and `report.html` into a folder, which only the user may read; returns its rows, as `rows`."""
    found = rows(runs, against)
    private.make_folder(folder)
    parts = {"report.jsonl": "".join(json.dumps(row) + "\n" for row in found), "report.html": html(runs, found)}
    for name, text in parts.items():
        with private.new_file(folder / name) as file:
            file.write(text.encode())
    return found


def html(runs: list[Run], found: list[dict[str, Any]]) -> str:
    """Returns the page of some runs and their rows."""
    names = list(dict.fromkeys(row["task"] for row in found))
    return (
        jinja2.Environment(autoescape=True)
        .from_string(PAGE)
        .render(
            models=list(dict.fromkeys(run.about["model"] for run in runs)),
            heads=table.HEADS[1:],
            tasks=[_task(name, runs, [row for row in found if row["task"] == name]) for name in names],
            runs=[_run(run) for run in runs],
        )
    )


def _task(name: str, runs: list[Run], found: list[dict[str, Any]]) -> dict[str, Any]:
    metrics = [metric for metric in dict.fromkeys(key for run in runs for key in run.scores.samples) if metric[0] == name]
    named = _named(runs)
    drawn = {metric: plots.drawn(metric, named) for metric in metrics}
    long = [metric for metric in metrics if drawn[metric]["lengths"]]
    figures = [("Scores against cost", plots.costs(found))]
    if long:
        figures.append(("By length", plots.lengths(named, long)))
    figures += [
        (f"{metric[1].removesuffix(',none')} by depth and length", plots.heat(drawn[metric]["heat"], metric))
        for metric in metrics
        if drawn[metric]["heat"]
    ]
    return dict(
        name=name,
        rows=[_cells(row) for row in found],
        figures=[dict(title=title, data=base64.b64encode(svg.encode()).decode()) for title, svg in figures],
        lengths=[_lengths(metric, drawn[metric]["lengths"]) for metric in long],
    )


def _named(runs: list[Run]) -> list[tuple[str, Run]]:
    """Returns the runs by their caches; with the folder if two have the same, with the model if the runs are of several."""
    several = len({run.about["model"] for run in runs}) > 1
    labels = [f"{run.about['model']}: {run.label}" if several else run.label for run in runs]
    counts = Counter(labels)
    return [(f"{label} ({run.folder})" if counts[label] > 1 else label, run) for label, run in zip(labels, runs, strict=True)]


def _cells(row: dict[str, Any]) -> dict[str, Any]:
    side = ""
    if row["higher_is_better"] is not None and "difference" in row and (row["low"] > 0 or row["high"] < 0):
        side = "better" if (row["low"] > 0) == row["higher_is_better"] else "worse"
    return dict(cells=table.cells(row)[1:], side=side, coloured=table.HEADS.index("difference") - 1)


def _lengths(metric: Metric, runs: list[tuple[str, Run]]) -> dict[str, Any]:
    """Returns the table of a metric by length: a line for each length, a column for each run."""
    title = "perplexity" if metric[1] == PERPLEXITY else metric[1].removesuffix(",none")
    columns = [by_length(run, metric) for _, run in runs]
    found = sorted({length for column in columns for length in column})
    cells = [[f"{column[length].value:.4g}" if length in column else "" for column in columns] for length in found]
    lines = [[str(length), *values] for length, values in zip(found, cells, strict=True)]
    return dict(title=f"{title} by length", heads=["length (tokens)", *(name for name, _ in runs)], lines=lines)


def _run(run: Run) -> list[str]:
    about = run.about
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    names = ("dtype", "quantize", "context_length", "batch_size", "chat")
    dtype, quantize, *sizes = ("" if about.get(name) is None else str(about[name]) for name in names)
    return [str(run.folder), about["model"], dtype, quantize, run.label, *sizes, about["device"], versions]
