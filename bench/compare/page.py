"""The tables of a comparison as a page, made of its rows alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from bench.compare.cells import PROTOCOLS
from bench.compare.rows import FIRST
from bench.markdown import NONE, table

START = """# The tables of a comparison

Written by `python -m bench.compare`. Right answers and the error are given with a dense question, then with a sparse one.
Attended tokens, bytes on the device and bytes moved are means of both. Slashes stand between budgets.
"""
AHEAD = """The least error of another policy, oracles included, over that of ours: least and most of all tasks and forms of
question. Without `tolerant` and `omnikv`, which do not keep to the budget.
"""
OURS = ("clustered", "coded")
LOOSE = ("full", "tolerant", "omnikv")
MANY = ("topk", "quest")  # where they have run, so have all


def rendered(rows: list[dict]) -> str:
    """Returns the page in Markdown: a table per model, length and task, then one of all models per length and budget."""
    by: dict[tuple, list[dict]] = defaultdict(list)
    for row in rows:
        by[row["model"], row["length"], row["task"]].append(row)
    sections = [START, *_ahead(rows)]
    for (model, length, task), of in sorted(by.items(), key=lambda item: (item[0][0] != "bundled", *item[0])):
        questions = " or ".join(str(n) for n in sorted({row["questions"] for row in of}))
        title = f"## {model}, {task}, {length:,} tokens, {questions} questions\n"
        sections.append("\n".join([title, *_cell(of), *_options(of), ""]))
    for length in sorted({row["length"] for row in rows}):
        sections += _models([row for row in rows if row["length"] == length], length)
    return "\n".join(sections)


def _budgets(rows: Iterable[dict]) -> list[str]:
    """Returns the budgets as they were asked for, smallest first."""
    return [asked for _, asked in sorted({(row["tokens"], row["budget"]) for row in rows if row["tokens"] is not None})]


def _policies(rows: Iterable[dict], at: str) -> list[tuple[str, list[dict]]]:
    """Returns the rows of each policy: oracles, then by their answers at one budget and their error there."""
    found: dict[str, list[dict]] = defaultdict(list)
    for row in rows:
        found[row["policy"]].append(row)

    def order(item: tuple[str, list[dict]]) -> tuple:
        of = [row for row in item[1] if row["budget"] in (at, "all")]
        if item[0] in FIRST or not of:
            return (not of, FIRST.index(item[0]) if item[0] in FIRST else len(FIRST))
        return (False, len(FIRST), -round(_mean(of, "exact"), 4), _mean(of, "error"))

    return sorted(found.items(), key=order)


def _ahead(rows: list[dict]) -> Iterator[str]:
    """Yields a table of how far ours are ahead, per model, length and budget."""
    cells: dict[tuple, dict[tuple, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    budgets = _budgets(rows)
    for row in rows:
        if row["budget"] in budgets and ":" not in row["policy"] and row["policy"] not in LOOSE:
            where = row["model"] != "bundled", row["model"], row["length"], budgets.index(row["budget"])
            cells[where][row["task"], row["protocol"]][row["policy"]] = row["error"]
    lines = []
    for (_, model, length, budget), of in sorted(cells.items()):
        whole = [errors for errors in of.values() if errors.keys() >= {*OURS, *MANY}]
        others = [min((error, name) for name, error in errors.items() if name not in OURS) for errors in whole]
        times = [[best / errors[name] for errors, (best, _) in zip(whole, others, strict=True)] for name in OURS]
        if whole:
            ranges = (f"{min(found):.1f} to {max(found):.1f}" for found in times)
            names = ", ".join(f"`{name}`" for name in sorted({name for _, name in others}))
            lines.append([model, f"{length:,}", budgets[budget], *ranges, names])
    if lines:
        heads = ["", "tokens", "budget", *(f"over `{name}`'s" for name in OURS), "of which it is"]
        yield "\n".join(["## The best of all others\n", AHEAD, *table(heads, lines), ""])


def _cell(rows: list[dict]) -> Iterator[str]:
    budgets = _budgets(rows)
    heads = ["", *(head for asked in budgets for head in (f"{asked}: right", "error")), "attended", "device, MiB", "moved, KiB"]
    lines = []
    for name, of in _policies(rows, budgets[len(budgets) // 2] if budgets else "all"):
        line = [f"`{name}`"]
        for asked in budgets:
            both = _both(of, asked) or _both(of, "all")
            line += [", ".join(f"{row['exact']:.0%}" for row in both), ", ".join(f"{row['error']:.3f}" for row in both)]
        each = [both for asked in ("all", *budgets) if (both := _both(of, asked))]
        for column, unit, form in (
            ("attended", 1, "{:.0f}"),
            ("device_bytes", 2**20, "{:.1f}"),
            ("moved_bytes", 2**10, "{:.0f}"),
        ):
            texts = [form.format(_mean(both, column) / unit) for both in each]
            line.append(texts[0] if len(set(texts)) == 1 else " / ".join(texts))
        lines.append(line)
    yield from table(heads, lines)


def _both(rows: list[dict], asked: str) -> list[dict]:
    return [row for protocol in PROTOCOLS for row in rows if (row["budget"], row["protocol"]) == (asked, protocol)]


def _mean(rows: list[dict], column: str) -> float:
    return float(np.mean([row[column] for row in rows]))


def _options(rows: list[dict]) -> Iterator[str]:
    """Yields which options were searched for."""
    found = {(row["policy"], row["tokens"], row["budget"]): row["options"] for row in rows if row["options"]}
    texts = (
        f"`{policy}` at {asked} {', '.join(f'{name}={value:.4g}' for name, value in options.items())}"
        for (policy, _, asked), options in sorted(found.items())
    )
    if found:
        yield f"\nSearched for on a text of no table: {'; '.join(texts)}."


def _models(rows: list[dict], length: int) -> Iterator[str]:
    """Yields a table of all models for each budget that several have."""
    tasks = sorted({row["task"] for row in rows})
    for asked in _budgets(rows):
        found = [row for row in rows if row["budget"] in (asked, "all")]
        models = sorted({row["model"] for row in found if row["budget"] == asked}, key=lambda name: (name != "bundled", name))
        if len(models) < 2:
            continue
        lines = []
        for name, of in _policies(found, asked):
            line = [f"`{name}`"]
            for model in models:
                both = [[row for row in of if (row["model"], row["protocol"]) == (model, each)] for each in PROTOCOLS]
                line.append(", ".join(_answers(there, tasks) for there in both if there))
                line.append(", ".join(f"{_mean(there, 'error'):.3f}" for there in both if there))
            lines.append(line)
        heads = ["", *(head for model in models for head in (f"{model}: right, %", "error"))]
        about = f"Answers to {', '.join(tasks)}, a dash where a task has not run. The error is the mean over those that have.\n"
        yield "\n".join([f"## All models, {length:,} tokens, budget {asked}\n", about, *table(heads, lines), ""])


def _answers(rows: list[dict], tasks: list[str]) -> str:
    found = {row["task"]: f"{100 * row['exact']:.0f}" for row in rows}
    return " ".join(found.get(task, NONE) for task in tasks)
