"""The Markdown page of tables of `bench.compare`, made from its rows alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from bench.compare.cells import PROTOCOLS
from bench.compare.rows import FIRST
from bench.markdown import NONE, table

START = """# The tables of a comparison

`python -m bench.compare` writes this page. Right answers and errors: first for the dense question, then for the sparse one.
Attended tokens, bytes on the device and bytes moved are means of both. Slashes separate budgets.
"""
AHEAD = """The smallest error of any other policy, oracles included, divided by ours: the range over tasks and forms of
question. `tolerant` and `omnikv` are left out, because they do not keep to the budget.
"""
OURS = ("clustered", "coded")
LOOSE = ("full", "tolerant", "omnikv")
MANY = ("topk", "quest")  # where these have run, all policies have


def rendered(rows: list[dict]) -> str:
    """Returns the page in Markdown: a table per model, length and task, then one of all models per length and budget."""
    by_cell: dict[tuple, list[dict]] = defaultdict(list)
    for row in rows:
        by_cell[row["model"], row["length"], row["task"]].append(row)
    sections = [START, *_ahead(rows)]
    for (model, length, task), cell_rows in sorted(by_cell.items(), key=lambda item: (item[0][0] != "bundled", *item[0])):
        questions = " or ".join(str(n) for n in sorted({row["questions"] for row in cell_rows}))
        title = f"## {model}, {task}, {length:,} tokens, {questions} questions\n"
        sections.append("\n".join([title, *_cell(cell_rows), *_options(cell_rows), ""]))
    for length in sorted({row["length"] for row in rows}):
        sections += _models([row for row in rows if row["length"] == length], length)
    return "\n".join(sections)


def _budgets(rows: Iterable[dict]) -> list[str]:
    """Returns the budgets as given on the command line, smallest first."""
    return [budget for _, budget in sorted({(row["tokens"], row["budget"]) for row in rows if row["tokens"] is not None})]


def _policies(rows: Iterable[dict], budget: str) -> list[tuple[str, list[dict]]]:
    """Returns the rows of each policy: oracles first, then by answers and error at the budget `at`."""
    by_policy: dict[str, list[dict]] = defaultdict(list)
    for row in rows:
        by_policy[row["policy"]].append(row)

    def order(item: tuple[str, list[dict]]) -> tuple:
        at_budget = [row for row in item[1] if row["budget"] in (budget, "all")]
        if item[0] in FIRST or not at_budget:
            return (not at_budget, FIRST.index(item[0]) if item[0] in FIRST else len(FIRST))
        return (False, len(FIRST), -round(_mean(at_budget, "exact"), 4), _mean(at_budget, "error"))

    return sorted(by_policy.items(), key=order)


def _ahead(rows: list[dict]) -> Iterator[str]:
    """Yields a table per model, length and budget: the best other policy's error over that of ours."""
    cells: dict[tuple, dict[tuple, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    budgets = _budgets(rows)
    for row in rows:
        if row["budget"] in budgets and ":" not in row["policy"] and row["policy"] not in LOOSE:
            group = row["model"] != "bundled", row["model"], row["length"], budgets.index(row["budget"])
            cells[group][row["task"], row["protocol"]][row["policy"]] = row["error"]
    lines = []
    for (_, model, length, budget), by_question in sorted(cells.items()):
        complete = [errors for errors in by_question.values() if errors.keys() >= {*OURS, *MANY}]
        best_others = [min((error, name) for name, error in errors.items() if name not in OURS) for errors in complete]
        ratios = [[best / errors[name] for errors, (best, _) in zip(complete, best_others, strict=True)] for name in OURS]
        if complete:
            ranges = (f"{min(values):.1f} to {max(values):.1f}" for values in ratios)
            names = ", ".join(f"`{name}`" for name in sorted({name for _, name in best_others}))
            lines.append([model, f"{length:,}", budgets[budget], *ranges, names])
    if lines:
        heads = ["", "tokens", "budget", *(f"over `{name}`'s" for name in OURS), "best other policy"]
        yield "\n".join(["## The best of all others\n", AHEAD, *table(heads, lines), ""])


def _cell(rows: list[dict]) -> Iterator[str]:
    budgets = _budgets(rows)
    heads = [
        "",
        *(head for budget in budgets for head in (f"{budget}: right", "error")),
        "attended",
        "device, MiB",
        "moved, KiB",
    ]
    lines = []
    for name, policy_rows in _policies(rows, budgets[len(budgets) // 2] if budgets else "all"):
        line = [f"`{name}`"]
        for budget in budgets:
            protocol_rows = _both(policy_rows, budget) or _both(policy_rows, "all")
            line += [
                ", ".join(f"{row['exact']:.0%}" for row in protocol_rows),
                ", ".join(f"{row['error']:.3f}" for row in protocol_rows),
            ]
        rows_by_budget = [protocol_rows for budget in ("all", *budgets) if (protocol_rows := _both(policy_rows, budget))]
        for column, unit, form in (
            ("attended", 1, "{:.0f}"),
            ("device_bytes", 2**20, "{:.1f}"),
            ("moved_bytes", 2**10, "{:.0f}"),
        ):
            texts = [form.format(_mean(protocol_rows, column) / unit) for protocol_rows in rows_by_budget]
            line.append(texts[0] if len(set(texts)) == 1 else " / ".join(texts))
        lines.append(line)
    yield from table(heads, lines)


def _both(rows: list[dict], budget: str) -> list[dict]:
    return [row for protocol in PROTOCOLS for row in rows if (row["budget"], row["protocol"]) == (budget, protocol)]


def _mean(rows: list[dict], column: str) -> float:
    return float(np.mean([row[column] for row in rows]))


def _options(rows: list[dict]) -> Iterator[str]:
    """Yields a line of the options that were found by search."""
    options_by_row = {(row["policy"], row["tokens"], row["budget"]): row["options"] for row in rows if row["options"]}
    texts = (
        f"`{policy}` at {budget} {', '.join(f'{name}={value:.4g}' for name, value in options.items())}"
        for (policy, _, budget), options in sorted(options_by_row.items())
    )
    if options_by_row:
        yield f"\nOptions found by a search on a text outside the tables: {'; '.join(texts)}."


def _models(rows: list[dict], length: int) -> Iterator[str]:
    """Yields a table of all models for each budget that at least two models have."""
    tasks = sorted({row["task"] for row in rows})
    for budget in _budgets(rows):
        budget_rows = [row for row in rows if row["budget"] in (budget, "all")]
        models = sorted(
            {row["model"] for row in budget_rows if row["budget"] == budget}, key=lambda name: (name != "bundled", name)
        )
        if len(models) < 2:
            continue
        lines = []
        for name, policy_rows in _policies(budget_rows, budget):
            line = [f"`{name}`"]
            for model in models:
                by_protocol = [
                    [row for row in policy_rows if (row["model"], row["protocol"]) == (model, protocol)]
                    for protocol in PROTOCOLS
                ]
                line.append(", ".join(_answers(protocol_rows, tasks) for protocol_rows in by_protocol if protocol_rows))
                line.append(", ".join(f"{_mean(protocol_rows, 'error'):.3f}" for protocol_rows in by_protocol if protocol_rows))
            lines.append(line)
        heads = ["", *(head for model in models for head in (f"{model}: right, %", "error"))]
        caption = (
            f"Answers to {', '.join(tasks)}, a dash where a task has not run. The error is the mean over those that have.\n"
        )
        yield "\n".join([f"## All models, {length:,} tokens, budget {budget}\n", caption, *table(heads, lines), ""])


def _answers(rows: list[dict], tasks: list[str]) -> str:
    percents = {row["task"]: f"{100 * row['exact']:.0f}" for row in rows}
    return " ".join(percents.get(task, NONE) for task in tasks)
