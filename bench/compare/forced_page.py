"""The page of `bench.compare --model`: means and intervals of the lines of `bench.compare.forced`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from bench import texts
from bench.compare import rows
from bench.compare.rows import FIRST
from bench.markdown import NONE, table

RESAMPLES = 2000
CODES = ("q8_0", "q4_0", "kivi")  # full caches in codes come after the oracles
OURS = ("clustered", "coded", "packed")
START = """# Cache policies on published models

```
python -m bench.compare --model smollm2-135m --out bench/results
python -m bench.compare --model gemma-3-270m --lengths 4096 --out bench/results
python -m bench.compare --model qwen2.5-coder-0.5b --lengths 4096,8192 --out bench/results
python -m bench.compare --page --out bench/results     # this page and its picture, from compare-published.jsonl
```

Each text is source of Python's standard library, with a function to be written again at its end, or prose of Python's language
reference, with one value among 16 to be found again (`bench/texts.py`). The question stands at the end of the exact prefill;
then every policy decodes the tokens of the true continuation. A number in brackets is a 95% interval: a bootstrap of 2,000
samples of texts, because the questions of a text are not independent.

![KL of the next token against bytes on the device and bytes moved](compare-published.png)

- **error**: relative L2 error of a head's attention output, mean over heads, layers and steps, and the 95th percentile. The
  first two layers do not count, because `clustered` attends to them densely.
- **KL**: of the next token from the full cache's, in units of 0.001 nats, mean over steps.
- **agrees**: share of steps whose most likely token is the full cache's.
- **answers**: continuations whose tokens are all the most likely ones: functions (their first 17 tokens), values. The first
  token comes from the exact prefill.
- **device**, **host**, **moved**: the cache on the device and in host memory, in MiB, and KiB moved per step, of a model whose
  keys and values have 16 bits. The model itself ran in fp32 on a CPU.
- A budget is the number of tokens that a KV head attends to exactly, sinks and window included; the codes of `q8_0`, `q4_0` and
  `kivi` hold all tokens. By their own rules `retroinfer` and `magicpig` need a budget of at least 69, and `arkvale` of 160, so
  they have no row at 64.
"""


def rows_of(lines: Iterable[dict]) -> list[dict]:
    """Returns a row per model, length, policy and budget: means over questions, with bootstrap intervals."""
    groups: dict[tuple, list[dict]] = defaultdict(list)
    for line in lines:
        groups[line["model"], line["length"], line["policy"], line["budget"]].append(line)
    means = []
    for (model, length, policy, budget), group in groups.items():
        row = dict(model=model, length=length, policy=policy, budget=budget, tokens=group[0]["tokens"], questions=len(group))
        row |= dict(texts=len({line["text"] for line in group}))  # of each task
        for figure in ("error", "error_95", "kl", "agreement"):
            row[figure] = float(np.mean([line[figure] for line in group]))
            row[f"{figure}_interval"] = interval(group, figure)
        for task in texts.TASKS:
            rights = [line["right"] for line in group if line["task"] == task]
            row[task] = int(sum(rights)), len(rights)
        row |= {
            name: float(np.mean([line[name] for line in group]))
            for name in ("attended", "device_bytes", "host_bytes", "moved_bytes")
        }
        means.append(row | dict(options=next((line["options"] for line in group if line["options"]), None)))
    return means


def interval(lines: list[dict], figure: str) -> tuple[float, float]:
    """Returns the 95% interval of a mean over questions: texts are drawn with replacement, of each task as many as it has."""
    rng = np.random.default_rng(0)
    by_task: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        by_task[line["task"]][line["text"]].append(line[figure])
    sums, counts = np.zeros(RESAMPLES), np.zeros(RESAMPLES)
    for _, by_text in sorted(by_task.items()):
        totals, sizes = (np.asarray([f(values) for _, values in sorted(by_text.items())], float) for f in (sum, len))
        drawn = rng.integers(len(totals), size=(RESAMPLES, len(totals)))
        sums += totals[drawn].sum(1)
        counts += sizes[drawn].sum(1)
    means = sums / counts
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def write(means: list[dict], path: Path) -> None:
    """Writes the page."""
    rows.write(path, "\n".join([START, *_shares(means), "", *_sections(means)]))


def _shares(means: list[dict]) -> Iterator[str]:
    """Yields the table of our errors as parts of those that users would have instead."""
    error = {(*_text(row), row["policy"], row["budget"]): row["error"] for row in means}
    lines = []
    for row in sorted(
        (row for row in means if row["policy"].partition(":")[0] in OURS), key=lambda row: (_text(row), order(row))
    ):
        beside = [("topk", row["budget"]), ("q8_0", "all"), ("q4_0", "all")]
        parts = (row["error"] / error[key] if (key := (*_text(row), *one)) in error else None for one in beside)
        shares = (NONE if part is None else f"{part:.3f}" for part in parts)
        lines.append([row["model"], f"{row['length']:,}", f"`{row['policy']}`", row["budget"], *shares])
    if lines:
        yield "## Our error as a part of another cache's\n"
        yield "The goal: at most 0.167 of the exact top tokens (`topk`) at the same budget, and at 256 less than `q8_0`.\n"
        yield from table(("model", "tokens", "", "budget", "`topk` at the budget", "`q8_0`", "`q4_0`"), lines)


def _text(row: dict) -> tuple[str, int]:
    return row["model"], row["length"]


def _sections(means: list[dict]) -> Iterator[str]:
    for model, length in sorted({_text(row) for row in means}):
        group = [row for row in means if _text(row) == (model, length)]
        questions = sorted({row["questions"] for row in group})
        span = str(questions[0]) if len(questions) == 1 else f"{questions[0]} to {questions[-1]}"
        yield "\n".join([f"## {model}, {length:,} tokens, {span} questions\n", *_table(group), *_options(group), ""])


def _table(group: list[dict]) -> Iterator[str]:
    heads = ("", "budget", "error", "95%", "KL", "agrees", "functions", "values", "device", "host", "moved", "questions")
    lines = []
    for row in sorted(group, key=order):
        answers = (f"{right} of {count}" if count else NONE for right, count in (row[task] for task in texts.TASKS))
        lines.append(
            [
                f"`{row['policy']}`",
                row["budget"],
                _with_interval(row, "error", 1, "{:.4f}"),
                f"{row['error_95']:.3f}",
                _with_interval(row, "kl", 1e3, "{:.3g}"),
                f"{row['agreement']:.1%}",
                *answers,
                f"{row['device_bytes'] / 2**20:.1f}",
                f"{row['host_bytes'] / 2**20:.0f}",
                f"{row['moved_bytes'] / 2**10:,.0f}",
                row["questions"],
            ]
        )
    yield from table(heads, lines)


def _with_interval(row: dict, figure: str, unit: float, form: str) -> str:
    """Returns a mean and its interval; one text per task has none."""
    mean, *ends = (form.format(unit * x) for x in (row[figure], *row[f"{figure}_interval"]))
    return mean if row["texts"] == 1 else f"{mean} ({'-'.join(ends)})"


def order(row: dict) -> tuple:
    """Returns a row's place: the full cache and oracles, full caches in codes, ours, then others by KL; by budget within."""
    name = row["policy"].partition(":")[0]
    for place, names in enumerate((FIRST, CODES, OURS)):
        if name in names:
            return place, row["tokens"] or 0, names.index(name), row["policy"]
    return len((FIRST, CODES, OURS)), row["tokens"] or 0, row["kl"], row["policy"]


def _options(group: list[dict]) -> Iterator[str]:
    texts_of = (
        f"`{row['policy']}` at {row['budget']} {', '.join(f'{name}={value:.4g}' for name, value in row['options'].items())}"
        for row in sorted(group, key=order)
        if row["options"]
    )
    if listed := "; ".join(texts_of):
        yield f"\nOptions found by a search on a text outside the table: {listed}."
