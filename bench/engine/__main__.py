"""Requests that come and go: ``python -m bench.engine --model qwen2.5-coder-0.5b``.

Every part compares two times or rates of the same run; `ratio` is the median over the repeats, `holds` whether it keeps `bar`:

- `batch`: tokens per second of 8 rows that decode, over those of one row
- `prefill`: a prompt of 8,192 tokens is prefilled while 4 rows decode. `itl`: the 99th percentile between tokens of these rows,
  over 0.150 s and their step without a prefill together; `ttft`: the prompt's first token, over the same in an idle engine
- `lines`: answer tokens per second of 64 unlike requests in one stream, over batches of like length, one after another
- `prefix`: the first token of a question about a stored document of 16,384 tokens, over the same without a store. `ttft`: the
  document is in memory; `disk_ttft`: an engine that has just started reads it from the disk

Prompts are random tokens of a fixed seed, and answers are greedy, without an end-of-text token, so counts do not depend on the
model. The first round of every part compiles and is not timed; `compile_s` is what tracing and compiling took of the others'
time. The output is one JSON line per row; a table goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from bench import published
from bench.engine import batch, lines, prefill, prefix
from bench.engine.subject import Sizes, Subject
from bench.flags import listed
from icejax.cache.options import make_policy
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer
from icejax.runtime import devices

PARTS: dict[str, Callable[[Subject, Sizes], Iterator[dict]]] = {
    "batch": batch.measure,
    "prefill": prefill.measure,
    "lines": lines.measure,
    "prefix": prefix.measure,
}
COLUMNS = ("part", "measure", "ratio", "ratio_low", "ratio_high", "bar", "holds")


def _folder(name: str) -> Path | str | None:
    """Returns the folder of a published model's name, and anything else as it stands; None: the bundled model."""
    if name in published.MODELS:
        return published.folder(name, say=lambda line: print(line, file=sys.stderr, flush=True))
    return name or None


def _sizes(arguments: argparse.Namespace) -> Sizes:
    numbers = {}
    for field in fields(Sizes):
        flag = f"--{field.name.replace('_', '-')}"
        numbers[field.name] = integer(flag, getattr(arguments, field.name), least=field.metadata["least"], most=2**50)
    return Sizes(**numbers)


def _table(printed: list[dict]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2))
    for name in (*COLUMNS, "seconds and tokens per second"):
        table.add_column(name.replace("_", " "), justify="left" if name in ("part", "measure") else "right")
    for row in printed:
        times = " ".join(f"{name}={value:g}" for name, value in row.items() if name.endswith("_s"))
        table.add_row(*(str(row[name]) for name in COLUMNS), times)
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="DIR", default="", help="or a name of bench.published (default: the bundled model)")
    parser.add_argument("--cache", default="clustered", help="default: %(default)s")
    parser.add_argument("--dtype", help="default: float32 on a CPU, else the checkpoint's")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated (default: %(default)s)")
    for field in fields(Sizes):
        flag, text = f"--{field.name.replace('_', '-')}", f"{field.metadata['help']} (default: %(default)s)"
        parser.add_argument(flag, type=int, default=field.default, metavar="N", help=text)
    arguments = parser.parse_args(argv)
    printed = []
    try:
        sizes, names, policy = _sizes(arguments), listed("--parts", arguments.parts, PARTS), make_policy(arguments.cache, {})
        subject = Subject(_folder(arguments.model), policy, dtype=arguments.dtype)
        labels = dict(model=Path(arguments.model).name or "bundled", cache=arguments.cache, repeats=sizes.repeats)
        labels |= dict(device=devices.device_name(), dtype=subject.model.dtype, version=f"jax {jax.__version__}")
        for name in names:
            for row in PARTS[name](subject, sizes):
                print(json.dumps(row | labels), flush=True)
                printed.append(row)
    except InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    Console(stderr=True, width=160).print(_table(printed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
