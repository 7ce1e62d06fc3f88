"""Speed, memory and quality of rounded weights: ``python -m bench.weights``.

The output is one JSON line per format of weights, batch and cache: tokens per second and seconds to the first token (medians,
without compilation), bytes of weights and of the cache, perplexity per byte of held-out text, and pass keys found. Only weights
are rounded, not activations. Perplexity is measured with exact attention, and pass keys are asked for one by one, so both are
the same for every batch. Both need byte tokens: with another tokenizer they are left out, and `left_out` says why.

`--humaneval FILE` adds pass@1 of HumanEval (`bench/humaneval.py`), the same for every batch. Completions are always written to
a file. They are run only with `--run-code`, inside `icejax/sandbox/programs.py`, which closes the network and files. `--shape`
takes random weights of a published shape instead of a checkpoint; `code_bytes` is their size on a GPU or TPU, where a four-bit
code takes half a byte and not one.
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
from bench import humaneval
from bench.flags import listed, numbers
from bench.needle import language
from bench.needle.evaluate import SHORTEST, evaluate
from bench.panel import reads_bytes
from bench.program.compile import abstract_model
from bench.steps import shapes
from bench.steps.sizes import nbytes
from bench.steps.subjects import Icejax
from icejax.api.generate import ASSETS
from icejax.checkpoint.quantized.rounding import METHODS
from icejax.checks.errors import InputError
from icejax.models.decoder import CausalLM
from icejax.runtime import devices

PLAIN = "plain"  # weights in the dtype of --dtype
CACHES = {"full": icejax.Full()} | {f"clustered-{n}": icejax.Clustered(budget=n) for n in (64, 256)}
TASK, LENGTH = "single", 1024  # task of the pass keys; bytes of a piece of text


def timed(model: CausalLM, policy: icejax.CachePolicy, *, batch: int, prompt: int, steps: int, repeats: int) -> dict[str, Any]:
    """Returns seconds and sizes of a batch of prompts of random tokens."""
    sizes = dict(context=prompt, batch=batch, steps=steps, filled=False)
    subject, ttfts = Icejax(model, policy, **sizes), []
    subject.step()  # compiles all programs
    subject.rest()
    for _ in range(repeats):
        subject = None  # frees the cache, or two would be in memory
        subject = Icejax(model, policy, **sizes)
        ttfts.append(subject.ttft_s)
    for _ in range(subject.warm_up):
        subject.step()
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        subject.step()
        seconds.append(time.perf_counter() - started)
    tpot, row = float(np.median(seconds)), subject.row()
    sizes_in_bytes = {name: row[name] for name in ("weight_bytes", "device_kv_bytes", "digest_bytes", "host_kv_bytes")}
    return dict(tokens_per_s=round(batch / tpot, 2), tpot_s=round(tpot, 6), ttft_s=float(np.median(ttfts))) | sizes_in_bytes


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row per weights, batch and cache; InputError for invalid options."""
    weights, shape = listed("--weights", arguments.weights, (PLAIN, *METHODS)), arguments.shape
    caches, batches = listed("--caches", arguments.caches, CACHES), numbers("--batches", arguments.batches)
    (prompt,) = numbers("--prompt-tokens", str(arguments.prompt_tokens), least=SHORTEST if shape is None else 1)
    counts = {
        name: numbers(f"--{name}", str(getattr(arguments, name.replace("-", "_"))))[0]
        for name in ("steps", "repeats", "questions", "pieces", "new-tokens")
    }
    problems = _problems(arguments)
    asking = humaneval.Asking(chat=arguments.chat, new_tokens=counts["new-tokens"], batch=max(batches))
    texts = [piece for _, kind_pieces in language.pieces(LENGTH, counts["pieces"]) for piece in kind_pieces]
    model = None
    model_name = shape or ("bundled" if arguments.model == ASSETS else Path(arguments.model).resolve().name)
    for name in weights:
        del model  # or two models would be in memory
        model, tokenizer = _load(arguments, name)
        left_out = _left_out(tokenizer)
        labels = dict(model=model_name, weights=model.dtype if name == PLAIN else name, prompt_tokens=prompt, left_out=left_out)
        labels |= dict(perplexity=None if left_out else round(float(2 ** language.bits(model, texts).mean()), 4))
        if shape is not None:
            abstract = abstract_model(shape, dtype=model.dtype, rounding=METHODS.get(name))
            labels |= dict(shape=shape, code_bytes=nbytes(nnx.state(abstract)))
        for cache, policy in ((cache, CACHES[cache]) for cache in caches):
            quality = dict(needle=None if left_out else _keys_found(model, policy, prompt, counts["questions"]))
            if problems:
                file = Path(arguments.completions) / f"{model_name}-{labels['weights']}-{cache}.jsonl"
                completed = humaneval.complete(model, tokenizer, problems, policy, asking)
                quality |= dict(humaneval=humaneval.score(completed, file, run_code=arguments.run_code))
            for batch in batches:
                sizes = dict(batch=batch, prompt=prompt, steps=counts["steps"], repeats=counts["repeats"])
                yield labels | dict(cache=cache, batch=batch) | timed(model, policy, **sizes) | quality | versions(model)


def _problems(arguments: argparse.Namespace) -> list[humaneval.Problem]:
    """Returns the problems of `--humaneval`, none without it; InputError if they cannot be asked or safely run."""
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
    """Returns a model with its matrices in the format `name`, and its tokenizer; None for random weights."""
    if arguments.shape is None:
        return icejax.load(arguments.model, dtype=arguments.dtype, quantize=None if name == PLAIN else name)
    dtype = arguments.dtype or ("float32" if devices.platform() == "cpu" else "bfloat16")  # the dtypes of a loaded checkpoint
    return shapes.drawn(abstract_model(arguments.shape, dtype=dtype, rounding=METHODS.get(name))), None


def _left_out(tokenizer: Any) -> str | None:
    """Returns why perplexity and pass keys are left out; None if they are measured."""
    if tokenizer is None:
        return "weights are random"
    return None if reads_bytes(tokenizer) else "perplexity and pass keys are of byte tokens, this tokenizer has others"


def _keys_found(model: CausalLM, policy: icejax.CachePolicy, length: int, questions: int) -> dict[str, Any]:
    row = evaluate(model, policy, TASK, length=length, questions=questions, seed=0)
    return {key: row[key] for key in ("exact", "low", "high", "questions")}


def versions(model: CausalLM) -> dict[str, str]:
    """Returns the device, dtype and versions of a row."""
    package_versions = dict(device=devices.device_name(), dtype=model.dtype, icejax=icejax.__version__, jax=jax.__version__)
    return package_versions | dict(python=sys.version.split()[0])


def _table(printed: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2))
    numeric = ("batch", "tokens/s", "first token, s", "MiB weights", "MiB KV", "perplexity", "keys found", "pass@1")
    for name in ("weights", "cache", *numeric):
        table.add_column(name, justify="right" if name in numeric else "left")
    for row in printed:
        cache_bytes = sum(row[name] for name in ("device_kv_bytes", "digest_bytes", "host_kv_bytes"))
        sizes = (f"{row['weight_bytes'] / 2**20:.1f}", f"{cache_bytes / 2**20:.1f}")
        speed = (f"{row['tokens_per_s']:.1f}", f"{row['ttft_s']:.3f}")
        quality = ("", "") if row["left_out"] else (f"{row['perplexity']:.3f}", f"{row['needle']['exact']:.2f}")
        code = row.get("humaneval")
        passed = "" if code is None else f"{code['pass_at_1']:.3f}" if code["ran"] else "not run"
        table.add_row(row["weights"], row["cache"], str(row["batch"]), *speed, *sizes, *quality, passed)
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.weights", description=__doc__.splitlines()[0])
    formats = ",".join((PLAIN, *METHODS))
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", default=ASSETS, help="checkpoint folder (default: the bundled one)")
    source.add_argument("--shape", choices=tuple(shapes.SHAPES), help="random weights of a published shape")
    parser.add_argument("--dtype", help="as icejax.generate has it")
    parser.add_argument("--weights", default=formats, help="comma-separated (default: %(default)s)")
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
    arguments, printed = parser.parse_args(argv), []
    devices.set_limits()
    try:
        for row in rows(arguments):
            print(json.dumps(row), flush=True)
            printed.append(row)
    except icejax.InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    Console(stderr=True, width=140).print(_table(printed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
