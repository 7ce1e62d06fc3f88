"""What a command line shows: progress on stderr, answers on stdout, their cost in a table."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from icejax.generation import GenerationResponse, join
from icejax.launch import harmless, is_unicode, write


def progress(console: Console) -> Progress:
    """Returns progress bars, for a terminal only."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def answers(
    stream: Iterator[GenerationResponse], arguments: argparse.Namespace, bars: Progress, *, alone: bool
) -> list[GenerationResponse]:
    """Prints the answers of one batch, a single one as it comes, and returns them whole."""
    streaming = alone and not arguments.json and not arguments.no_stream
    pieces: dict[int, list[GenerationResponse]] = {}
    tokens = None
    for piece in stream:
        if streaming:
            bars.stop()  # the text is progress enough, and shares the terminal
            write(harmless(piece.text))
        elif tokens is None:
            tokens = bars.add_task("tokens", total=arguments.max_new_tokens)
        else:
            bars.update(tokens, completed=piece.new_tokens)
        pieces.setdefault(piece.row, []).append(piece)
    bars.stop()
    whole = [join(pieces[row]) for row in sorted(pieces)]
    if streaming:
        write("\n")
    else:
        for response in whole:
            write(harmless(_json(response) if arguments.json else response.text) + "\n")
    return whole


def _json(response: GenerationResponse) -> str:
    fields = dataclasses.asdict(response)
    del fields["row"]  # the order of the lines
    return json.dumps(fields, ensure_ascii=not is_unicode())


def table(responses: list[GenerationResponse]) -> Table:
    """The cost of every answer."""
    first = responses[0]
    budget = f", budget {first.budget}" if first.budget is not None else ""
    table = Table(title=f"{first.cache} cache{budget}, {first.dtype}, {first.device}", box=SIMPLE, pad_edge=False)
    for name in ("prompt", "new", "ended by", "first token", "per token", "KV device", "KV host", "full KV"):
        table.add_column(name, justify="right")
    for r in responses:
        tpot = f"{r.tpot_s * 1e3:.1f} ms" if r.tpot_s is not None else "-"
        sizes = (r.device_kv_bytes + r.digest_bytes, r.host_kv_bytes, r.full_kv_bytes)
        shown = [f"{size / 2**20:.1f} MiB" for size in sizes]
        table.add_row(str(r.prompt_tokens), str(r.new_tokens), r.finish_reason, f"{r.ttft_s:.2f} s", tpot, *shown)
    return table
