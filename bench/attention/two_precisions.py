"""Error of attention through codes, at equal bytes: ``python -m bench.attention.two_precisions --model smollm2-135m``.

The command captures the queries, keys and values of a model that reads real text: 6 queries after a text of each kind and
length. It prints one JSON line per method (`form`), and a table on stderr:

- `dense8`, `dense4`, `kivi`: all tokens as llama.cpp's q8_0 and q4_0 (without a rotation) and KIVI with 4 bits store them.
- `policy`: a cache policy of `--policies`, such as `q8_0:rotate=false`, that decodes the tokens after the text. Its keys are
  those of the model, without the clustered cache's scaled channels.
- `packed`: all pages in codes, and the best `exact` tokens exactly; sinks and window are exact, no digests.
- `today`: what `clustered` does: keys of 112 pages, values of the best tokens, digests for all other pages.
- `look`: keys and values of `pages` pages in codes, the best `exact` tokens exactly, digests for all other pages. From 36,000
  tokens on the digest tree chooses the pages; `opened` is the least number of nodes that a level opens.

`pages` is a number of pages, or as many as bring at most 1.05 times the bytes of `today` (`equal_bytes`). `error` is the
relative L2 error of a head's output, mean over heads, queries and the layers after the first dense ones; `worst_layer` is the
largest mean of a layer. Bytes are those of a model of 16 bits, per KV head and layer: `bus_bytes` of a step, `host_bytes` and
`device_bytes` per token, digests included.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import numpy as np
from rich.console import Console

import icejax
from bench import panel
from bench.attention.capture import Captured, capture, tiled
from bench.attention.coded_attention import (
    Coding,
    attend_dense,
    coded,
    kivi_keys,
    kivi_values,
    q4_0,
    q8_0,
)
from bench.attention.methods import residents
from bench.attention.page_attention import error, index_of
from bench.attention.paged import PAGE, Paged
from bench.compare.cells import policy_from
from bench.compare.subject import Subject
from bench.compare.text import SHORT, Text
from bench.flags import listed, numbers, print_rows
from bench.needle import task
from bench.texts import excerpt
from icejax.api.generate import ASSETS
from icejax.cache.bases.reranking import KEY_ONLY_FACTOR, pages_for
from icejax.cache.registry import Full, layer_policies
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer
from icejax.ops.pages.key_codes import FIELDS
from icejax.runtime import devices

QUERIES = 6
LONGEST = 36_000  # tokens of a text; beyond it digests have a second level
DEFAULT_OPENED = icejax.Clustered().opened
WIDTH = 2  # bytes of a number
SCALES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
MORE = 1.05  # bytes of a step, as a multiple of today's


def rows(
    layers: list[Captured],
    *,
    budgets: list[int],
    pages: list[int | None],
    codings: list[Coding],
    most_exact: int | None = None,
    opened: Sequence[int] = (DEFAULT_OPENED,),
) -> Iterator[dict]:
    """Yields one row per method, over all captured layers.

    Args:
        pages: numbers of pages whose codes are read; None: as many as bring 1.05 times today's bytes.
        most_exact: most tokens of pages that `look` attends exactly; None: as many as the budget holds.
        opened: least numbers of nodes that a level of the digest tree opens, one after the other.
    """
    yield from _peers(layers)
    for budget in budgets:
        paged = [Paged.of(layer, budget) for layer in layers]
        sinks, window = residents(budget)
        exact, size = budget - sinks - window, layers[0].k.shape[-1]
        keys_of = KEY_ONLY_FACTOR * pages_for(exact // PAGE, PAGE, None)
        keys_of = min(keys_of, paged[0].pages[0].shape[2])
        digests = sum(x.nbytes for x in jax.tree.leaves(index_of(paged[0].pages, dtype="bfloat16").levels))
        digests /= paged[0].k.shape[0] * paged[0].k.shape[1]
        plain = 2 * WIDTH * size
        bus = keys_of * PAGE * WIDTH * size + exact * WIDTH * size
        by_tree = opened if len(paged[0].index.levels) > 1 else (None,)
        for least in by_tree:
            errors = [x.error(x.today(keys_of, budget, least)) for x in paged]
            sizes = dict(bus_bytes=bus, host_bytes=plain, device_bytes=digests)
            row = dict(form="today", budget=budget, pages=keys_of, opened=least, exact=exact)
            yield row | _figures(errors, **sizes)
        for coding in codings:
            decoded = [coded(x.pages, x.index, coding) for x in paged]
            page_bytes = decoded[0].page_bytes
            per_token = page_bytes / PAGE
            fewer = min(exact, exact if most_exact is None else most_exact)
            for wanted in pages:
                count = wanted or int((MORE * bus - fewer * plain) // page_bytes)
                count = min(count, paged[0].pages[0].shape[2])
                sizes = dict(bus_bytes=count * page_bytes + fewer * plain, host_bytes=plain + per_token, device_bytes=digests)
                row = dict(form="look", budget=budget, pages=count, equal_bytes=wanted is None, exact=fewer)
                for least in by_tree:
                    errors = [x.error(x.look(y, count, fewer, least)) for x, y in zip(paged, decoded, strict=True)]
                    yield row | dict(opened=least) | coding._asdict() | _figures(errors, **sizes)
            for wanted in (0, 64, 192) if budget == max(budgets) and coding.value_bits else ():
                errors = [x.error(x.packed(y, wanted)) for x, y in zip(paged, decoded, strict=True)]
                sizes = dict(bus_bytes=wanted * plain, host_bytes=plain if wanted else 0, device_bytes=per_token)
                row = dict(form="packed", budget=budget, pages=paged[0].pages[0].shape[2], exact=wanted)
                yield row | coding._asdict() | _figures(errors, **sizes)


def _peers(layers: list[Captured]) -> Iterator[dict]:
    size = layers[0].k.shape[-1]
    kivi = functools.partial(kivi_keys, bits=4), functools.partial(kivi_values, bits=4)
    for name, forms, width in (
        ("dense8", (q8_0, q8_0), 2 * 34 / 32),
        ("dense4", (q4_0, q4_0), 2 * 18 / 32),
        ("kivi", kivi, 2 * (16 + 4) / 32),
    ):
        errors = []
        for layer in layers:
            q = layer.q.reshape(len(layer.q), len(layer.k), -1, size)
            output = attend_dense(q, forms[0](layer.k), forms[1](layer.v))
            errors.append(float(error(output, attend_dense(q, layer.k, layer.v)).mean()))
        yield dict(form=name) | _figures(errors, bus_bytes=0, host_bytes=0, device_bytes=width * size)


def policy_rows(model, names: list[str], ids: list[int], length: int, layers: list[int]) -> Iterator[dict]:
    """Yields the row of each cache policy: errors of the tokens after the first `length`, over some layers."""
    text = Text.read(model, ids[:length])
    behind = text.then(ids[length:])
    for name in names:
        subject = Subject(model, policy_from(name), prompt_tokens=length, new_tokens=SHORT)
        subject.take(text)
        errors = subject.measure(behind).errors[:, layers].mean((0, 2)).tolist()
        spec = replace(subject._plan.spec_of(layers[0]), dtype="bfloat16")
        state = jax.eval_shape(functools.partial(subject._plan.policies[layers[0]].init, spec))
        device_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / (spec.num_kv_heads * spec.capacity)
        row = dict(form="policy", policy=name)
        yield row | _figures(errors, bus_bytes=0, host_bytes=0, device_bytes=device_bytes)


def _figures(errors: list[float], **sizes: float) -> dict:
    figures = dict(error=float(np.mean(errors)), worst_layer=max(errors))
    return {name: round(x, 5) for name, x in figures.items()} | {name: round(x, 1) for name, x in sizes.items()}


def _bits(option: str) -> list[tuple[int, int]]:
    """Returns pairs of bits of keys and of values: "4,4/2" gives (4, 4) and (4, 2)."""
    allowed = {str(bits): (bits, bits) for bits in FIELDS}
    allowed |= {f"{keys}/{values}": (keys, values) for keys in FIELDS for values in (0, *FIELDS)}
    return [allowed[name] for name in listed("--bits", option, allowed)]


def measured(arguments: argparse.Namespace, console: Console) -> Iterator[dict]:
    """Yields the rows of all texts and lengths; InputError for invalid options."""
    budgets = numbers("--budgets", arguments.budgets, least=64)
    lengths = numbers("--lengths", arguments.lengths, least=2 * max(budgets), most=LONGEST)
    pages = [None if x == "equal" else numbers("--pages", x)[0] for x in arguments.pages.split(",")]
    texts, scales = listed("--texts", arguments.texts, task.KINDS), listed("--scales", arguments.scales, SCALES)
    by_token = [name == "token" for name in listed("--values", arguments.values, ("channel", "token"))]
    centred = [name == "yes" for name in listed("--centred", arguments.centred, ("yes", "no"))]
    policies = arguments.policies.split(",") if arguments.policies else []
    for policy in policies:
        policy_from(policy)
    seed, most_exact, tile = integer("--seed", arguments.seed, least=0), arguments.exact, arguments.tile
    tile = None if tile is None else integer("--tile", tile, least=max(lengths), most=2**21)
    opened = numbers("--opened", arguments.opened, least=1)
    chosen_layers = None if arguments.layers is None else numbers("--layers", arguments.layers, least=0)
    most_exact = None if most_exact is None else integer("--exact", most_exact, least=0)
    parts = itertools.product(_bits(arguments.bits), scales, by_token, centred)
    codings = [Coding(*bits, *rest) for bits, *rest in parts if bits[1] or not rest[1]]  # without values nothing is by token
    ((name, model, tokenizer),) = panel.readers(arguments.model, dtype="float32")
    if policies and any(window is not None for window in model.config.windows):
        raise InputError(f"--policies needs a model of full attention, {name} has sliding windows")
    if policies and tile:
        raise InputError("--policies needs texts, got --tile")
    channels = dict(balance=not arguments.no_balance)
    environment = channels | dict(device=str(devices.device().device_kind), jax=jax.__version__)
    for length, kind in itertools.product(lengths, texts):
        ids = excerpt(tokenizer, kind, tokens=length + QUERIES, seed=seed)
        by_layer = layer_policies(icejax.Clustered(), model.config, capacity=length + QUERIES)
        captured = capture(model, ids[:length], ids[length:], **channels)
        layers = [x for x in captured if not isinstance(by_layer[x.layer], Full)]
        if chosen_layers is not None:
            layers = [x for x in layers if x.layer in chosen_layers]
            if not layers:
                raise InputError(f"--layers must name layers that clustered retrieves in, got {arguments.layers}")
        if tile:
            rng = np.random.default_rng((seed, length))
            layers = [tiled(x, tile, rng) for x in layers]
        console.print(f"{name}, {kind}, {length} tokens: {len(layers)} of {len(by_layer)} layers")
        labels = dict(model=name, text=kind, length=tile or length, layers=len(layers)) | (dict(tiled=length) if tile else {})
        measured_rows = rows(layers, budgets=budgets, pages=pages, codings=codings, most_exact=most_exact, opened=opened)
        of_policies = policy_rows(model, policies, ids, length, [x.layer for x in layers]) if policies else ()
        for row in map(lambda row, labels=labels: labels | row | environment, itertools.chain(measured_rows, of_policies)):
            console.print(line(row))
            yield row


def line(row: dict) -> str:
    """Returns a line of the table on stderr."""
    bits = f"{row['key_bits']}/{row['value_bits']}" if "key_bits" in row else ""
    values = {True: "token", False: "channel", None: ""}[row.get("by_token")]
    scales = row.get("scales", "") + ("-c" if row.get("centred") else "")
    name = row.get("policy", row["form"])
    opened = row.get("opened") or ""
    words = (name, row.get("budget", ""), bits, scales, values, row.get("pages", ""), opened, row.get("exact", ""))
    sizes = (f"{row[name]:.0f}" for name in ("bus_bytes", "host_bytes", "device_bytes"))
    return " ".join(f"{word!s:>9}" for word in (*words, f"{row['error']:.4f}", *sizes))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.attention.two_precisions", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ASSETS, help=panel.ANY)
    parser.add_argument("--texts", default="code,documentation", help=f"kinds of text, of {', '.join(task.KINDS)}")
    parser.add_argument("--lengths", default="4096", help="tokens of a text, comma-separated")
    parser.add_argument("--tile", type=int, help="repeat each text's keys and values with noise up to so many tokens")
    parser.add_argument("--layers", help="numbers of the layers that are measured (default: all that retrieve)")
    parser.add_argument("--opened", default=str(DEFAULT_OPENED), help="least nodes opened per level (default: %(default)s)")
    parser.add_argument("--budgets", default="64,256")
    parser.add_argument("--pages", default="equal,112,160,224,448", help="pages whose codes are read; equal: by bytes")
    parser.add_argument("--exact", type=int, help="most page tokens that `look` attends exactly (default: by the budget)")
    parser.add_argument(
        "--bits", default="2,3,4,8", help="bits of keys and values; 4/2: 4 of keys and 2 of values; 4/0: values from keys"
    )
    parser.add_argument("--scales", default="bfloat16,int8", help=f"dtypes of offsets and steps, of {', '.join(SCALES)}")
    parser.add_argument("--values", default="channel,token", help="what shares an offset and a step of values")
    parser.add_argument("--centred", default="no", help="whether the head's mean key is subtracted first: yes, no or yes,no")
    parser.add_argument("--policies", default="", help="cache policies too, with options as in kivi:bits=2 (default: none)")
    parser.add_argument("--no-balance", action="store_true", help="leave channels of keys and queries as the model has them")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    print_rows(parser, measured(arguments, console))
    return 0


if __name__ == "__main__":
    sys.exit(main())
