"""The page of `bench.evaluation`: tables of the rows, and the plot of sessions by length."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.compare.rows import write as write_file
from bench.markdown import table
from icejax.checks.errors import InputError
from icejax.evaluation.tasks.generation import SCORE

LINES, PAGE, PICTURE = "evaluation.jsonl", "evaluation-tables.md", "evaluation.png"
SESSIONS = 3  # the question whose runs are named by length
TITLES = {
    1: "Programs: weights, batches and caches",
    SESSIONS: "Questions one after another in a session",
    5: "Tasks, by cache",
}
START = """# Caches on evaluation tasks

```
python -m bench.evaluation --data DATA --out DIR         # --question 1, 3 or 5; --dry-run tells what is left
python -m bench.evaluation --page --out DIR              # this page and its picture, from evaluation.jsonl and the runs in DIR
```

[evaluation.md](evaluation.md) says what they mean. Tasks and scores are those of
[icejax evaluate](../../docs/how-to/evaluate.md). Answers are greedy. Numbers in brackets are a 95% interval: of a share
Wilson's, of another mean 1.96 standard errors, and of a difference the paired bootstrap over the samples that both runs
answered. Bytes are reserved for a row. Tokens per second are those of a row among the rows that decode together.
"""
NOTES = {
    SESSIONS: """Each text with its first question is prefilled once, exactly, and every cache is built of it. Times are of
the last question, which each cache reads itself.

![Difference from full by length](evaluation.png)
""",
    5: """Each prompt is prefilled once, exactly, and every cache is built of it, so these runs have no times. Bytes are
those of a batch that has room for the longest prompts of its kind.
""",
}


def write(new: list[dict[str, Any]], folder: Path) -> None:
    """Writes page and picture of the rows in the folder's file and of new ones, which replace those of the same run.

    Raises:
        InputError: no rows are given and the file has none; its rows are of another model; or one of them has more samples than
            the new row in its place, or a difference from another cache where the new row has none.
    """
    path = folder / LINES
    old = {_key(row): row for row in map(json.loads, path.read_text().splitlines())} if path.is_file() else {}
    if not new and not old:
        raise InputError(f"--out has no finished run, and {folder} no {LINES}: expected one of them")
    for row in new:
        _check_replaces(row, old.get(_key(row)), path)
        models = {x["model"] for x in (row, *old.values()) if x["weights"] == "fp32"}
        if len(models) > 1:
            raise InputError(f"{path} and --out have runs of {' and '.join(sorted(models))}: give another --results")
    rows = [*(old | {_key(row): row for row in new}).values()]
    write_file(path, "".join(json.dumps(row) + "\n" for row in rows))
    write_file(folder / PAGE, "\n".join([START, *_sections(rows)]))
    sessions = [row for row in rows if row["question"] == SESSIONS and "difference" in row]
    if sessions:
        draw(sessions, folder / PICTURE)


def _key(row: dict[str, Any]) -> tuple:
    return tuple(row[name] for name in ("run", "model", "cache", "budget", "task", "metric"))


def _check_replaces(new: dict[str, Any], old: dict[str, Any] | None, path: Path) -> None:
    """Raises InputError if a new row says less than the one in its place."""
    if old is None:
        return
    name = f"{new['run']} with {new['cache']}"
    if new["samples"] < old["samples"]:
        raise InputError(f"{name} has {new['samples']} samples in --out and {old['samples']} in {path}: run it with as many")
    if "difference" in old and "difference" not in new:
        raise InputError(
            f"{name} has a difference from {old['against']} in {path} and none in --out: run {old['against']} there too"
        )


def _sections(found: list[dict[str, Any]]) -> Iterator[str]:
    for question, title in TITLES.items():
        by_table = defaultdict(list)
        for row in found:
            if row["question"] == question and not _is_part(row, found):
                by_table[_title(row)].append(row)
        if by_table:
            yield "\n".join([f"## {title}\n", *([NOTES[question]] if question in NOTES else [])])
        for name, rows in by_table.items():
            yield "\n".join([f"### {name}\n", *_table(rows), ""])


def _is_part(row: dict[str, Any], found: list[dict[str, Any]]) -> bool:
    """Whether another row has this one's samples too, beside those of other tasks."""
    return row["metric"] == SCORE and any(
        (other["task"], other["metric"], other["cache"], other["budget"]) == (row["run"], SCORE, row["cache"], row["budget"])
        for other in found
        if other is not row
    )


def _title(row: dict[str, Any]) -> str:
    name = row["run"].removesuffix(f"-{length_of(row)}") if row["question"] == 5 else row["task"]
    return f"{name}, {row['metric'].replace(',', ', ')}"


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    timed, forms = any(row["tokens_per_s"] for row in rows), {(row["weights"], row["batch"]) for row in rows}
    weights = rows[0]["question"] == 1 and len(forms) > 1
    heads = ["cache", *(["weights", "batch"] if weights else []), "score", "n", "difference from full", "pairs"]
    if has_length := length_of(rows[0]) is not None:
        heads.insert(0, "tokens")
    lines = []
    for row in sorted(rows, key=length_of) if has_length else rows:
        line = [f"{length_of(row):,}"] if has_length else []
        line += [f"`{row['cache']}`" + ("" if row["budget"] is None else f" {row['budget']}")]
        line += [row["weights"], row["batch"]] if weights else []
        line += [_with_ends(row["score"], row["low"], row["high"], ".3f"), row["samples"]]
        difference = row.get("difference")
        ends = [row.get(f"difference_{end}") for end in ("low", "high")]
        line += [None if difference is None else _with_ends(difference, *ends, "+.3f"), row.get("pairs")]
        line += [None if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.1f}"] if timed else []
        lines.append([*line, *(f"{row[name] / 2**20:.1f}" for name in ("device_bytes", "host_bytes"))])
    yield from table([*heads, *(["tokens/s"] if timed else []), "device MiB", "host MiB"], lines)


def _with_ends(value: float, low: float | None, high: float | None, form: str) -> str:
    return f"{value:{form}}" if low is None else f"{value:{form}} ({low:{form}} to {high:{form}})"


def length_of(row: dict[str, Any]) -> int | None:
    """Returns the length in tokens that a run's name ends in; None: it ends in none, or in a number of rows."""
    end = row["run"].rpartition("-")[2]
    return int(end) if end.isdecimal() and row["question"] != 1 else None


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws differences from full by length, a panel for each metric."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    metrics, caches = (list(dict.fromkeys(row[name] for row in rows)) for name in ("metric", "cache"))
    lengths = sorted({length_of(row) for row in rows})
    figure, [axes] = plt.subplots(1, len(metrics), figsize=(4.4 * len(metrics) + 2, 4), squeeze=False, layout="constrained")
    for panel, metric in zip(axes, metrics, strict=True):
        for number, cache in enumerate(caches):
            points = sorted((row for row in rows if (row["metric"], row["cache"]) == (metric, cache)), key=length_of)
            values = [row["difference"] for row in points]
            ends = [(row["difference"] - row["difference_low"], row["difference_high"] - row["difference"]) for row in points]
            places = [length_of(row) * 1.02 ** (number - len(caches) / 2) for row in points]  # apart, so that bars show
            errors = list(zip(*ends, strict=True))
            panel.errorbar(places, values, yerr=errors, marker="o", markersize=4, capsize=2, label=cache, color=f"C{number}")
        panel.axhline(0, color="grey", linewidth=0.8)
        panel.set(title=metric, xlabel="tokens", xscale="log")
        panel.set_xticks(lengths, [f"{length:,}" for length in lengths])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    axes[0].set(ylabel="difference from full")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    part = path.with_name(f".{path.name}.part")
    figure.savefig(part, dpi=90, format="png")
    plt.close(figure)
    part.replace(path)
