"""What rounded weights cost and lose: ``python -m bench.weights``.

One JSON line for weights, batch and cache: tokens per second and seconds to the first token (medians; what is compiled is
compiled before), bytes of weights and of the cache, perplexity per byte of held-out text, and pass keys found. Activations stay
as they are: only weights have fewer bits. On a CPU rounded matrices are dequantised (`coded` is false), and speed and bytes are
those of unrounded ones. Perplexity is that of the weights with exact attention, and pass keys are asked for one by one, so both
are the same for every batch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

import icejax
from bench.flags import listed, numbers
from bench.needle import language
from bench.needle.evaluate import SHORTEST, evaluate
from bench.subjects import Icejax
from icejax import memory
from icejax.checkpoint.rounding import METHODS
from icejax.generation import ASSETS
from icejax.models import CausalLM
from icejax.ops.quantized import Grouped

PLAIN = "plain"  # as --dtype says
CACHES = {"full": icejax.Full()} | {f"clustered-{n}": icejax.Clustered(budget=n) for n in (64, 256)}
TASK, LENGTH, WARM_UP = "single", 1024, 3  # pass keys; bytes of a piece of text; steps


def timed(model: CausalLM, policy: icejax.CachePolicy, *, batch: int, prompt: int, steps: int, repeats: int) -> dict[str, Any]:
    """Returns seconds and sizes of a batch of prompts of random tokens."""
    sizes = dict(context=prompt, batch=batch, steps=steps + WARM_UP, filled=False)
    Icejax(model, policy, **sizes).step()  # what is compiled from here on is compiled already
    first, subject = [], None
    for _ in range(repeats):
        subject = None  # or two caches would be there
        subject = Icejax(model, policy, **sizes)
        first.append(subject.ttft_s)
    for _ in range(WARM_UP):
        subject.step()
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        subject.step()
        seconds.append(time.perf_counter() - started)
    tpot, row = float(np.median(seconds)), subject.row()
    kept = {name: row[name] for name in ("weight_bytes", "device_kv_bytes", "digest_bytes", "host_kv_bytes")}
    return dict(tokens_per_s=round(batch / tpot, 2), tpot_s=round(tpot, 6), ttft_s=float(np.median(first))) | kept


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row per weights, batch and cache; InputError for options that are not sound."""
    weights = listed("--weights", arguments.weights, (PLAIN, *METHODS))
    caches, batches = listed("--caches", arguments.caches, CACHES), numbers("--batches", arguments.batches)
    (prompt,) = numbers("--prompt-tokens", str(arguments.prompt_tokens), least=SHORTEST)
    counts = {
        name: numbers(f"--{name}", str(getattr(arguments, name)))[0] for name in ("steps", "repeats", "questions", "pieces")
    }
    texts = [piece for _, some in language.pieces(LENGTH, counts["pieces"]) for piece in some]
    for name in weights:
        model, _ = icejax.load(arguments.model, dtype=arguments.dtype, quantize=None if name == PLAIN else name)
        what = dict(weights=model.dtype if name == PLAIN else name, coded=coded(model))
        what |= dict(perplexity=round(float(2 ** language.bits(model, texts).mean()), 4), prompt_tokens=prompt)
        for cache in caches:
            asked = dict(length=prompt, questions=counts["questions"], seed=0)
            needle = evaluate(model, CACHES[cache], TASK, **asked)
            found = {key: needle[key] for key in ("exact", "low", "high", "questions")}
            for batch in batches:
                sizes = dict(batch=batch, prompt=prompt, steps=counts["steps"], repeats=counts["repeats"])
                row = timed(model, CACHES[cache], **sizes)
                yield what | dict(cache=cache, batch=batch) | row | dict(needle=found) | versions(model)


def coded(model: CausalLM) -> bool:
    """Says whether any matrix stands as codes."""
    leaves = jax.tree.leaves(nnx.state(model), is_leaf=lambda x: isinstance(x, Grouped))
    return any(isinstance(x, Grouped) for x in leaves)


def versions(model: CausalLM) -> dict[str, str]:
    """Returns on what a row was measured."""
    named = dict(device=memory.device_name(), dtype=model.dtype, icejax=icejax.__version__, jax=jax.__version__)
    return named | dict(python=sys.version.split()[0])


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2))
    counted = ("batch", "tokens/s", "first token, s", "MiB weights", "MiB KV", "perplexity", "keys found")
    for name in ("weights", "cache", *counted):
        table.add_column(name, justify="right" if name in counted else "left")
    for row in found:
        kept = sum(row[name] for name in ("device_kv_bytes", "digest_bytes", "host_kv_bytes"))
        sizes = (f"{row['weight_bytes'] / 2**20:.1f}", f"{kept / 2**20:.1f}")
        speed = (f"{row['tokens_per_s']:.1f}", f"{row['ttft_s']:.3f}")
        lost = (f"{row['perplexity']:.3f}", f"{row['needle']['exact']:.2f}")
        table.add_row(row["weights"], row["cache"], str(row["batch"]), *speed, *sizes, *lost)
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.weights", description=__doc__.splitlines()[0])
    every = ",".join((PLAIN, *METHODS))
    parser.add_argument("--model", default=ASSETS, help="checkpoint folder of byte tokens (default: the bundled one)")
    parser.add_argument("--dtype", help="as icejax.generate has it")
    parser.add_argument("--weights", default=every, help="comma-separated (default: %(default)s)")
    parser.add_argument("--caches", default=",".join(CACHES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--batches", default="1,2,4,8,16", help="comma-separated (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=2048, metavar="N", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=64, metavar="N", help="timed (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="first tokens timed (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=32, metavar="N", help="pass keys asked for (default: %(default)s)")
    parser.add_argument("--pieces", type=int, default=16, metavar="N", help="of held-out text, by kind (default: %(default)s)")
    arguments, found = parser.parse_args(argv), []
    memory.raise_pinned_limit()
    try:
        for row in rows(arguments):
            print(json.dumps(row), flush=True)
            found.append(row)
    except icejax.InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    Console(stderr=True, width=140).print(_table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
