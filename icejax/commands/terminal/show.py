"""The output of a command line: answers on stdout, and a table of their cost. `icejax.commands.generate` calls it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.table import Table

from icejax.commands.terminal.phases import Phases
from icejax.commands.terminal.printer import Printer, tell_only_thoughts
from icejax.commands.terminal.process import escaped, is_unicode, uncut, write
from icejax.engine.response import GenerationResponse, join

WIDE = 11  # terminal columns per table column: in a narrower terminal an answer is a column, not a row


def answers(
    stream: Iterator[GenerationResponse], phases: Phases, *, rows: int, total: int, streaming: bool
) -> Iterator[GenerationResponse]:
    """Yields the whole answers in the order of their rows; with `streaming`, prints the only answer as its pieces come.

    Args:
        total: maximum number of tokens of all answers together.
    """
    pieces: dict[int, list[GenerationResponse]] = {}
    printer, next_row = Printer(phases), 0
    with uncut() if streaming else contextlib.nullcontext():
        for count, piece in enumerate(stream, start=1):
            if streaming:
                printer.piece(piece)
            else:
                phases("tokens", count, total)
            pieces.setdefault(piece.row, []).append(piece)
            while next_row in pieces and pieces[next_row][-1].finish_reason is not None:
                if next_row == rows - 1:
                    phases.stop()
                whole = join(pieces.pop(next_row))
                if streaming:
                    printer.end(whole)
                yield whole
                next_row += 1


def answer(response: GenerationResponse, arguments: argparse.Namespace, console: Console, name: Any = None) -> None:
    """Prints a whole answer, as text or as JSON with the id `name` of its prompt."""
    if not arguments.json:
        write(escaped(response.text) + "\n")
        return tell_only_thoughts(response, console)
    fields = answer_fields(response)
    fields = fields if name is None else {"id": name} | fields
    write(escaped(json.dumps(fields, ensure_ascii=not is_unicode())) + "\n")


def answer_fields(response: GenerationResponse) -> dict[str, Any]:
    """Returns an answer and its cost as JSON."""
    fields = dataclasses.asdict(response) | {"reasoning_content": response.reasoning_content}
    fields |= fields.pop("run")
    for other in ("row", "prompt_logprobs", "attention"):  # the order of the lines says it; no command asks for them
        del fields[other]
    return fields


def table(responses: list[GenerationResponse], console: Console) -> RenderableType:
    """Returns the cost of every answer: a row each, or a column each if the terminal is too narrow for rows."""
    run = responses[0].run
    budget = f", budget {run.budget}" if run.budget is not None else ""
    title = f"{run.cache} cache{budget}, {run.dtype}, {run.device}"
    figures = [_figures(response) for response in responses]
    names = max(figures, key=len)  # an answer of one token has no steps, and fewer figures
    if console.width >= WIDE * len(names):
        table = Table(title=title, box=SIMPLE, pad_edge=False)
        for name in names:
            table.add_column(name, justify="right")
        for row in figures:
            table.add_row(*(row.get(name, "-") for name in names))
        return table
    num_columns, tables = max(1, (console.width - 12) // 12), []
    for start in range(0, len(figures), num_columns):
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column(no_wrap=True)
        for name in names:
            table.add_row(name, *(row.get(name, "-") for row in figures[start : start + num_columns]))
        tables.append(table)
    return Group(title, *tables)


def _figures(r: GenerationResponse) -> dict[str, str]:
    figures = {
        "prompt": str(r.prompt_tokens),
        "new": str(r.new_tokens),
        "ended by": r.finish_reason,
        "first token": f"{r.ttft_s:.2f} s",
        "compiling": f"{r.compile_s:.2f} s",
        "per token": f"{r.tpot_s * 1e3:.1f} ms" if r.tpot_s is not None else "-",
        "KV device": _size(r.run.device_kv_bytes + r.run.digest_bytes),
        "KV host": _size(r.run.host_kv_bytes),
        "full KV": _size(r.full_kv_bytes),
    }
    if r.estimated_error is not None:
        figures |= {"error, estimated": f"{r.estimated_error:.1%}", "budget used": f"{r.budget_used:.0f}"}
    if r.expert_hit_rate is not None:
        figures |= {"expert hits": f"{r.expert_hit_rate:.0%}", "per token, of experts": _size(int(r.expert_bytes_per_token))}
    return figures


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
