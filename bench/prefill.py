"""Time and peak memory of prefill: ``python -m bench.prefill --lengths 8192,32768``.

Every row runs in a process of its own, so its peak memory is its own: one prefill to compile, then `--repeats` timed prefills,
of which the row has the median. With `--repeats 0` a single prefill is timed, compilation included. `transformers` is its
LlamaForCausalLM with SDPA and a DynamicCache, on random weights of the same shape. The output is one JSON line per row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import jax
import numpy as np

from bench.flags import listed, numbers
from bench.memory import resident
from bench.steps import shapes
from icejax.cache.options import make_policy
from icejax.checkpoint.load import DTYPES
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer, one_of
from icejax.engine import layers as walk
from icejax.engine.plan import make_plan
from icejax.engine.prefill import prefill
from icejax.ops.attention.dense import Attended, causal_with_lse
from icejax.runtime import devices

POLICIES = ("full", "clustered", "transformers")


def _in_blocks(q, k, v, *, lengths, window, scoring):
    """Returns the attention of `causal` on a platform without cuDNN."""
    out, lse = causal_with_lse(q, k, v, lengths=lengths, window=window, scoring=scoring)
    return Attended(out.astype(q.dtype), lse)


def _ours(policy: str, *, shape: str, layers: int | None, dtype: str, length: int, blocks: bool) -> tuple[Callable, str]:
    if blocks:
        walk.causal = _in_blocks  # only in this process, which runs one row
    model = shapes.model(shape, dtype=dtype, layers=layers)
    plan = make_plan(model, make_policy(policy, {}), batch_size=1, prompt_tokens=length, new_tokens=256)
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, length).tolist()

    def run() -> None:
        jax.block_until_ready(prefill(model, [prompt], plan))

    return run, f"jax {jax.__version__}"


def _transformers(*, shape: str, layers: int | None, length: int) -> tuple[Callable, str]:
    import torch
    import transformers

    raw = shapes.as_llama(shapes.raw_config(shape, layers=layers))
    config = transformers.LlamaConfig(**raw, attn_implementation="sdpa")
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))

    def run() -> None:
        with torch.no_grad():
            model(tokens, past_key_values=transformers.DynamicCache(config=config), logits_to_keep=1)

    return run, f"transformers {transformers.__version__}, torch {torch.__version__}"


def measure(policy: str, shape: str, layers: int | None, dtype: str, length: int, repeats: int, blocks: bool) -> dict:
    """Returns one row; the caller runs it in a process of its own."""
    sizes = dict(shape=shape, layers=layers, length=length)
    run, version = _transformers(**sizes) if policy == "transformers" else _ours(policy, dtype=dtype, blocks=blocks, **sizes)
    rss_before = resident()  # loading may have needed more for a moment
    if repeats:
        run()
    seconds = []
    for _ in range(max(1, repeats)):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    median = float(np.median(seconds))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return dict(policy=policy) | sizes | dict(
        prefill_s=round(median, 3), low_s=round(min(seconds), 3), high_s=round(max(seconds), 3), repeats=repeats,
        tokens_per_s=round(length / median, 1), peak_rss_bytes=1024 * peak, model_rss_bytes=rss_before,
        dtype="float32" if policy == "transformers" else dtype, blocks=blocks,
        device=devices.device_name(), version=version,
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.prefill", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=shapes.NAMES, default="bundled", help="default: %(default)s")
    parser.add_argument("--layers", type=int, help="of the shape")
    parser.add_argument("--lengths", default="8192,32768", help="tokens, comma-separated (default: %(default)s)")
    parser.add_argument("--policies", default="full,clustered", help=f"comma-separated, of {', '.join(POLICIES)}")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--blocks", action="store_true", help="our attention in blocks, also where cuDNN would run")
    arguments = parser.parse_args(argv)
    try:
        names, lengths = listed("--policies", arguments.policies, POLICIES), numbers("--lengths", arguments.lengths)
        integer("--repeats", arguments.repeats, least=0)
        raw = shapes.raw_config(arguments.shape, layers=arguments.layers)
        if "transformers" in names:
            shapes.as_llama(raw)
        one_of("--dtype", arguments.dtype, DTYPES)
        devices.set_limits()
        spawn = multiprocessing.get_context("spawn")
        for length, name in itertools.product(lengths, names):
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                sizes = (arguments.shape, arguments.layers, arguments.dtype, length, arguments.repeats, arguments.blocks)
                print(json.dumps(process.submit(measure, name, *sizes).result()), flush=True)
    except InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
