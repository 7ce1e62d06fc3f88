"""Errors of cache policies step by step along 512 tokens: ``python -m bench.compounding [--model M] [--out DIR]``.

A text with a question at its end is prefilled exactly once, for all policies: to write a function of the text again
(`bench.texts`), or a pass key where tokens are bytes. The full cache writes a continuation, greedily and past its end token.
Every policy is forced along it, token by token, and writes a text of its own from where it would first leave it. A JSON line
per policy, budget and seed has:

- `kl`, `agreement`: KL divergence of the next token from exact attention's, in nats, and share of steps whose most likely token
  is the same, along the full cache's text; a mean of every 16 steps.
- `diverged`, `equal`: number of equal tokens before the first that differs in the policy's own text (null: none differs), and
  share of tokens that are equal at the same place.
- `own_kl`, `own_agreement`: the same as `kl` and `agreement`, along the policy's own text.
- `error`, `error_95`: relative L2 error of attention in the first 16 steps, as in `bench.compare --model`.
- `moved`, `moved_95`, `moved_bytes`: pages that a KV head of a layer fetches per step, mean and 95th percentile, where single
  tokens count as parts of a page, and keys without values as half; bytes moved per step, of a model with 16 bits.
- `same`: share of a step's pages that the step before had too. Where single tokens are fetched last, it is of their pages.

The lines of `full` tell rounding: decoding against exact attention over the whole text. A seed is that of the text, and of all
that a policy draws. Policies are those of `bench.compare`, and two more:

- `misplaced:share=0.05`: `clustered` with a share of the prompt's tokens moved to random pages before digests are made; with
  `share=1` pages hold random tokens. Pages of new tokens hold neighbours, as in `clustered`.
- `random-pages`: sinks, window and random pages of the budget, drawn again in every step; nothing else counts.

Lines go to stdout, and with `--out` to DIR/compounding.jsonl, whose lines are not measured again; then DIR/compounding.md and
DIR/compounding.png are written, and with `--page` these alone. Qwen2.5-Coder-0.5B takes some ten minutes per seed with the
default policies on two cores, and two with `--new-tokens 64`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench import panel, texts
from bench.compare import cells
from bench.compounding import page, picture, policies, rows
from bench.compounding.steps import BIN
from bench.flags import make_folder, numbers
from icejax.api.generate import ASSETS
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer
from icejax.runtime import devices
from icejax.runtime.compile_cache import keep_programs
from icejax.runtime.host_reads.choose import try_ahead

POLICIES = "clustered,coded,topk,streaming,random-pages"
NAME = "compounding"  # of the files in DIR


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.compounding", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ASSETS, help=panel.ANY)
    parser.add_argument("--policies", default=POLICIES, help="comma-separated, beside full (default: %(default)s)")
    parser.add_argument("--budgets", default="64", help="tokens or shares, comma-separated (default: %(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default: %(default)s)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=512, help=f"steps, a multiple of {BIN} (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder of lines, page and plot; a run that is there continues")
    parser.add_argument("--page", action="store_true", help="only write page and plot of DIR again")
    arguments = parser.parse_args(argv)
    devices.set_limits()
    try_ahead()
    try:
        if arguments.page and arguments.out is None:
            raise InputError("--page needs --out, the folder of the lines")
        if not arguments.page:
            _measure(arguments)
        if arguments.out is not None:
            _write(arguments.out)
    except InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return 0


def _measure(arguments: argparse.Namespace) -> None:
    length = integer("--length", arguments.length, least=texts.SHORTEST + texts.LONGEST)
    seeds = numbers("--seeds", arguments.seeds, least=0, most=texts.FAR - 1)
    if integer("--new-tokens", arguments.new_tokens, least=BIN, most=2**14) % BIN:
        raise InputError(f"--new-tokens must be a multiple of {BIN}, got {arguments.new_tokens}")
    names = [name for name in arguments.policies.split(",") if name != rows.REFERENCE.name]
    contenders, left_out = policies.contenders(names, arguments.budgets.split(","), length)
    if left_out and not contenders:
        raise InputError(f"--budgets must hold one that a policy can have: {left_out[0]}")
    for line in left_out:
        print(f"bench.compounding: {line}", file=sys.stderr)
    path = None
    if arguments.out is not None:
        make_folder(arguments.out)
        path = arguments.out / f"{NAME}.jsonl"
    ((name, model, tokenizer),) = panel.readers(arguments.model, dtype="float32")
    keep_programs(None)
    sizes = dict(length=length, steps=arguments.new_tokens, seeds=seeds)
    for row in rows.measured(name, model, tokenizer, contenders, old=rows.read(path) if path else {}, **sizes):
        print(json.dumps(row), flush=True)
        if path is not None:
            cells.add(path, row)


def _write(folder: Path) -> None:
    """Writes the page and the plot of a folder's rows; InputError without rows."""
    found = [*rows.read(folder / f"{NAME}.jsonl").values()]
    if not found:
        raise InputError(f"{folder / NAME}.jsonl must hold lines of bench.compounding: it has none")
    page.write(found, folder / f"{NAME}.md")
    picture.draw(found, folder / f"{NAME}.png")


if __name__ == "__main__":
    sys.exit(main())
