"""`bench.compare --model`: policies on a folder, a GGUF file or a model of `bench.published`, and the page of all lines."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import panel, texts
from bench.compare import cells, forced, forced_page, forced_picture
from bench.flags import listed, make_folder, numbers
from icejax.cache.registry import names
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer
from icejax.runtime.compile_cache import keep_programs

DEFAULTS = dict(budgets="64,256", lengths="4096", tasks=",".join(texts.TASKS), questions=12)
QUICK = dict(budgets="256", lengths="2048", questions=2)
LINES = "compare-published.jsonl"


def compare(arguments: argparse.Namespace, console: Console) -> None:
    """Adds the lines that are missing, and writes page and picture; InputError for invalid options."""
    policies = arguments.policies.split(",") if arguments.policies else names()
    lengths = numbers("--lengths", arguments.lengths, least=texts.SHORTEST + texts.LONGEST)
    tasks, budgets = listed("--tasks", arguments.tasks, texts.TASKS), arguments.budgets.split(",")
    questions = integer("--questions", arguments.questions, least=1, most=1000)
    contenders = {}
    for length in lengths:
        contenders[length], left_out = cells.contenders(policies, budgets, length)
        for line in left_out:
            console.print(f"bench.compare: {line}")
    if not any(contenders.values()):
        raise InputError("--budgets must hold one that a policy can have")
    total = sum(len(contenders[length]) for length in lengths) * len(tasks) * questions
    if arguments.dry_run:
        console.print(f"{total} readings of a question by a policy")
        return
    make_folder(arguments.out)
    ((name, model, tokenizer),) = panel.readers(arguments.model, dtype="float32")
    keep_programs(None)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        bar, options = bars.add_task("", total=total), dict(lengths=lengths, tasks=tasks, questions=questions)
        path = arguments.out / LINES
        for description in forced.run(name, model, tokenizer, contenders=contenders, path=path, **options):
            bars.update(bar, advance=1, description=description)
    write_page(arguments.out)


def write_page(folder: Path) -> None:
    """Writes the page and the picture of all lines in a folder; InputError without lines."""
    rows = forced_page.rows_of(forced.lines(folder / LINES).values())
    if not rows:
        raise InputError(f"{folder / LINES} must hold the lines of a comparison: it has none")
    forced_page.write(rows, folder / "compare-published.md")
    forced_picture.draw(rows, folder / "compare-published.png")
