"""What rounded weights cost and lose: ``python -m bench.weights``.

One JSON line for weights, batch and cache: tokens per second and seconds to the first token (medians; what is compiled is
compiled before), bytes of weights and of the cache, perplexity per byte of held-out text, and pass keys found. Activations stay
as they are: only weights have fewer bits. Perplexity is that of the weights with exact attention, and pass keys are asked for
one by one, so both are the same for every batch. Both are of byte tokens: with another tokenizer they are left out, and
`left_out` says why.

`--humaneval FILE` adds pass@1 of HumanEval (`bench/humaneval.py`), the same for every batch. Completions are written; what a
model wrote is run with `--run-code` alone, where `bench/sandbox.py` can keep it from the network and from files. `--shape`
takes random weights of a published shape instead of a checkpoint: `code_bytes` is what they take on a GPU or TPU, where codes
of four bits take half a byte and not one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

import icejax
from bench import humaneval, shapes
from bench.flags import listed, numbers
from bench.needle import language
from bench.needle.evaluate import SHORTEST, evaluate
from bench.panel import reads_bytes
from bench.program.compile import abstract_model
from bench.sizes import nbytes
from bench.subjects import Icejax
from icejax.api.generate import ASSETS
from icejax.checkpoint.quantized.rounding import METHODS
from icejax.checks.errors import InputError
from icejax.models.decoder import CausalLM
from icejax.runtime import devices

PLAIN = "plain"  # as --dtype says
CACHES = {"full": icejax.Full()} | {f"clustered-{n}": icejax.Clustered(budget=n) for n in (64, 256)}
TASK, LENGTH = "single", 1024  # pass keys; bytes of a piece of text


def timed(model: CausalLM, policy: icejax.CachePolicy, *, batch: int, prompt: int, steps: int, repeats: int) -> dict[str, Any]:
    """Returns seconds and sizes of a batch of prompts of random tokens."""
    sizes = dict(context=prompt, batch=batch, steps=steps, filled=False)
    subject, first = Icejax(model, policy, **sizes), []
    subject.step()  # what is compiled from here on is compiled already
    subject.rest()
    for _ in range(repeats):
        subject = None  # or two caches would be there
        subject = Icejax(model, policy, **sizes)
        first.append(subject.ttft_s)
    for _ in range(subject.warm_up):
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
    weights, shape = listed("--weights", arguments.weights, (PLAIN, *METHODS)), arguments.shape
    caches, batches = listed("--caches", arguments.caches, CACHES), numbers("--batches", arguments.batches)
    (prompt,) = numbers("--prompt-tokens", str(arguments.prompt_tokens), least=SHORTEST if shape is None else 1)
    counts = {
        name: numbers(f"--{name}", str(getattr(arguments, name.replace("-", "_"))))[0]
        for name in ("steps", "repeats", "questions", "pieces", "new-tokens")
    }
    problems = _problems(arguments)
    asking = humaneval.Asking(chat=arguments.chat, new_tokens=counts["new-tokens"], batch=max(batches))
    texts = [piece for _, some in language.pieces(LENGTH, counts["pieces"]) for piece in some]
    model = None
    called = shape or ("bundled" if arguments.model == ASSETS else Path(arguments.model).resolve().name)
    for name in weights:
        del model  # or two would be there
        model, tokenizer = _load(arguments, name)
        left_out = _left_out(tokenizer)
        what = dict(model=called, weights=model.dtype if name == PLAIN else name, prompt_tokens=prompt, left_out=left_out)
        what |= dict(perplexity=None if left_out else round(float(2 ** language.bits(model, texts).mean()), 4))
        if shape is not None:
            stored = abstract_model(shape, dtype=model.dtype, rounding=METHODS.get(name))
            what |= dict(shape=shape, code_bytes=nbytes(nnx.state(stored)))
        for cache, policy in ((cache, CACHES[cache]) for cache in caches):
            found = dict(needle=None if left_out else _keys_found(model, policy, prompt, counts["questions"]))
            if problems:
                file = Path(arguments.completions) / f"{called}-{what['weights']}-{cache}.jsonl"
                completed = humaneval.complete(model, tokenizer, problems, policy, asking)
                found |= dict(humaneval=humaneval.score(completed, file, run_code=arguments.run_code))
            for batch in batches:
                sizes = dict(batch=batch, prompt=prompt, steps=counts["steps"], repeats=counts["repeats"])
                yield what | dict(cache=cache, batch=batch) | timed(model, policy, **sizes) | found | versions(model)


def _problems(arguments: argparse.Namespace) -> list[humaneval.Problem]:
    """Returns what HumanEval asks, nothing without the option; InputError if it cannot be asked, or not run as it should be."""
    if arguments.humaneval is None:
        if arguments.run_code:
            raise InputError("--run-code runs what a model writes for --humaneval: give its file too")
        return []
    if arguments.shape is not None:
        raise InputError("--humaneval asks a model that has learned something: give --model instead of --shape")
    problems = humaneval.read(arguments.humaneval)
    if arguments.run_code:
        humaneval.check_sandbox()
    return problems


def _load(arguments: argparse.Namespace, name: str) -> tuple[CausalLM, Any]:
    """Returns a model whose matrices stand as said, and its tokenizer, which random weights have none of."""
    if arguments.shape is None:
        return icejax.load(arguments.model, dtype=arguments.dtype, quantize=None if name == PLAIN else name)
    dtype = arguments.dtype or ("float32" if devices.platform() == "cpu" else "bfloat16")  # as a checkpoint would be loaded
    return shapes.drawn(abstract_model(arguments.shape, dtype=dtype, rounding=METHODS.get(name))), None


def _left_out(tokenizer: Any) -> str | None:
    """Says why there is neither perplexity nor a pass key; None: there are both."""
    if tokenizer is None:
        return "weights are random"
    return None if reads_bytes(tokenizer) else "perplexity and pass keys are of byte tokens, this tokenizer has others"


def _keys_found(model: CausalLM, policy: icejax.CachePolicy, length: int, questions: int) -> dict[str, Any]:
    row = evaluate(model, policy, TASK, length=length, questions=questions, seed=0)
    return {key: row[key] for key in ("exact", "low", "high", "questions")}


def versions(model: CausalLM) -> dict[str, str]:
    """Returns on what a row was measured."""
    named = dict(device=devices.device_name(), dtype=model.dtype, icejax=icejax.__version__, jax=jax.__version__)
    return named | dict(python=sys.version.split()[0])


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2))
    counted = ("batch", "tokens/s", "first token, s", "MiB weights", "MiB KV", "perplexity", "keys found", "pass@1")
    for name in ("weights", "cache", *counted):
        table.add_column(name, justify="right" if name in counted else "left")
    for row in found:
        kept = sum(row[name] for name in ("device_kv_bytes", "digest_bytes", "host_kv_bytes"))
        sizes = (f"{row['weight_bytes'] / 2**20:.1f}", f"{kept / 2**20:.1f}")
        speed = (f"{row['tokens_per_s']:.1f}", f"{row['ttft_s']:.3f}")
        lost = ("", "") if row["left_out"] else (f"{row['perplexity']:.3f}", f"{row['needle']['exact']:.2f}")
        code = row.get("humaneval")
        passed = "" if code is None else f"{code['pass_at_1']:.3f}" if code["ran"] else "not run"
        table.add_row(row["weights"], row["cache"], str(row["batch"]), *speed, *sizes, *lost, passed)
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.weights", description=__doc__.splitlines()[0])
    every = ",".join((PLAIN, *METHODS))
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", default=ASSETS, help="checkpoint folder (default: the bundled one)")
    which.add_argument("--shape", choices=tuple(shapes.SHAPES), help="random weights of a published shape")
    parser.add_argument("--dtype", help="as icejax.generate has it")
    parser.add_argument("--weights", default=every, help="comma-separated (default: %(default)s)")
    parser.add_argument("--caches", default=",".join(CACHES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--batches", default="1,2,4,8,16", help="comma-separated (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=2048, metavar="N", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=64, metavar="N", help="timed (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="first tokens timed (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=32, metavar="N", help="pass keys asked for (default: %(default)s)")
    parser.add_argument("--pieces", type=int, default=16, metavar="N", help="of held-out text, by kind (default: %(default)s)")
    parser.add_argument("--humaneval", metavar="FILE", help="HumanEval.jsonl or .jsonl.gz of openai/human-eval, for pass@1")
    parser.add_argument("--run-code", action="store_true", help="run what the model wrote, kept from network and files")
    parser.add_argument("--chat", action="store_true", help="ask HumanEval in the tokenizer's chat template")
    parser.add_argument("--new-tokens", type=int, default=512, metavar="N", help="of a HumanEval answer (default: %(default)s)")
    parser.add_argument(
        "--completions", default="humaneval", metavar="DIR", help="where they are written (default: %(default)s)"
    )
    arguments, found = parser.parse_args(argv), []
    devices.raise_pinned_limit()
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
