"""Which pages, which scores, what tail: ``python -m bench.pages [--quick]``.

On the queries, keys and values of a model where it answers questions about long texts, every row says what a formation of
pages, a score and a budget leave of the attention: `mass`, the share of the attention mass outside sinks and window that is
attended exactly; `error`, the relative L2 error of a head's attention output, mean over heads and queries, also prompt by
prompt, and for heads whose top 64 tokens hold more (sharp) or less (diffuse) than 0.9 of the mass; `recall`, the share of
each head's top tokens among those attended. Budgets include the sinks and the full window of the clustered cache: 32 and 32
tokens at 256, 16 and 32 at 128, 8 and 24 at 64.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

from bench import panel
from bench.capture import Captured, capture, needle_prompt, tiled
from bench.flags import listed, numbers
from bench.methods import (
    FORMATIONS,
    SETS,
    Method,
    attention,
    attention_of_keys,
    attention_of_tokens,
    error,
    exact,
    form,
    from_keys_of,
    index_of,
    look_again,
    of_pages,
    residents,
    select,
)
from bench.needle.evaluate import SHORTEST
from icejax.api.generate import ASSETS
from icejax.cache.bases.reranking import TWICE, pages_for
from icejax.cache.policies.coded import LOOKED
from icejax.cache.pool.page_format import decode_pages, encode_pages
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer, number
from icejax.ops.pages import key_codes
from icejax.runtime import devices

REPEATS = 5


def rows(
    prompts: list[list[Captured]],
    *,
    budgets: list[int],
    page_sizes: list[int],
    formations: list[str],
    methods: Sequence[Method],
) -> Iterator[dict]:
    """Yields one row per budget, formation, page size and method, over the captured layers of all prompts."""
    layers = [layer for each in prompts for layer in each]
    for budget in budgets:
        truth = [[exact(q.reshape(x.k.shape[0], -1, q.shape[-1]), x.k, x.v, budget=budget) for q in x.q] for x in layers]
        errors = [(np.asarray(error(t[3], t[0])), np.asarray(t[4])) for each in truth for t in each]
        yield dict(pages="exact top tokens", score="oracle", tail=False, budget=budget) | _errors(errors, len(prompts))
        for name in formations:
            for page_size in page_sizes:
                sinks, window = residents(budget)
                if page_size > budget - sinks - window:
                    continue  # no page fits
                jax.block_until_ready(form(layers[0], name, page_size, sinks, window))
                started = time.perf_counter()
                paged = [jax.block_until_ready(form(x, name, page_size, sinks, window)) for x in layers]
                build = (time.perf_counter() - started) / sum(x.k.shape[1] for x in layers) * 1e6
                for method in methods:
                    found = _measure(layers, paged, truth, budget=budget, method=method, prompts=len(prompts))
                    row = dict(pages=name, page_size=page_size) | asdict(method) | dict(budget=budget)
                    yield row | found | dict(build_ms_per_1k=round(build, 2))


def _measure(layers, paged, truth, *, budget: int, method: Method, prompts: int) -> dict:
    errors, masses, recalls, micros, exact_tokens = [], [], [], [], []
    sinks, window = residents(budget)
    for layer, pages, each in zip(layers, paged, truth, strict=True):
        page_size = pages[0].shape[3]
        most = method.fetched or pages_for((budget - sinks - window) // page_size, page_size, method.candidates)
        fetched = min(pages[0].shape[2], most * (LOOKED if method.codes else TWICE if method.keys_first else 1))
        index = index_of(pages, dtype=method.digest_dtype)
        index = index if method.value_fit and method.tail else replace(index, fit=None)
        codes = None if method.codes is None else key_codes.encode_keys(pages[0], pages[2], method.codes)
        if method.page_dtype is not None:
            pages = (*(decode_pages(encode_pages(x, np.dtype(np.uint8)), "float32") for x in pages[:2]), pages[2])
        for q, (out, outside, least, _, sharp) in zip(layer.q, each, strict=True):
            grouped = q.reshape(1, layer.k.shape[0], -1, q.shape[-1])

            wanted = budget - sinks - window if method.singly else min(fetched, most)

            def run(q=grouped, pages=pages, index=index, codes=codes, fetched=fetched, wanted=wanted):
                found = select(q, pages, index, fetched=fetched, method=method)
                if codes is None:
                    return found, None
                sizes = dict(page_size=pages[0].shape[3], bits=method.codes, wanted=wanted, whole=not method.singly)
                looked = look_again(q, codes, index, found, **sizes)
                return (found, looked) if method.singly else (of_pages(found, looked), None)

            jax.block_until_ready(run())
            for _ in range(REPEATS):
                started = time.perf_counter()
                chosen, looked = jax.block_until_ready(run())
                micros.append((time.perf_counter() - started) * 1e6)
            parts = (grouped, layer.k, layer.v, pages, chosen)
            if method.keys_first:
                found, inside = attention_of_keys(*parts[:4], index, chosen, budget=budget)
            elif looked is None:
                found, inside = attention(*parts, from_keys_of(index), budget=budget, tail=method.tail)
            else:
                found, inside = attention_of_tokens(*parts, looked, budget=budget)
            errors.append((np.asarray(error(found, out)), np.asarray(sharp)))
            masses.append(np.exp(jax.nn.logsumexp(inside, -1) - jax.nn.logsumexp(outside, -1)))
            recalls.append(np.asarray((inside >= least).sum(-1) / (outside >= least).sum(-1)))
            exact_tokens.append(sinks + window + int((inside[:, 0] > -jnp.inf).sum(-1).max()))
    return _errors(errors, prompts) | dict(
        mass=round(float(np.mean(masses)), 4),
        recall=round(float(np.mean(recalls)), 4),
        exact_tokens=max(exact_tokens),
        tokens_fetched=_moved(fetched * page_size, most * page_size, budget - sinks - window, method),
        digest_bytes=sum(x.nbytes for x in jax.tree.leaves((index, codes))),
        select_us=round(float(np.median(micros)), 1),
    )


def _moved(ranked: int, pages: int, exact: int, method: Method) -> float:
    """Returns how many tokens' keys and values come: of pages, of tokens attended exactly, or keys first."""
    if method.keys_first:
        return (ranked + exact) / TWICE
    return exact if method.codes and method.singly else pages


def _errors(errors, prompts: int) -> dict:
    each = np.split(np.stack([e[0].mean() for e in errors]), prompts)
    every, sharp = (np.concatenate([e[i].ravel() for e in errors]) for i in (0, 1))
    parts = {"error": every, "error_sharp": every[sharp], "error_diffuse": every[~sharp]}
    found = {name: round(float(x.mean()), 4) if x.size else None for name, x in parts.items()}
    return found | dict(by_prompt=[round(float(x.mean()), 5) for x in each])


def measured(arguments: argparse.Namespace, console: Console) -> Iterator[dict]:
    """Yields the rows of all models and lengths; InputError for options that are not sound."""
    lengths = numbers("--lengths", "4096" if arguments.quick else arguments.lengths, least=SHORTEST)
    budgets = numbers("--budgets", "64,256" if arguments.quick else arguments.budgets, most=min(lengths) // 2)
    page_sizes = numbers("--page-sizes", arguments.page_sizes)
    several, facts = (integer(f"--{name}", getattr(arguments, name)) for name in ("prompts", "facts"))
    tile, seed = (integer(f"--{name}", getattr(arguments, name), least=0) for name in ("tile", "seed"))
    every = "positional,tree-2048-greedy" if arguments.quick else ",".join(FORMATIONS)
    formations = listed("--formations", arguments.formations or every, FORMATIONS)
    methods = SETS["ours" if arguments.quick and arguments.methods == "all" else arguments.methods]
    channels = dict(balance=not arguments.no_balance, uneven=number("--uneven", arguments.uneven, least=0, most=10))
    where = channels | dict(device=str(devices.device().device_kind), jax=jax.__version__)
    for which, model in panel.models(arguments.model, panel=arguments.panel, dtype="float32"):
        for length in lengths:
            rng = np.random.default_rng((seed, length))
            prompts: list[list[Captured]] = []
            for _ in track(
                range(1 if arguments.quick else several), "capture", console=console, disable=not console.is_terminal
            ):
                found = capture(model, *needle_prompt(rng, length=length, facts=facts), **channels)
                prompts.append([tiled(x, tile, rng) for x in found] if tile else found)
            for row in rows(prompts, budgets=budgets, page_sizes=page_sizes, formations=formations, methods=methods):
                yield dict(model=which, length=tile or length) | row | where
        jax.clear_caches()  # programs of five models would take more mappings than Linux gives a process


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.pages", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ASSETS, help="checkpoint folder of byte tokens (default: the bundled one)")
    parser.add_argument("--panel", action="store_true", help="also the models of bench/needle/panel")
    parser.add_argument("--lengths", default="8192", help="tokens of the prompts, comma-separated")
    parser.add_argument(
        "--tile", type=int, default=0, help="repeat each prompt's keys and values with noise up to so many tokens"
    )
    parser.add_argument("--facts", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=3, help="prompts per length")
    parser.add_argument("--budgets", default="64,128,256")
    parser.add_argument("--page-sizes", default="16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--formations", help=f"comma-separated, of {', '.join(FORMATIONS)} (default: all)")
    parser.add_argument(
        "--methods",
        choices=SETS,
        default="all",
        help="default: the default and what is beside it; ours: no peers' scores; fewer: of fewer pages or nodes; "
        "coded: the default and tokens ranked by codes",
    )
    parser.add_argument("--no-balance", action="store_true", help="leave channels of keys and queries as the model has them")
    parser.add_argument(
        "--uneven",
        type=float,
        default=0.0,
        help="multiply channels of keys by factors whose logarithms have this deviation, and divide queries by them: "
        "no attention changes (default: 0)",
    )
    parser.add_argument("--quick", action="store_true", help="one prompt of 4,096 tokens, two formations, two budgets")
    arguments = parser.parse_args(argv)
    try:
        for row in measured(arguments, Console(stderr=True)):
            print(json.dumps(row), flush=True)
    except InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
