"""Time of reading pages in a decode step, exact keys against codes: ``python -m bench.attention.code_reads``.

One layer of random pages. `today` gathers the keys of 112 pages, scores their tokens and gathers the values of the best 192.
The other forms gather keys and values of 160 pages in codes with offsets and steps in 16 bits, score and weigh all tokens,
and gather keys and values of the best 192:

- `decoded`: codes become keys and values, as `icejax.ops.pages.key_codes.decode_keys` returns them.
- `factored`: codes alone become numbers; queries are multiplied by steps before the product, sums of values after it.
- `table`: the same, with a table of the numbers that each byte holds.
- `table16`: keys and values from a table of the 2^bits values of every page and channel, with up to 4 bits.
- `channels`: as `factored`, with the codes of a page channel after channel, not slot after slot.

The command prints one JSON line per form and number of bits: the median time of `--repeats` calls in turns, in microseconds.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from bench.flags import print_rows
from icejax.checks.numbers import integer
from icejax.ops.pages import key_codes
from icejax.ops.topk import best
from icejax.runtime import devices

PAGE, EXACT, KEY_PAGES, CODED_PAGES = 16, 192, 112, 160
FORMS = ("decoded", "factored", "table", "table16", "channels")


def _take(x: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns pages or slots `ids` [K, M] of an array [K, P, ...]."""
    return jnp.take_along_axis(x, ids.reshape(*ids.shape, *(1,) * (x.ndim - 2)), axis=1, mode="promise_in_bounds")


def _slots(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], -1, x.shape[-1])


def _best(weights: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the slots [K, 192] of largest weight, as slots of the pool."""
    slots = best(weights.sum(1), EXACT)[0]
    return jnp.take_along_axis(ids, slots // PAGE, axis=1) * PAGE + slots % PAGE


@jax.jit
def today(q: jax.Array, ids: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the weights of the tokens of pages `ids`, the sum of their keys, and the best tokens' values."""
    keys = _slots(_take(k, ids))
    weights = jax.nn.softmax(jnp.einsum("ksh,kgh->kgs", keys, q.astype(k.dtype), preferred_element_type=jnp.float32), axis=-1)
    moved = jnp.einsum("kgs,ksh->kgh", weights.astype(k.dtype), keys, preferred_element_type=jnp.float32)
    return weights, moved, _take(_slots(v), _best(weights, ids))


@functools.partial(jax.jit, static_argnames=("bits", "form"))
def coded(q: jax.Array, ids: jax.Array, codes, k: jax.Array, v: jax.Array, *, bits: int, form: str) -> tuple[jax.Array, ...]:
    """Returns the weights of the tokens of pages `ids`, the sum of their values, and the best tokens' keys and values."""
    keys, values = jax.tree.map(lambda x: _take(x[0], ids)[None], codes)
    if form in ("decoded", "table16"):
        decode = _from_table if form == "table16" else functools.partial(key_codes.decode_keys, page_size=PAGE, dtype="float32")
        keys, values = (_slots(decode(x, bits=bits)[0]) for x in (keys, values))
        weights = jax.nn.softmax(jnp.einsum("ksh,kgh->kgs", keys, q), axis=-1)
        out = jnp.einsum("kgs,ksh->kgh", weights, values)
    else:
        kinds = dict(channels=_by_channel, table=functools.partial(_numbers, table=True), factored=_numbers)
        numbers = functools.partial(kinds[form], bits=bits)
        low, step = keys.low[0].astype(jnp.float32), keys.step[0].astype(jnp.float32)
        scores = jnp.einsum("kmph,kmgh->kmgp", numbers(keys.codes[0]), q[:, None] * step[:, :, None])
        scores += jnp.einsum("kgh,kmh->kmg", q, low)[..., None]
        weights = jax.nn.softmax(scores.transpose(0, 2, 1, 3).reshape(*q.shape[:2], -1), axis=-1)
        by_page = weights.reshape(*q.shape[:2], -1, PAGE)
        sums = jnp.einsum("kgmp,kmph->kgmh", by_page, numbers(values.codes[0]))
        low, step = values.low[0].astype(jnp.float32), values.step[0].astype(jnp.float32)
        out = jnp.einsum("kgmh,kmh->kgh", sums, step) + jnp.einsum("kgm,kmh->kgh", by_page.sum(-1), low)
    slots = _best(weights, ids)
    return weights, out, _take(_slots(k), slots), _take(_slots(v), slots)


def _from_table(codes: key_codes.KeyCodes, *, bits: int) -> jax.Array:
    """Returns the vectors f32[1, K, M, p, H] of codes, each number looked up in its page and channel's values."""
    low, step = (x.astype(jnp.float32) for x in (codes.low, codes.step))
    values = low[..., None] + step[..., None] * jnp.arange(2**bits, dtype=jnp.float32)[None, None, None, None]
    packed = codes.codes.reshape(*codes.codes.shape[:3], PAGE, -1)
    at = jnp.concatenate([packed >> shift & (2**bits - 1) for shift in range(0, 8, bits)], axis=-1).astype(jnp.int32)
    return jnp.take_along_axis(values, at.swapaxes(3, 4), axis=-1, mode="promise_in_bounds").swapaxes(3, 4)


def channel_after_channel(codes: key_codes.KeyCodes, bits: int) -> key_codes.KeyCodes:
    """Returns codes whose bytes hold slots s, s + p bits / 8 and so on of one channel; channels follow one another."""
    numbers = jax.vmap(lambda x: _numbers(x, bits=bits))(codes.codes).astype(jnp.uint8).swapaxes(3, 4)
    parts = jnp.split(numbers, 8 // bits, axis=-1)
    data = sum(part << i * bits for i, part in enumerate(parts))
    return key_codes.KeyCodes(data.reshape(codes.codes.shape), codes.low, codes.step)


def _by_channel(codes: jax.Array, *, bits: int) -> jax.Array:
    """Returns codes u8[K, M, H * bytes], channel after channel, as numbers f32[K, M, p, H]."""
    packed = codes.reshape(*codes.shape[:2], -1, PAGE * bits // 8)
    parts = [(packed >> shift & (2**bits - 1)).astype(jnp.float32) for shift in range(0, 8, bits)]
    return jnp.concatenate(parts, axis=-1).swapaxes(2, 3)


def _numbers(codes: jax.Array, *, bits: int, table: bool = False) -> jax.Array:
    """Returns codes u8[K, M, p * bytes] as numbers f32[K, M, p, H]."""
    packed = codes.reshape(*codes.shape[:2], PAGE, -1)
    if not table:
        parts = [packed >> shift & (2**bits - 1) for shift in range(0, 8, bits)]
        return jnp.concatenate([part.astype(jnp.float32) for part in parts], axis=-1)
    every = np.arange(256)
    tables = [jnp.asarray(every >> shift & (2**bits - 1), jnp.float32) for shift in range(0, 8, bits)]
    return jnp.concatenate([x.at[packed].get(mode="promise_in_bounds") for x in tables], axis=-1)


def measured(arguments: argparse.Namespace):
    """Yields one row per form; InputError for invalid options."""
    heads, group, size = (integer(f"--{name}", getattr(arguments, name)) for name in ("heads", "group", "size"))
    pages = integer("--pages", arguments.pages, least=CODED_PAGES)
    repeats = integer("--repeats", arguments.repeats)
    keys = jax.random.split(jax.random.key(0), 4)
    k, v = (jax.random.normal(key, (heads, pages, PAGE, size)) for key in keys[:2])
    q = jax.random.normal(keys[2], (heads, group, size)) * size**-0.5
    ids = jax.vmap(lambda key: jax.random.permutation(key, pages))(jax.random.split(keys[3], heads))[:, :CODED_PAGES]
    mask = jnp.ones((1, *k.shape[:3]), bool)
    runs: dict[tuple, Callable] = {}
    for dtype in ("float32", "bfloat16"):
        planes = [x.astype(dtype) for x in (k, v)]
        runs["today", 16 if dtype == "bfloat16" else 32, dtype] = functools.partial(today, q, ids[:, :KEY_PAGES], *planes)
    for bits in (2, 4, 8):
        codes = [key_codes.encode_keys(x[None], mask, bits, "bfloat16") for x in (k, v)]
        laid = dict(channels=[channel_after_channel(x, bits) for x in codes])
        for form in FORMS if bits < 8 else [form for form in FORMS if form != "table16"]:
            runs[form, bits, "float32"] = functools.partial(coded, q, ids, laid.get(form, codes), k, v, bits=bits, form=form)
    seconds: dict[tuple, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 2):
        for name, run in runs.items():
            started = time.perf_counter()
            jax.block_until_ready(run())
            if turn > 1:
                seconds[name].append(time.perf_counter() - started)
    shape = dict(heads=heads, group=group, size=size, pages=pages)
    for (form, bits, dtype), times in seconds.items():
        row = dict(form=form, bits=bits, dtype=dtype, microseconds=round(float(np.median(times)) * 1e6))
        yield row | shape | dict(device=str(devices.device().device_kind), jax=jax.__version__)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.attention.code_reads", description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--group", type=int, default=4, help="query heads of a KV head")
    parser.add_argument("--size", type=int, default=128, help="channels of a head")
    parser.add_argument("--pages", type=int, default=2048, help="pages of a KV head")
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args(argv)
    print_rows(parser, measured(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
