"""The rows of `bench.compare`: read, summed over texts, written, and as tables for the terminal."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from rich.table import Table

from bench.needle.evaluate import wilson
from icejax.checks.errors import InputError

KEY = ("model", "policy", "budget", "length", "task", "protocol")
TIMES = ("first_token_s", "tpot_s")
MEANS = (
    *("error", "error_whole", "attended", "attended_95", "distinct"),
    *("moved_bytes", "device_bytes", "digest_bytes", "host_bytes"),
    *TIMES,
)
FIRST = ("full", "topk", "topp", "topk-pages")  # the exact cache and the oracles come first in tables


def key_of(row: dict) -> tuple:
    """Returns the fields that identify a row."""
    return tuple(row[name] for name in KEY)


def read(path: Path) -> dict[tuple, dict]:
    """Returns the rows of a file by key; InputError if it cannot be read or has other lines."""
    try:
        return {key_of(row): row for row in map(json.loads, path.read_text().splitlines())}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} must hold the rows of a comparison: {error}; move it away or name another") from None


def lines_of(found: list[dict]) -> str:
    """Returns rows as lines of JSON, sorted by key."""
    return "".join(json.dumps(row) + "\n" for row in sorted(found, key=lambda row: [str(x) for x in key_of(row)]))


def write(path: Path, text: str) -> None:
    """Writes a file atomically."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)


def timed(found: list[dict], times: dict[tuple, dict]) -> list[dict]:
    """Returns rows with the mean times of `times` for the same model, policy, budget and length; None without any."""
    by_key: dict[tuple, list[dict]] = defaultdict(list)
    for key, row in times.items():
        by_key[key[:4]].append(row)
    return [row | {name: _mean([timed_row[name] for timed_row in by_key[key_of(row)[:4]]]) for name in TIMES} for row in found]


def summed(lines: Iterable[dict]) -> dict[tuple, dict]:
    """Returns one row per key, summed over the lines of all its texts."""
    by_key: dict[tuple, list[dict]] = defaultdict(list)
    for line in lines:
        by_key[key_of(line)].append(line)
    rows = {}
    for key, key_lines in by_key.items():
        questions, right = (sum(line[name] for line in key_lines) for name in ("asked", "right"))
        low, high = wilson(right, questions)
        row = dict(zip(KEY, key, strict=True)) | dict(
            tokens=key_lines[0]["tokens"], questions=questions, exact=right / questions
        )
        row |= dict(low=round(low, 4), high=round(high, 4), texts=len(key_lines), options=key_lines[0]["options"])
        row |= {name: _mean([line[name] for line in key_lines]) for name in MEANS}
        rows[key] = row | {name: ", ".join(sorted({line[name] for line in key_lines})) for name in ("device", "jax")}
    return rows


def merged(before: dict[tuple, dict], found: dict[tuple, dict]) -> dict[tuple, dict]:
    """Returns the old rows, replaced by new rows that have at least as many questions."""
    return before | {key: row for key, row in found.items() if row["questions"] >= before.get(key, row)["questions"]}


def _mean(values: list[float | None]) -> float | None:
    """Returns the mean, rounded to five digits; None if a value is missing. The mean of 1, 2 and 4 is 2.3333."""
    return None if not values or None in values else float(f"{np.mean(values):.5g}")


def tables(found: list[dict]) -> Iterator[Table]:
    """Yields a table per model, length and protocol: the oracles first, then by answers and error."""
    for key in dict.fromkeys((row["model"], row["length"], row["protocol"]) for row in found):
        group_rows = [row for row in found if (row["model"], row["length"], row["protocol"]) == key]
        tasks = list(dict.fromkeys(row["task"] for row in group_rows))
        table = Table(title=f"{key[0]}, {key[1]:,} tokens, {key[2]} question", box=None, header_style="bold", padding=(0, 1))
        heads = ("attended", "95%", "distinct", "error", "whole", "device", "moved/token", "first token", "ms/token")
        for name in ("policy", "budget", *tasks, *heads):
            table.add_column(name, justify="left" if name == "policy" else "right")
        lines = defaultdict(dict)
        for row in group_rows:
            lines[row["policy"], row["budget"]][row["task"]] = row
        for (policy, budget), by_task in sorted(lines.items(), key=_order):
            rows = list(by_task.values())
            mean = {name: _mean([row[name] for row in rows]) for name in MEANS}
            answers = (
                f"{by_task[name]['exact']:.0%} ({by_task[name]['low']:.0%}-{by_task[name]['high']:.0%})"
                if name in by_task
                else ""
                for name in tasks
            )
            tokens = (f"{mean[name]:.0f}" for name in ("attended", "attended_95", "distinct"))
            errors = (f"{mean[name]:.3f}" for name in ("error", "error_whole"))
            sizes = f"{mean['device_bytes'] / 2**20:.2f} MiB", f"{mean['moved_bytes'] / 2**10:.0f} KiB"
            times = ("", "") if None in (mean[t] for t in TIMES) else (f"{mean[TIMES[0]]:.2f} s", f"{1e3 * mean[TIMES[1]]:.2f}")
            table.add_row(policy, budget, *answers, *tokens, *errors, *sizes, *times)
        yield table


def _order(item: tuple[tuple[str, str], dict[str, dict]]) -> tuple:
    (policy, budget), by_task = item
    rows = by_task.values()
    return policy not in FIRST, budget, -np.mean([row["exact"] for row in rows]), np.mean([row["error"] for row in rows])
