"""The rows of a comparison, its tables and its plots."""

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
FIRST = ("full", "topk", "topp", "topk-pages")  # the exact cache and the oracles stand at the top


def key_of(row: dict) -> tuple:
    """Returns what tells a row apart."""
    return tuple(row[name] for name in KEY)


def read(path: Path) -> dict[tuple, dict]:
    """Returns the rows of a file by what tells them apart; InputError if there are none."""
    try:
        return {key_of(row): row for row in map(json.loads, path.read_text().splitlines())}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} must hold the rows of a comparison: {error}; move it away or name another") from None


def lines_of(found: list[dict]) -> str:
    """Returns rows as lines of JSON, in the order of what tells them apart."""
    return "".join(json.dumps(row) + "\n" for row in sorted(found, key=lambda row: [str(x) for x in key_of(row)]))


def write(path: Path, text: str) -> None:
    """Writes a file, whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)


def timed(found: list[dict], times: dict[tuple, dict]) -> list[dict]:
    """Returns rows with the times that others of the same model, policy, budget and length have in the mean, or none."""
    by: dict[tuple, list[dict]] = defaultdict(list)
    for key, row in times.items():
        by[key[:4]].append(row)
    return [row | {name: _mean([each[name] for each in by[key_of(row)[:4]]]) for name in TIMES} for row in found]


def summed(lines: Iterable[dict]) -> dict[tuple, dict]:
    """Returns the rows of the lines of all texts, by what tells them apart."""
    by: dict[tuple, list[dict]] = defaultdict(list)
    for line in lines:
        by[key_of(line)].append(line)
    found = {}
    for key, of in by.items():
        asked, right = (sum(line[name] for line in of) for name in ("asked", "right"))
        low, high = wilson(right, asked)
        row = dict(zip(KEY, key, strict=True)) | dict(tokens=of[0]["tokens"], questions=asked, exact=right / asked)
        row |= dict(low=round(low, 4), high=round(high, 4), texts=len(of), options=of[0]["options"])
        row |= {name: _mean([line[name] for line in of]) for name in MEANS}
        found[key] = row | {name: ", ".join(sorted({line[name] for line in of})) for name in ("device", "jax")}
    return found


def merged(before: dict[tuple, dict], found: dict[tuple, dict]) -> dict[tuple, dict]:
    """Returns the rows of before and those found, of which one of fewer questions takes no other's place."""
    return before | {key: row for key, row in found.items() if row["questions"] >= before.get(key, row)["questions"]}


def _mean(values: list[float | None]) -> float | None:
    """Returns a mean of five digits; None where a value is missing."""
    return None if not values or None in values else float(f"{np.mean(values):.5g}")


def tables(found: list[dict]) -> Iterator[Table]:
    """Yields a table per model, length and protocol: the oracles first, then by answers and error."""
    for key in dict.fromkeys((row["model"], row["length"], row["protocol"]) for row in found):
        of = [row for row in found if (row["model"], row["length"], row["protocol"]) == key]
        tasks = list(dict.fromkeys(row["task"] for row in of))
        table = Table(title=f"{key[0]}, {key[1]:,} tokens, {key[2]} question", box=None, header_style="bold", padding=(0, 1))
        heads = ("attended", "95%", "distinct", "error", "whole", "device", "moved/token", "first token", "ms/token")
        for name in ("policy", "budget", *tasks, *heads):
            table.add_column(name, justify="left" if name == "policy" else "right")
        lines = defaultdict(dict)
        for row in of:
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
