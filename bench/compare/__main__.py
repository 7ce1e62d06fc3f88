"""Answers and errors of cache policies, compared: ``python -m bench.compare [--model M] [--quick] [--panel] [--out DIR]``.

With `--model` (a folder, a GGUF file, or a name of `bench.published`) the texts are source and prose in the model's own tokens,
and every policy decodes true continuations (`bench.compare.forced`): DIR gets compare-published.jsonl, with a line per question
and policy, and its page and picture, which `--page` writes again. Without it, the texts are those of the models trained here:

Every text is prefilled once per model, and every policy gets its queries, keys and values. There are two protocols: with a
**dense** question, the question stands inside the exact prefill, and the answer's first token comes from that prefill; a
**sparse** question goes through the cache token by token.

A line per text and policy is added to DIR/lines.jsonl; a stopped run continues there. The rows of the tables are in
DIR/compare.jsonl, the tables in DIR/compare-tables.md, the plots in DIR/compare.png. Tables with intervals go to stderr. A row
with at least as many questions as asked for now is not run again, even if its lines are gone. If a row has fewer questions and
its lines are gone, all its texts are read again. A change of a policy's code is not detected: remove its rows and lines first.

A budget is the number of tokens that a KV head of a layer attends to exactly in a step, sinks and window included; a share such
as 10% is a share of the text. `attended` is the number that a query head attended to, mean and 95th percentile over steps and
layers; `distinct` the number that any query head of a KV head attended to. Rows are means over texts, `attended_95` too.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench import panel
from bench.compare import cells, model, page, picture, rows
from bench.compare.cells import PROTOCOLS, ROOM, Cell, Contender, Protocol
from bench.compare.runner import run
from bench.compare.subject import Subject
from bench.flags import listed, make_folder, numbers
from bench.needle.evaluate import SHORTEST
from icejax.cache.registry import Clustered, names
from icejax.checks.errors import InputError
from icejax.runtime import devices
from icejax.runtime.compile_cache import keep_programs
from icejax.runtime.host_reads.choose import try_ahead

LONG = 32768  # tokens; from this length on half as many questions are asked
QUICK = dict(budgets="64,256", lengths="2048", tasks="multikey-16", questions=16)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--policies", help=f"comma-separated, with options as in clustered:candidates=1 (default: all: {', '.join(names())})"
    )
    parser.add_argument("--budgets", default="64,256,10%", help="tokens or shares, comma-separated (default: 64,256,10%%)")
    parser.add_argument("--lengths", default="4096,16384,32768", help="tokens (default: %(default)s)")
    parser.add_argument("--tasks", default="single,multikey-16,hops", help="default: %(default)s")
    parser.add_argument(
        "--questions",
        type=int,
        default=50,
        help=f"per cell, half from {LONG} tokens on (default: %(default)s); with --model per task (default: 12)",
    )
    parser.add_argument("--protocols", default=",".join(PROTOCOLS), help="default: %(default)s")
    parser.add_argument("--model", help="a folder, a GGUF file, or a name of bench.published: texts in its own tokens")
    parser.add_argument("--page", action="store_true", help="only write the page of published models again")
    parser.add_argument("--panel", action="store_true", help="also the models of bench/needle/panel")
    parser.add_argument("--models", help="of these, comma-separated (default: all)")
    parser.add_argument("--quick", action="store_true", help="a glance at all policies in minutes: one text of 2,048 tokens")
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and how long it would take")
    parser.add_argument("--times", type=Path, help="rows of a run that had the machine to itself, whose times are to be shown")
    parser.add_argument(
        "--out", type=Path, default=Path("compare"), help="folder; a run that is there continues (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    if arguments.model:
        parser.set_defaults(**model.DEFAULTS)
    if arguments.quick:
        parser.set_defaults(**(model.QUICK if arguments.model else QUICK))
    arguments = parser.parse_args(argv)
    devices.set_limits()
    try_ahead()
    try:
        if arguments.page:
            model.write_page(arguments.out)
            return 0
        if arguments.model:
            model.compare(arguments, Console(stderr=True, width=180, highlight=False))
            return 0
        policies = arguments.policies.split(",") if arguments.policies else names()
        budgets, protocols = arguments.budgets.split(","), listed("--protocols", arguments.protocols, PROTOCOLS)
        tasks = listed("--tasks", arguments.tasks, cells.TASKS)
        lengths = numbers("--lengths", arguments.lengths, least=SHORTEST)
        models = list(panel.folders(panel=arguments.panel))
        models = listed("--models", arguments.models or ",".join(models), models)
        if arguments.questions < 2:
            raise InputError(f"--questions must be at least 2, got {arguments.questions}")
        times = None if arguments.times is None else rows.read(arguments.times)
        all_cells = [Cell(n, form, arguments.questions // (1 + (n >= LONG))) for n in lengths for form in tasks]
        contenders_by_length: dict[int, list[Contender]] = {}
        refused: list[str] = []
        for n in lengths:
            contenders_by_length[n], left_out = cells.contenders(policies, budgets, n)
            refused += left_out
        if not any(contenders_by_length.values()):
            raise InputError(f"--budgets must hold one that a policy can have: {refused[0]}")
        for line in refused:
            print(f"bench.compare: {line}", file=sys.stderr)
        rows_path, lines_path = arguments.out / "compare.jsonl", arguments.out / "lines.jsonl"
        old_rows = rows.read(rows_path) if rows_path.exists() else {}
        if not arguments.dry_run:
            make_folder(arguments.out)
    except InputError as error:
        print(f"bench.compare: error: {error}", file=sys.stderr)
        return 2
    num_questions = {(cell.length, cell.task): cell.questions for cell in all_cells}
    finished = {
        key for key, row in old_rows.items() if row["questions"] >= num_questions.get((row["length"], row["task"]), math.inf)
    }
    num_readings = {
        cell: sum(
            (name, contender.name, contender.asked, cell.length, cell.task, protocol) not in finished
            for name, contender, protocol in itertools.product(models, contenders_by_length[cell.length], protocols)
        )
        for cell in all_cells
    }
    console = Console(stderr=True, width=180)
    if arguments.dry_run:
        count = sum(cell.texts * number for cell, number in num_readings.items())
        hours = sum(seconds(cell, protocols) * number for cell, number in num_readings.items() if number) / 3600
        console.print(f"{count} readings of a text by a policy, about {hours:.1f} hours on this machine when it is quiet")
        return 0
    keep_programs(None)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        bar = bars.add_task("", total=sum(cell.texts * number for cell, number in num_readings.items()))
        for name, subject in panel.models(panel=arguments.panel, only=models, dtype="float32"):
            for description in run(name, subject, all_cells, contenders_by_length, protocols, lines_path, old_rows, finished):
                bars.update(bar, advance=1, description=description)
    all_rows = list(rows.merged(old_rows, rows.summed(cells.lines(lines_path).values())).values())
    if times is not None:
        all_rows = rows.timed(all_rows, times)
    rows.write(rows_path, rows.lines_of(all_rows))
    rows.write(arguments.out / "compare-tables.md", page.rendered(all_rows))
    for table in rows.tables(all_rows):
        console.print(table)
    picture.draw(all_rows, arguments.out / "compare.png")
    return 0


def seconds(cell: Cell, protocols: list[Protocol]) -> float:
    """Returns a compiled policy's seconds for all texts of a cell, per protocol, without the exact attention of the texts."""
    _, bundled = next(panel.models(dtype="float32"))
    subject = Subject(bundled, Clustered(), prompt_tokens=cell.length + ROOM, new_tokens=ROOM)
    text = cell.read(bundled, 0)
    for _ in range(2):
        started = time.perf_counter()
        for protocol in protocols:
            cells.read(subject, *text, protocol)
    return cell.texts * (time.perf_counter() - started) / len(protocols)


if __name__ == "__main__":
    sys.exit(main())
