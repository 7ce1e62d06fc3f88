"""Time of a later text of a session: ``python -m bench.followup --model FOLDER --after 1024,8192``.

A session's later text runs through `icejax.engine.extend`. It should cost what it computes: a prefill of its own tokens, and
plain attention of its queries to all cached tokens, whatever room the context has left. So each row has the median seconds of

- `followup_s`: a text of n tokens after a cache, up to its first token's logits
- `prefill_s`: a prefill of n tokens without a cache
- `attention_s`: `jax.nn.dot_product_attention` of n queries to as many keys as the cache holds, in all layers
- `transformers_s` (with `--transformers`): the same text after a DynamicCache, fp32 SDPA

and `ratio`, followup_s / (prefill_s + attention_s). A turn is a text and one decode step; a warm-up of two turns is not timed.
`compiled` counts the programs that later turns compiled. Caches after more than 8,192 tokens are filled as in `bench.decode`.
The output is one JSON line per row; a table goes to stderr.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.flags import listed, numbers
from bench.steps.fill import fill
from icejax.api.generate import ASSETS
from icejax.cache.options import make_policy
from icejax.checkpoint.load import load_model
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer
from icejax.engine.decode.step import DecodePrograms
from icejax.engine.extend import extend
from icejax.engine.plan import make_plan
from icejax.engine.prefill import prefill
from icejax.models.decoder import CausalLM
from icejax.runtime import compile_clock, devices

POLICIES = ("full", "clustered", "coded")
WARM_UP = 2  # turns
LONGEST_PREFILL = 8192  # tokens


def median_s(run: Callable[[], object], repeats: int) -> float:
    """Returns the median seconds of `run`, after one call that is not timed."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds))


def attention_s(model: CausalLM, *, behind: int, new: int, repeats: int) -> float:
    """Returns the seconds of plain attention of `new` queries to `behind` keys and values, in all layers."""
    config = model.config
    shapes = ((new, config.num_attention_heads), *((behind, config.num_key_value_heads),) * 2)
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, *shape, config.head_dim)) for key, shape in zip(keys, shapes, strict=True))
    attend = jax.jit(jax.nn.dot_product_attention)
    return config.num_hidden_layers * median_s(lambda: attend(q, k, v), repeats)


def followup(model: CausalLM, policy, *, behind: int, new: int, context: int, repeats: int) -> tuple[float, int]:
    """Returns the median seconds of a text of `new` tokens behind `behind`, and how many programs the timed turns compiled."""
    sizes = dict(batch_size=1, prompt_tokens=behind, new_tokens=context - behind)
    plan, rng = make_plan(model, policy, **sizes, extends=True), np.random.default_rng(0)
    if behind <= LONGEST_PREFILL:
        tokens = rng.integers(0, model.config.vocab_size, behind).tolist()
        state, step, pool = prefill(model, [tokens], plan)
    else:
        state, pool = fill(model, plan, policy, context=behind)
    seconds, compiled = [], [0]

    def count(number: int) -> None:
        compiled[0] += len(seconds) >= WARM_UP

    with compile_clock.clock().telling(count):
        for _ in range(WARM_UP + repeats):
            text = rng.integers(0, model.config.vocab_size, new).tolist()
            jax.block_until_ready(state)
            started = time.perf_counter()
            state, step, pool = extend(model, text, plan, state, pool)
            step.logits.block_until_ready()
            seconds.append(time.perf_counter() - started)
            state, step, pool = DecodePrograms(model, plan).step(state, pool)
    return float(np.median(seconds[WARM_UP:])), compiled[0]


def transformers_s(folder: Path, *, behind: int, new: int, repeats: int) -> float:
    """Returns the seconds that transformers takes for `new` tokens behind a DynamicCache of `behind`."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = model.config
    cache, heads = transformers.DynamicCache(config=config), config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(1, heads, behind, size), torch.randn(1, heads, behind, size), layer)
    text = torch.randint(config.vocab_size, (1, new))

    def run() -> None:
        with torch.no_grad():
            model(text, past_key_values=cache, logits_to_keep=1)
        cache.crop(-new)

    return median_s(run, repeats)


def rows(
    model: CausalLM, names: list[str], lengths: list[int], texts: list[int], contexts: list[int | None], *, repeats: int,
    peer: Path | None,
) -> Iterator[dict]:  # fmt: skip
    """Yields a row per number of cached tokens, number of new tokens, policy and context length.

    Args:
        contexts: context lengths; None: what the turns need.
        peer: folder of the model that transformers is timed with.
    """
    for behind, new in itertools.product(lengths, texts):
        prompt = np.random.default_rng(1).integers(0, model.config.vocab_size, new).tolist()
        alone = make_plan(model, make_policy("full", {}), batch_size=1, prompt_tokens=new, new_tokens=1)
        prefill_s = median_s(lambda prompt=prompt, alone=alone: prefill(model, [prompt], alone)[1].logits, repeats)
        times = dict(prefill_s=prefill_s, attention_s=attention_s(model, behind=behind, new=new, repeats=repeats))
        peer_s = None if peer is None else transformers_s(peer, behind=behind, new=new, repeats=repeats)
        for name, context in itertools.product(names, contexts):
            room = context or behind + (WARM_UP + repeats + 1) * (new + 1)
            sizes = dict(behind=behind, new=new, context=room, repeats=repeats)
            seconds, compiled = followup(model, make_policy(name, {}), **sizes)
            ratio = seconds / (prefill_s + times["attention_s"])
            measured = times | dict(followup_s=seconds, transformers_s=peer_s, ratio=ratio)
            measured = {key: None if value is None else round(value, 4) for key, value in measured.items()}
            yield dict(policy=name) | sizes | measured | dict(compiled=compiled)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.followup", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a model folder (default: the bundled model)")
    parser.add_argument("--behind", default="1024,8192", help="cached tokens, comma-separated (default: %(default)s)")
    parser.add_argument("--new", default="14,64,256", help="tokens of the text, comma-separated (default: %(default)s)")
    parser.add_argument("--context-lengths", help="tokens, comma-separated (default: what the turns need)")
    parser.add_argument("--policies", default="full,clustered,coded", help=f"comma-separated, of {', '.join(POLICIES)}")
    parser.add_argument("--repeats", type=int, default=5, help="timed turns (default: %(default)s)")
    parser.add_argument("--transformers", action="store_true", help="time transformers' DynamicCache too")
    arguments = parser.parse_args(argv)
    table = Table(box=None, header_style="bold", padding=(0, 2))
    columns = ("behind", "new", "context", "followup_s", "prefill_s", "attention_s", "transformers_s", "ratio", "compiled")
    for name in ("policy", *columns):
        table.add_column(name, justify="left" if name == "policy" else "right")
    try:
        names = listed("--policies", arguments.policies, POLICIES)
        lengths, texts = numbers("--behind", arguments.behind), numbers("--new", arguments.new)
        contexts = numbers("--context-lengths", arguments.context_lengths) if arguments.context_lengths else [None]
        integer("--repeats", arguments.repeats)
        folder = arguments.model or ASSETS
        model = load_model(folder, dtype="float32")
        peer = folder if arguments.transformers else None
        for row in rows(model, names, lengths, texts, contexts, repeats=arguments.repeats, peer=peer):
            row |= dict(model=folder.name, device=devices.device_name(), dtype=model.dtype, version=f"jax {jax.__version__}")
            print(json.dumps(row), flush=True)
            table.add_row(row["policy"], *(str(row[name]) for name in columns))
    except InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    Console(stderr=True, width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
