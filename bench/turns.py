"""An old and the present checkout in turns: ``python -m bench.turns HEAD~3 -- python -m bench.decode --contexts 4096``.

A machine drifts by two within an hour, so two checkouts are compared by the ratio of runs that follow each other. The old
revision is checked out into a temporary folder; the present one is the working tree as it stands. The command, which prints
JSON lines, runs in one and then in the other, and every pair begins with the other of the two. One JSON line per row and time:
the median of new over old, its quartiles and extremes over the pairs, and the median seconds of both. A table goes to stderr.

Rows are matched by their fields that are text, whole numbers, true, false, null or lists, as far as their values are the same
in every run of a checkout, and those of one checkout are among those of the other: sizes that changed tell nothing apart.
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
    """Says whether a field holds seconds or milliseconds; `tokens_per_s` does not."""
    return name.endswith(("_s", "_ms")) and not name.endswith("_per_s")


@contextlib.contextmanager
def checked_out(repository: Path, commit: str) -> Iterator[Path]:
    """Has a commit in a temporary folder while the block runs."""
    with tempfile.TemporaryDirectory(prefix="turns-") as folder:
        place = Path(folder) / "old"
        _git(repository, "worktree", "add", "--quiet", "--detach", str(place), commit)
        try:
            yield place
        finally:
            _git(repository, "worktree", "remove", "--force", str(place))


def run(command: list[str], checkout: Path, side: str) -> Rows:
    """Returns the rows that a command prints in a checkout; InputError if it fails or prints none."""
    elsewhere = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != Path.cwd()]
    environment = os.environ | dict(PYTHONPATH=os.pathsep.join([str(checkout), *elsewhere]))
    argv = [sys.executable if command[0] in ("python", "python3") else command[0], *command[1:]]
    try:
        done = subprocess.run(argv, cwd=checkout, env=environment, capture_output=True, text=True)
    except OSError as error:
        raise InputError(f"the command cannot be run: {error.strerror}: {argv[0]}") from None
    if done.returncode:
        last = (done.stderr.strip() or "it says nothing").splitlines()[-1]
        raise InputError(f"the command fails in the {side} checkout (status {done.returncode}): {last}")
    found = []
    for line in done.stdout.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    rows = [row for row in found if isinstance(row, dict)]
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
        of_runs = [[row.get(name) for row in rows] for rows in runs[side]]
        if any(isinstance(value, float | dict) for of_run in of_runs for value in of_run):
            return False
        told = [{json.dumps(value) for value in of_run} for of_run in of_runs]
        if any(each != told[0] for each in told):
            return False
        values[side] = told[0]
    return values["old"] <= values["new"] or values["new"] <= values["old"]


def compare(runs: dict[str, list[Rows]], field: str | None) -> tuple[list[dict], int]:
    """Returns a line per row and time field that all runs have, and how many rows not every run has.

    Rows that no field tells apart are matched in the order they came in.
    """
    names = identifying(runs)
    by_key: dict[str, list[list[dict]]] = {}
    for side in SIDES:
        keyed = [_keyed(rows, names) for rows in runs[side]]
        for key in {key for one in keyed for key in one}:
            by_key.setdefault(key, []).append([one[key] for one in keyed if key in one])
    matched = [key for key in _keyed(runs["new"][0], names) if [len(x) for x in by_key[key]] == [len(x) for x in runs.values()]]
    found = []
    for key in matched:
        old, new = by_key[key]
        for name in old[0]:
            if (name == field if field else is_time(name)) and all(_is_positive(row.get(name)) for row in (*old, *new)):
                before, after = (np.asarray([row[name] for row in side], float) for side in (old, new))
                found.append(dict(row={k: old[0].get(k) for k in names}, field=name) | _ratio(before, after))
    return found, len(by_key) - len(matched)


def _keyed(rows: Rows, names: list[str]) -> dict[str, dict]:
    seen: dict[str, int] = defaultdict(int)
    found = {}
    for row in rows:
        key = json.dumps([row.get(name) for name in names])
        found[f"{key} {seen[key]}"] = row
        seen[key] += 1
    return found


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _ratio(old: np.ndarray, new: np.ndarray) -> dict:
    least, low, median, high, most = (round(float(x), 4) for x in np.quantile(new / old, (0, 0.25, 0.5, 0.75, 1)))
    spread = dict(ratio=median, low=low, high=high, min=least, max=most, pairs=len(old))
    return spread | dict(old=float(np.median(old)), new=float(np.median(new)))


def _git(folder: Path, *argv: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *argv], capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"git {argv[0]} fails: {(done.stderr.strip() or 'it says nothing').splitlines()[-1]}")
    return done.stdout.strip()


def _versions(repository: Path, commit: str) -> dict:
    new = _git(repository, "rev-parse", "--short", "HEAD") + ("+" if _git(repository, "status", "--porcelain") else "")
    software = dict(python=platform.python_version(), jax=metadata.version("jax"))
    return dict(old=_git(repository, "rev-parse", "--short", commit), new=new) | software


def _table(found: list[dict]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2))
    for name in ("row", "time", "old", "new", "new/old", "quartiles", "extremes"):
        table.add_column(name, justify="left" if name in ("row", "time") else "right")
    telling: list[str] = []  # the first fields that tell all rows apart
    for name in found[0]["row"]:
        without, with_it = (
            len({json.dumps([x["row"][k] for k in names]) for x in found}) for names in (telling, [*telling, name])
        )
        telling += [name] if with_it > without else []
    for line in found:
        row = " ".join(f"{name}={line['row'][name]}" for name in telling)
        spread = (f"{line['low']:.3f} - {line['high']:.3f}", f"{line['min']:.3f} - {line['max']:.3f}")
        table.add_row(row, line["field"], f"{line['old']:.6g}", f"{line['new']:.6g}", f"{line['ratio']:.3f}", *spread)
    return table


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="bench.turns", usage="%(prog)s REV [options] -- COMMAND ...", description=__doc__.splitlines()[0]
    )
    parser.add_argument("rev", metavar="REV", help="the old revision, as git names it")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="runs of each checkout (default: %(default)s)")
    parser.add_argument("--field", help="the one time to compare (default: every field that ends in _s or _ms)")
    at = argv.index("--") if "--" in argv else len(argv)
    arguments, command = parser.parse_args(argv[:at]), argv[at + 1 :]
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
        found, alone = compare(runs, arguments.field)
        if not found:
            wanted = arguments.field or "a number in a field that ends in _s or _ms"
            raise InputError(f"every run must print a row with {wanted}, the same one in both checkouts, got none")
        versions = _versions(repository, commit)
    except InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    if alone:
        print(f"{parser.prog}: warning: {alone} rows are left out, which not every run printed", file=sys.stderr)
    for line in found:
        where = dict(device=line["row"].get("device"), versions=versions, command=" ".join(command))
        print(json.dumps(line | where), flush=True)
    console.print(_table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
