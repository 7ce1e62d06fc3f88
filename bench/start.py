"""Seconds from the command to the second token: ``python -m bench.start --model DIR``.

Every run is a process of its own. Per run and cache one process starts with an empty compile cache (cold), and the next one
with the programs that it left (warm). The output is one JSON line per cache and state of the compile cache, with medians:

- seconds of imports, of reading the model and its tokenizer, to the first token, and from there to the second
- their sum (`total_s`), and the last two together (`answer_s`)
- seconds in which JAX traced, lowered and compiled programs, or read them from the compile cache, at any time of the start
- seconds of processor time, number of programs, peak memory

A table goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.flags import listed
from icejax.cache.registry import POLICIES
from icejax.checkpoint.folder import resolve
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer

COLUMNS = (
    "imports_s", "reading_s", "tracing_s", "lowering_s", "compiling_s", "retrieving_s", "first_token_s", "second_token_s",
    "answer_s", "total_s", "processor_s",
)  # fmt: skip


def run(model: str, cache: str, programs: str, sizes: dict[str, int]) -> dict:
    """Returns the row of one start in a process of its own; InputError if it fails."""
    options = dict(model=model, cache=cache, programs=programs) | sizes
    argv = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "bench.one_start", *argv, "--begun", repr(time.monotonic())]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        last_line = (process.stderr.strip() or f"status {process.returncode}").splitlines()[-1]
        raise InputError(f"a start with --caches {cache} fails: {last_line}")
    return json.loads(process.stdout.splitlines()[-1])


def rows(model: str, caches: list[str], repeats: int, sizes: dict[str, int]) -> Iterator[dict]:
    """Yields a row per cache and state of the compile cache, with medians over the runs; caches take turns."""
    runs: dict[tuple[str, str], list[dict]] = {}
    for _ in range(repeats):
        for cache in caches:
            with tempfile.TemporaryDirectory(prefix="start-") as programs:
                for state in ("cold", "warm"):
                    runs.setdefault((cache, state), []).append(run(model, cache, programs, sizes))
    for (cache, state), measured in runs.items():
        totals = [row["total_s"] for row in measured]
        medians = {name: _median([row[name] for row in measured]) for name in measured[0]}
        labels = dict(cache=cache, compile_cache=state, model=model or "bundled") | sizes | dict(repeats=repeats)
        yield labels | medians | dict(total_low_s=min(totals), total_high_s=max(totals))


def _median(values: list) -> float | int | str:
    """Returns the median of numbers, and the one value of texts."""
    if isinstance(values[0], str):
        return values[0]
    return round(float(np.median(values)), 3) if isinstance(values[0], float) else int(np.median(values))


def _table(printed: list[dict]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1))
    table.add_column("cache")
    for name in (*COLUMNS, "programs"):
        table.add_column(name.removesuffix("_s").replace("_", " "), justify="right")
    for row in printed:
        seconds = (f"{row[name]:.2f}" for name in COLUMNS)
        table.add_row(f"{row['cache']}, {row['compile_cache']}", *seconds, str(row["programs"]))
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.start", description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="DIR", default="", help="default: the bundled model")
    parser.add_argument("--caches", default="full,clustered", help="comma-separated (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=40, help="room for tokens; two are decoded (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="runs that the medians are of (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        caches = listed("--caches", arguments.caches, POLICIES)
        sizes = dict(
            prompt_tokens=integer("--prompt-tokens", arguments.prompt_tokens),
            new_tokens=integer("--new-tokens", arguments.new_tokens, least=3),
        )
        repeats = integer("--repeats", arguments.repeats)
        if arguments.model:
            resolve(arguments.model)
        printed = []
        for row in rows(arguments.model, caches, repeats, sizes):
            print(json.dumps(row), flush=True)
            printed.append(row)
    except InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    Console(stderr=True, width=160).print(_table(printed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
