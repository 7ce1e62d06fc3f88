"""Cache policies beside one another: ``python -m bench.compare [--quick] [--panel] [--out DIR]``.

Every text is prefilled once per model, and its queries, keys and values are given to every policy. Two protocols: **dense**,
the question stands inside the exact prefill, and the answer's first token comes from it; **sparse**, the question goes through
the cache token by token. A line per text and policy is added to DIR/lines.jsonl, and a run that was stopped goes on there. The
rows of the table are in DIR/compare.jsonl, the plots in DIR/compare.png. The table goes to stderr.

A budget counts the tokens that a KV head of a layer attends to exactly in a step, sinks and window included; a share, as 10%,
is one of the text. `attended` is what a query head did attend to, mean and 95th percentile over steps and layers; `distinct`
what any of a KV head's query heads did.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench import panel
from bench.compare import cells, rows
from bench.compare.cells import ROOM, Cell, Contender, Protocol
from bench.compare.subject import Subject
from bench.compare.text import Text
from bench.flags import listed, numbers
from bench.needle.evaluate import SHORTEST
from icejax import memory
from icejax.cache import Clustered, names
from icejax.cache.fetch import try_ahead
from icejax.errors import InputError
from icejax.models import CausalLM

PROTOCOLS: tuple[Protocol, ...] = ("dense", "sparse")
LONG = 32768  # tokens from which half as many questions are asked
QUICK = dict(budgets="64", lengths="2048", tasks="multikey-16", questions=16)


class Runner:
    """The texts of a group and the subjects of one model and length, each made when it is first needed."""

    def __init__(self, model: CausalLM, length: int) -> None:
        self._model, self._length = model, length
        self._texts: dict[tuple[str, int], tuple[Text, list]] = {}
        self._subjects: dict[tuple[str, str], Subject] = {}
        self._warm = False

    def line(self, cell: Cell, number: int, one: Contender, protocol: Protocol) -> dict:
        """Returns what a policy makes of a text."""
        if (cell.task, number) not in self._texts:
            tokens, pairs = cell.draw(number)
            if not self._warm:
                Text.read(self._model, tokens, room=ROOM).then(tokens[:1])
                self._warm = True
            self._texts[cell.task, number] = Text.read(self._model, tokens, room=ROOM), pairs
        if (one.name, one.asked) not in self._subjects:
            sizes = dict(prompt_tokens=self._length + ROOM, new_tokens=ROOM)
            self._subjects[one.name, one.asked] = Subject(self._model, one.policy, **sizes)
        return cells.read(self._subjects[one.name, one.asked], *self._texts[cell.task, number], protocol)

    def rest(self, one: Contender) -> None:
        """Gives back the memory of a subject, but for its programs."""
        if (one.name, one.asked) in self._subjects:
            self._subjects[one.name, one.asked].forget()

    def forget(self) -> None:
        """Gives back the memory of all texts."""
        self._texts.clear()


def run(
    name: str, model: CausalLM, each: list[Cell], some: dict[int, list[Contender]], protocols: list[Protocol], path: Path
) -> Iterator[str]:
    """Adds the lines of a model that a file does not hold yet; yields what each was about, those that were there too."""
    there = cells.lines(path)
    for length, contenders in some.items():
        runner = Runner(model, length)
        groups = ((cell, group) for cell in each if cell.length == length for group in cells.groups(model, cell))
        for cell, some_texts in groups:
            for one in contenders:
                for number, protocol in itertools.product(some_texts, protocols):
                    key = (name, one.name, one.asked, length, cell.task, protocol, number)
                    if key not in there:
                        line = dict(zip(cells.KEY, key, strict=True)) | dict(tokens=one.policy.budget)
                        line |= runner.line(cell, number, one, protocol)
                        cells.add(path, line)
                    yield f"{name}: {one.name}, {cell.task}, {length}"
                runner.rest(one)
            runner.forget()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--policies", help=f"comma-separated, with options as in clustered:candidates=1 (default: all: {', '.join(names())})"
    )
    parser.add_argument("--budgets", default="64,256,10%", help="tokens or shares, comma-separated (default: 64,256,10%%)")
    parser.add_argument("--lengths", default="4096,16384,32768", help="tokens (default: %(default)s)")
    parser.add_argument("--tasks", default="single,multikey-16,hops", help="default: %(default)s")
    parser.add_argument(
        "--questions", type=int, default=50, help=f"per cell; half from {LONG} tokens on (default: %(default)s)"
    )
    parser.add_argument("--protocols", default=",".join(PROTOCOLS), help="default: %(default)s")
    parser.add_argument("--panel", action="store_true", help="also the models of bench/needle/panel")
    parser.add_argument("--quick", action="store_true", help="a glance at all policies in minutes: one text of 2,048 tokens")
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and how long it would take")
    parser.add_argument(
        "--out", type=Path, default=Path("compare"), help="folder; a run that is there goes on (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    if arguments.quick:
        parser.set_defaults(**QUICK)
        arguments = parser.parse_args(argv)
    memory.raise_pinned_limit()
    try_ahead()
    try:
        policies = arguments.policies.split(",") if arguments.policies else names()
        budgets, protocols = arguments.budgets.split(","), listed("--protocols", arguments.protocols, PROTOCOLS)
        tasks = listed("--tasks", arguments.tasks, cells.TASKS)
        lengths = numbers("--lengths", arguments.lengths, least=SHORTEST)
        if arguments.questions < 2:
            raise InputError(f"--questions must be at least 2, got {arguments.questions}")
        each = [Cell(n, form, arguments.questions // (1 + (n >= LONG))) for n in lengths for form in tasks]
        some: dict[int, list[Contender]] = {}
        for n in lengths:
            some[n], left_out = cells.contenders(policies, budgets, n)
            for line in left_out:
                print(f"bench.compare: {line}", file=sys.stderr)
    except InputError as error:
        print(f"bench.compare: error: {error}", file=sys.stderr)
        return 2
    units = len(panel.folders(panel=arguments.panel)) * len(protocols)
    units *= sum(cell.texts * len(some[cell.length]) for cell in each)
    console = Console(stderr=True, width=180)
    if arguments.dry_run:
        seconds = estimate(each, some, protocols) * len(panel.folders(panel=arguments.panel))
        console.print(
            f"{units} readings of a text by a policy, about {seconds / 3600:.1f} hours on this machine when it is quiet"
        )
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "lines.jsonl"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        bar = bars.add_task("", total=units)
        for name, model in panel.models(panel=arguments.panel, dtype="float32"):
            for what in run(name, model, each, some, protocols, path):
                bars.update(bar, advance=1, description=what)
    found = rows.summed(cells.lines(path).values())
    (arguments.out / "compare.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    for table in rows.tables(found):
        console.print(table)
    rows.plot(found, arguments.out / "compare.png")
    return 0


def estimate(each: list[Cell], some: dict[int, list[Contender]], protocols: list[Protocol]) -> float:
    """Returns the seconds of a run on one model, from a text of every cell that one policy reads, compiled before."""
    _, model = next(panel.models(dtype="float32"))
    total = 0.0
    for cell in each:
        tokens, pairs = cell.draw(0)
        subject = Subject(model, Clustered(), prompt_tokens=cell.length + ROOM, new_tokens=ROOM)
        for warm in (True, False):
            started = time.perf_counter()
            text = Text.read(model, tokens, room=ROOM)
            exact = time.perf_counter() - started
            for protocol in protocols:
                cells.read(subject, text, pairs, protocol)
            read = time.perf_counter() - started - exact
            total += (cell.texts * (exact + len(some[cell.length]) * read)) * (not warm)
    return total


if __name__ == "__main__":
    sys.exit(main())
