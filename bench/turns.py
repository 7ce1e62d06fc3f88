"""Times of two revisions, run in turns: ``python -m bench.turns HEAD~3 -- python -m bench.decode --contexts 4096``.

The speed of a machine drifts by a factor of two within an hour, so two revisions are compared by the ratio of runs that follow
each other. The old revision is checked out into a temporary folder; the new one is the working tree. The command, which prints
JSON lines, runs in both, and every second pair begins with the new one. The output is one JSON line per row and time: the
median of new over old, its quartiles and extremes over the pairs, and the median seconds of both. A table goes to stderr.

Rows of two runs are matched by the fields that identify a row: text, whole numbers, true, false, null or lists. Such a field
counts only if every run of a revision has the same values of it, and the values of one revision are among the other's. So a
size in bytes that the new revision changed does not prevent a match.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from icejax.checks.errors import InputError

PAIRS = 7
SIDES = ("old", "new")
Rows = list[dict]


def is_time(name: str) -> bool:
    """Returns whether a field holds seconds or milliseconds; `tokens_per_s` does not."""
    return name.endswith(("_s", "_ms")) and not name.endswith("_per_s")


@contextlib.contextmanager
def checked_out(repository: Path, commit: str) -> Iterator[Path]:
    """Yields a temporary folder with the commit checked out; the block's end removes it."""
    with tempfile.TemporaryDirectory(prefix="turns-") as folder:
        checkout = Path(folder) / "old"
        _git(repository, "worktree", "add", "--quiet", "--detach", str(checkout), commit)
        try:
            yield checkout
        finally:
            _git(repository, "worktree", "remove", "--force", str(checkout))


def run(command: list[str], checkout: Path, side: str) -> Rows:
    """Returns the JSON objects that a command prints in a checkout; InputError if it fails or prints none."""
    other_paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != Path.cwd()]
    environment = os.environ | dict(PYTHONPATH=os.pathsep.join([str(checkout), *other_paths]))
    argv = [sys.executable if command[0] in ("python", "python3") else command[0], *command[1:]]
    try:
        process = subprocess.run(argv, cwd=checkout, env=environment, capture_output=True, text=True)
    except OSError as error:
        raise InputError(f"the command cannot be run: {error.strerror}: {argv[0]}") from None
    if process.returncode:
        last_line = (process.stderr.strip() or "it says nothing").splitlines()[-1]
        raise InputError(f"the command fails in the {side} checkout (status {process.returncode}): {last_line}")
    objects = []
    for line in process.stdout.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            objects.append(json.loads(line))
    rows = [row for row in objects if isinstance(row, dict)]
    if not rows:
        raise InputError(f"the command must print JSON objects, a line each, got none in the {side} checkout")
    return rows


def identifying(runs: dict[str, list[Rows]]) -> list[str]:
    """Returns the fields by which the rows of all runs are matched."""
    first = runs["old"][0][0]
    return [name for name in first if not is_time(name) and _identifies(name, runs)]


def _identifies(name: str, runs: dict[str, list[Rows]]) -> bool:
    values = {}
    for side in SIDES:
        values_by_run = [[row.get(name) for row in rows] for rows in runs[side]]
        if any(isinstance(value, float | dict) for run_values in values_by_run for value in run_values):
            return False
        sets_by_run = [{json.dumps(value) for value in run_values} for run_values in values_by_run]
        if any(run_set != sets_by_run[0] for run_set in sets_by_run):
            return False
        values[side] = sets_by_run[0]
    return values["old"] <= values["new"] or values["new"] <= values["old"]


def compare(runs: dict[str, list[Rows]], field: str | None) -> tuple[list[dict], int]:
    """Returns one result per row and time field that all runs have, and the number of rows that some run lacks.

    Rows with the same values in all identifying fields are matched in order.
    """
    names = identifying(runs)
    by_key: dict[str, list[list[dict]]] = {}
    for side in SIDES:
        keyed = [_keyed(rows, names) for rows in runs[side]]
        for key in {key for run_rows in keyed for key in run_rows}:
            by_key.setdefault(key, []).append([run_rows[key] for run_rows in keyed if key in run_rows])
    matched = [key for key in _keyed(runs["new"][0], names) if [len(x) for x in by_key[key]] == [len(x) for x in runs.values()]]
    results = []
    for key in matched:
        old, new = by_key[key]
        for name in old[0]:
            if (name == field if field else is_time(name)) and all(_is_positive(row.get(name)) for row in (*old, *new)):
                old_values, new_values = (np.asarray([row[name] for row in side], float) for side in (old, new))
                results.append(dict(row={k: old[0].get(k) for k in names}, field=name) | _ratio(old_values, new_values))
    return results, len(by_key) - len(matched)


def _keyed(rows: Rows, names: list[str]) -> dict[str, dict]:
    counts: dict[str, int] = defaultdict(int)
    by_key = {}
    for row in rows:
        key = json.dumps([row.get(name) for name in names])
        by_key[f"{key} {counts[key]}"] = row
        counts[key] += 1
    return by_key


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _ratio(old: np.ndarray, new: np.ndarray) -> dict:
    lowest, low, median, high, highest = (round(float(x), 4) for x in np.quantile(new / old, (0, 0.25, 0.5, 0.75, 1)))
    spread = dict(ratio=median, low=low, high=high, min=lowest, max=highest, pairs=len(old))
    return spread | dict(old=float(np.median(old)), new=float(np.median(new)))


def _git(folder: Path, *argv: str) -> str:
    process = subprocess.run(["git", "-C", str(folder), *argv], capture_output=True, text=True)
    if process.returncode:
        raise InputError(f"git {argv[0]} fails: {(process.stderr.strip() or 'it says nothing').splitlines()[-1]}")
    return process.stdout.strip()


def _versions(repository: Path, commit: str) -> dict:
    new = _git(repository, "rev-parse", "--short", "HEAD") + ("+" if _git(repository, "status", "--porcelain") else "")
    software = dict(python=platform.python_version(), jax=metadata.version("jax"))
    return dict(old=_git(repository, "rev-parse", "--short", commit), new=new) | software


def _table(results: list[dict]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2))
    for name in ("row", "time", "old", "new", "new/old", "quartiles", "extremes"):
        table.add_column(name, justify="left" if name in ("row", "time") else "right")
    shown: list[str] = []  # the first fields that distinguish all rows
    for name in results[0]["row"]:
        without, with_name = (
            len({json.dumps([x["row"][k] for k in names]) for x in results}) for names in (shown, [*shown, name])
        )
        shown += [name] if with_name > without else []
    for result in results:
        row = " ".join(f"{name}={result['row'][name]}" for name in shown)
        spread = (f"{result['low']:.3f} - {result['high']:.3f}", f"{result['min']:.3f} - {result['max']:.3f}")
        table.add_row(row, result["field"], f"{result['old']:.6g}", f"{result['new']:.6g}", f"{result['ratio']:.3f}", *spread)
    return table


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="bench.turns", usage="%(prog)s REV [options] -- COMMAND ...", description=__doc__.splitlines()[0]
    )
    parser.add_argument("rev", metavar="REV", help="the old revision, as git names it")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="runs of each checkout (default: %(default)s)")
    parser.add_argument("--field", help="the one time to compare (default: every field that ends in _s or _ms)")
    separator = argv.index("--") if "--" in argv else len(argv)
    arguments, command = parser.parse_args(argv[:separator]), argv[separator + 1 :]
    console = Console(stderr=True, width=160)
    try:
        if not command:
            raise InputError("a command must follow `--`, such as: python -m bench.decode --contexts 4096")
        if arguments.pairs < 1:
            raise InputError(f"--pairs must be at least 1, got {arguments.pairs}")
        repository = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel"))
        try:
            commit = _git(repository, "rev-parse", "--verify", f"{arguments.rev}^{{commit}}")
        except InputError:
            raise InputError(f"REV must name a commit of {repository}, got {arguments.rev!r}") from None
        runs: dict[str, list[Rows]] = {side: [] for side in SIDES}
        with checked_out(repository, commit) as old:
            checkouts = dict(old=old, new=repository)
            for pair in track(range(arguments.pairs), "pairs", console=console, disable=not console.is_terminal):
                for side in SIDES if pair % 2 == 0 else SIDES[::-1]:
                    runs[side].append(run(command, checkouts[side], side))
        results, unmatched = compare(runs, arguments.field)
        if not results:
            expected = arguments.field or "a number in a field that ends in _s or _ms"
            raise InputError(f"every run must print a row with {expected}, the same one in both checkouts, got none")
        versions = _versions(repository, commit)
    except InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    if unmatched:
        print(f"{parser.prog}: warning: {unmatched} rows are left out, which not every run printed", file=sys.stderr)
    for result in results:
        context = dict(device=result["row"].get("device"), versions=versions, command=" ".join(command))
        print(json.dumps(result | context), flush=True)
    console.print(_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
