"""The page of `bench.compounding`: means over seeds of its rows, with the least and the largest."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from bench.compare import rows as compare_rows
from bench.compounding.steps import BIN
from bench.markdown import NONE, table

START = """# Errors step by step

```
RUN="python -m bench.compounding --model qwen2.5-coder-0.5b --out bench/results"
$RUN
$RUN --policies vattention,pariskv     # they draw at random
$RUN --policies misplaced:share=0.01,misplaced:share=0.1,misplaced:share=1
$RUN --policies clustered,clustered:page_size=8,clustered:page_size=32 --budgets 128,256
python -m bench.compounding --page --out bench/results     # this page and its plot, from compounding.jsonl
```

The full cache writes a continuation of a long prompt, greedily. Every policy is forced along this text, and writes a text of
its own from where it would first leave it. A number is a mean over seeds, with the least and the largest in brackets; a seed is
that of the text, and of all that a policy draws. `full` shows rounding: its own decoding against exact attention.

![KL and agreement by step](compounding.png)

- **KL**: of the next token from exact attention over the same text, in units of 0.001 nats, mean over a column's steps.
- **agrees**: share of steps whose most likely token is the same.
- **equal before**: number of equal tokens before the first that differs from the full cache's text, for each seed.
- **equal**: share of tokens that are equal at the same place.
- **moved**: bytes that a KV head of a layer fetches per step, in whole pages: a page whose keys alone are fetched counts as
  half. The 95th percentile, and KiB per step of a model with 16 bits.
- **same**: share of the pages of the attended tokens that held attended tokens in the step before too.
- **error**: relative L2 error of a head's attention output, mean over heads, layers and the first 16 steps, and the 95th
  percentile.
- `random-pages`: sinks, window and random pages; nothing else counts. `streaming`: sinks and the newest tokens. `topk`: the
  oracle, each query head's best tokens.
"""
FIRST = ("full", "topk", "clustered", "coded")  # others come after them by name
MISPLACED = "misplaced"
Group = list[dict]  # the rows of all seeds of a policy at a budget


def write(found: Iterable[dict], path: Path) -> None:
    """Writes the page."""
    sections = [START]
    for (model, length, steps), groups in grouped(found).items():
        plain = [group for group in groups if not group[0]["policy"].startswith(MISPLACED)]
        sections.append(f"## {model}, {length:,} tokens and {steps:,} steps\n")
        for heading, lines in (
            ("Along the full cache's text:", [*_forced(plain, steps)]),
            ("Along the policy's own text:", [*_own(plain, steps)]),
            ("What steps fetch:", [*_moves(plain)]),
            ("Tokens of `clustered` moved to random pages before digests are made:", [*_misplaced(groups)]),
        ):
            if lines:
                sections.append("\n".join([heading, "", *lines, ""]))
    compare_rows.write(path, "\n".join(sections))


def grouped(found: Iterable[dict]) -> dict[tuple[str, int, int], list[Group]]:
    """Returns the rows of all seeds together: by model, length and steps, in the order of a table."""
    groups: dict[tuple, dict[tuple, Group]] = defaultdict(lambda: defaultdict(list))
    for row in sorted(found, key=lambda row: row["seed"]):
        groups[row["model"], row["length"], row["steps"]][row["policy"], row["budget"]].append(row)
    return {key: sorted(by_policy.values(), key=_order) for key, by_policy in sorted(groups.items())}


def _order(group: Group) -> tuple:
    name = group[0]["policy"]
    return FIRST.index(name) if name in FIRST else len(FIRST), name, group[0]["tokens"] or 0


def spans(steps: int) -> list[tuple[int, int]]:
    """Returns ranges of bins that double: of 512 steps 1-64, 65-128, 129-256 and 257-512, which are (0, 4), ..., (16, 32)."""
    ends = [0, *(end for end in (4 * 2**i for i in range(20)) if end * BIN < steps), steps // BIN]
    return [*itertools.pairwise(ends)]


def _heads(steps: int, name: str) -> list[str]:
    return [f"{name}, {BIN * first + 1}-{BIN * last}" for first, last in spans(steps)]


def _in_spans(group: Group, field: str, form: Callable[[float], str]) -> list[str]:
    return [spread([np.mean(row[field][slice(*span)]) for row in group], form) for span in spans(group[0]["steps"])]


def spread(values: Iterable[float | None], form: Callable[[float], str]) -> str:
    """Returns the mean, and of several values the least and the largest: `2 (1-3)`; a dash without values."""
    values = [value for value in values if value is not None]
    if not values:
        return NONE
    mean, least, most = (form(float(f(values))) for f in (np.mean, min, max))
    return mean if len(values) == 1 else f"{mean} ({least}-{most})"


def milli(value: float) -> str:
    """Returns thousandths with three digits."""
    return f"{1e3 * value:.3g}"


def _named(group: Group) -> list[str]:
    return [f"`{group[0]['policy']}`", group[0]["budget"]]


def _forced(groups: list[Group], steps: int) -> Iterator[str]:
    heads = ("", "budget", *_heads(steps, "KL"), *_heads(steps, "agrees"), "error", "95%", "seeds")
    yield from table(
        heads,
        (
            [
                *_named(group),
                *_in_spans(group, "kl", milli),
                *_in_spans(group, "agreement", "{:.1%}".format),
                spread([row["error"] for row in group], "{:.3f}".format),
                spread([row["error_95"] for row in group], "{:.3f}".format),
                len(group),
            ]
            for group in groups
        ),
    )


def _own(groups: list[Group], steps: int) -> Iterator[str]:
    heads = ("", "budget", "equal before", "equal", *_heads(steps, "KL"), *_heads(steps, "agrees"))
    yield from table(
        heads,
        (
            [
                *_named(group),
                ", ".join("all" if row["diverged"] is None else str(row["diverged"]) for row in group),
                spread([row["equal"] for row in group], "{:.0%}".format),
                *_in_spans(group, "own_kl", milli),
                *_in_spans(group, "own_agreement", "{:.1%}".format),
            ]
            for group in groups
        ),
    )


def _moves(groups: list[Group]) -> Iterator[str]:
    yield from table(
        ("", "budget", "moved", "95%", "KiB", "same"),
        (
            [
                *_named(group),
                *(spread([row[field] for row in group], "{:.1f}".format) for field in ("moved", "moved_95")),
                spread([row["moved_bytes"] / 2**10 for row in group], "{:,.0f}".format),
                spread([row["same"] for row in group], "{:.0%}".format),
            ]
            for group in groups
            if group[0]["moved"] is not None
        ),
    )


def _misplaced(groups: list[Group]) -> Iterator[str]:
    """Yields a table of shares, beside the plain cache."""
    if not any(group[0]["policy"].startswith(MISPLACED) for group in groups):
        return
    yield from table(
        ("", "budget", "error", "95%", "KL", "agrees", "seeds"),
        (
            [
                *_named(group),
                *(spread([row[field] for row in group], "{:.4f}".format) for field in ("error", "error_95")),
                spread([np.mean(row["kl"]) for row in group], milli),
                spread([np.mean(row["agreement"]) for row in group], "{:.1%}".format),
                len(group),
            ]
            for group in groups
            if group[0]["policy"].startswith((MISPLACED, "clustered"))
        ),
    )
