"""Answers a file of prompts into a file of answers, or a share of it. `icejax.commands.generate` calls it."""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from icejax.checks.errors import InputError, quoted
from icejax.checks.numbers import integer
from icejax.commands import options
from icejax.commands.many import lines
from icejax.commands.many.answerer import Answerer
from icejax.commands.many.lines import Line
from icejax.commands.many.output import opened
from icejax.commands.requests import check_template_use
from icejax.commands.terminal.phases import Phases

TOGETHER = 16  # times --batch-size: the lines that are in memory at once


def shard(text: str | None) -> tuple[int, int]:
    """Returns I and N of --shard I/N; 0 and 1 without it. InputError for another text, or an I that is not below N."""
    if text is None:
        return 0, 1
    if not re.fullmatch(r"[0-9]{1,9}/[0-9]{1,9}", text):
        raise InputError(f"--shard must be I/N, such as 0/4, got {quoted(text)}")
    index, count = map(int, text.split("/"))
    integer("N of --shard I/N", count)
    integer("I of --shard I/N", index, least=0, most=count - 1)
    return index, count


def check(arguments: argparse.Namespace) -> None:
    """Raises InputError if an option does not go with --output."""
    path = arguments.prompt_file
    if path is None or path.suffix not in (".jsonl", ".parquet") or arguments.text or arguments.prompt:
        raise InputError(
            "--output has an answer for each line of a .jsonl or .parquet file: give one as --prompt-file, and no prompt"
        )
    if ".parquet" in (path.suffix, arguments.output.suffix) and importlib.util.find_spec("pyarrow") is None:
        raise InputError("a .parquet file needs pyarrow: pip install 'icejax[ray]', or give .jsonl files")
    if path.exists() and not path.is_file():
        raise InputError(f"--output reads lines a second time, and {path} is no file: give a file")
    for flag in ("session", "explain", "json"):
        if getattr(arguments, flag):
            raise InputError(f"--output is a file of JSON lines for prompts that are independent: leave --{flag} out")
    shard(arguments.shard)
    options.check_ray(arguments)


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Answers the lines that have no answer yet; raises InputError for bad input, before anything is loaded."""
    check(arguments)
    options.make_absolute(arguments)
    arguments.prompt_file = arguments.prompt_file.absolute()
    index, count = shard(arguments.shard)
    found = lines.read(arguments)
    kinds = list(found.kinds.values())
    check_template_use(kinds, arguments)
    options.tell_greedy(arguments, [prompt.options(options.answer(arguments)).sampling for prompt in kinds])
    if as_table := arguments.output.suffix == ".parquet":
        from icejax.commands.many import parquet  # it imports pyarrow

        parquet.check_output(arguments.output)
    growing = arguments.output.with_name(f"{arguments.output.name}.jsonl") if as_table else arguments.output
    with opened(growing) as output:
        output.check(found.all)
        own = [line for line in found.all if line.index % count == index]
        waiting = [line for line in own if line.key not in output.keys]
        with Phases(console, quiet=arguments.quiet) as phases:
            for done, (line, fields) in enumerate(_answers(arguments, waiting, console, phases), start=1):
                output.add(line, fields)
                phases("lines", done, len(waiting))
        if as_table:
            parquet.write(growing, arguments.output)
    if not arguments.quiet:
        part = "" if count == 1 else f" of shard {index}/{count}"
        told = f"{arguments.output}: {len(own)} lines{part} are answered, {len(own) - len(waiting)} of them before"
        console.print(told, markup=False, highlight=False, soft_wrap=True)


def _answers(
    arguments: argparse.Namespace, waiting: Sequence[Line], console: Console, phases: Phases
) -> Iterator[tuple[Line, dict[str, Any]]]:
    if not waiting:
        return
    if arguments.ray is not None:
        from icejax.ray import jobs  # imports what the extra has

        yield from jobs.answers(arguments, waiting)
        return
    answerer, size = Answerer(arguments, console), TOGETHER * arguments.batch_size
    for start in range(0, len(waiting), size):
        yield from answerer.answers(waiting[start : start + size], phases)
