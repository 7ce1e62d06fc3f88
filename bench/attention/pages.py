"""Error of the clustered cache by page formation, score and budget: ``python -m bench.attention.pages [--quick]``.

The command captures the queries, keys and values of a model that answers questions about long texts: pass keys if the model's
tokens are bytes, else functions and values (`bench.texts`). It prints one JSON line
per formation of pages, page size, method and budget (docs/cache.md explains these words):

- `error`: relative L2 error of a head's attention output, mean over heads and queries, and the 95th percentile; also by prompt,
  and for sharp and diffuse heads, whose top 64 tokens hold more or less than 0.9 of the attention mass.
- `mass`: share of the attention mass outside sinks and window that is attended exactly.
- `recall`: share of each head's top tokens that are attended exactly.

Pages are compared on captured attention, so no token is decoded: `bench.compare --model` has divergences and answers.

A budget includes the sinks and the full window of the clustered cache: 32 and 32 tokens at 256, 16 and 32 at 128, 8 and 24 at
64.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

from bench import panel, texts
from bench.attention.capture import Captured, capture, needle_prompt, tiled
from bench.attention.methods import FORMATIONS, SETS, Method, form, residents
from bench.attention.page_attention import (
    attention,
    attention_of_keys,
    attention_of_tokens,
    error,
    exact,
    from_keys_of,
    index_of,
    look_again,
    of_pages,
    select,
)
from bench.flags import listed, numbers, print_rows
from bench.needle.evaluate import SHORTEST
from icejax.api.generate import ASSETS
from icejax.cache.bases.reranking import KEY_ONLY_FACTOR, pages_for
from icejax.cache.policies.coded import OVERSAMPLING
from icejax.cache.pool.page_format import decode_pages, encode_pages
from icejax.checks.numbers import integer, number
from icejax.ops.pages.code_attention import encode_pages as encode_codes
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
    layers = [layer for prompt in prompts for layer in prompt]
    for budget in budgets:
        references = [[exact(q.reshape(x.k.shape[0], -1, q.shape[-1]), x.k, x.v, budget=budget) for q in x.q] for x in layers]
        errors = [(np.asarray(error(t[3], t[0])), np.asarray(t[4])) for steps in references for t in steps]
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
                    figures = _measure(layers, paged, references, budget=budget, method=method, prompts=len(prompts))
                    row = dict(pages=name, page_size=page_size) | asdict(method) | dict(budget=budget)
                    yield row | figures | dict(build_ms_per_1k=round(build, 2))


def _measure(layers, paged, references, *, budget: int, method: Method, prompts: int) -> dict:
    errors, masses, recalls, microseconds, exact_tokens = [], [], [], [], []
    sinks, window = residents(budget)
    for layer, pages, layer_references in zip(layers, paged, references, strict=True):
        page_size = pages[0].shape[3]
        num_whole = method.fetched or pages_for((budget - sinks - window) // page_size, page_size, method.candidates)
        fetched = min(
            pages[0].shape[2], num_whole * (OVERSAMPLING if method.codes else KEY_ONLY_FACTOR if method.keys_first else 1)
        )
        index = index_of(pages, dtype=method.digest_dtype)
        index = index if method.value_fit and method.tail else replace(index, fit=None)
        codes = None if method.codes is None else encode_codes(*pages, method.codes)
        if method.page_dtype is not None:
            pages = (*(decode_pages(encode_pages(x, np.dtype(np.uint8)), "float32") for x in pages[:2]), pages[2])
        for q, (reference, middle_logits, threshold, _, sharp) in zip(layer.q, layer_references, strict=True):
            grouped = q.reshape(1, layer.k.shape[0], -1, q.shape[-1])

            num_kept = (budget - sinks - window) // (1 if method.singly else page_size)

            def run(q=grouped, pages=pages, index=index, codes=codes, fetched=fetched, num_kept=num_kept):
                selection = select(q, pages, index, fetched=fetched, method=method)
                if codes is None:
                    return selection, None
                sizes = dict(page_size=pages[0].shape[3], bits=method.codes, wanted=num_kept, whole=not method.singly)
                reranked = look_again(q, codes, selection, **sizes)
                return (selection, reranked) if method.singly else (of_pages(selection, reranked), None)

            jax.block_until_ready(run())
            for _ in range(REPEATS):
                started = time.perf_counter()
                selection, reranked = jax.block_until_ready(run())
                microseconds.append((time.perf_counter() - started) * 1e6)
            parts = (grouped, layer.k, layer.v, pages, selection)
            if method.keys_first:
                output, exact_logits = attention_of_keys(*parts[:4], index, selection, budget=budget)
            elif reranked is None:
                output, exact_logits = attention(*parts, from_keys_of(index), budget=budget, tail=method.tail)
            else:
                output, exact_logits = attention_of_tokens(*parts, reranked, budget=budget)
            errors.append((np.asarray(error(output, reference)), np.asarray(sharp)))
            masses.append(np.exp(jax.nn.logsumexp(exact_logits, -1) - jax.nn.logsumexp(middle_logits, -1)))
            recalls.append(np.asarray((exact_logits >= threshold).sum(-1) / (middle_logits >= threshold).sum(-1)))
            exact_tokens.append(sinks + window + int((exact_logits[:, 0] > -jnp.inf).sum(-1).max()))
    return _errors(errors, prompts) | dict(
        mass=round(float(np.mean(masses)), 4),
        recall=round(float(np.mean(recalls)), 4),
        exact_tokens=max(exact_tokens),
        tokens_fetched=_moved(fetched * page_size, num_whole * page_size, budget - sinks - window, method),
        digest_bytes=sum(x.nbytes for x in jax.tree.leaves((index, codes))),
        select_us=round(float(np.median(microseconds)), 1),
    )


def _moved(ranked: int, pages: int, exact: int, method: Method) -> float:
    """Returns the number of fetched tokens, where a key or a value alone counts half.

    Args:
        ranked: tokens of the fetched pages, or of the pages whose keys are fetched.
        pages: tokens of the pages that are fetched whole.
        exact: tokens of pages that are attended exactly.

    For example, keys first at a budget of 64 fetches 1,792 keys and 32 values, which count as (1792 + 32) / 2 = 912 tokens.
    """
    if method.keys_first:
        return (ranked + exact) / KEY_ONLY_FACTOR
    return exact if method.codes else pages


def _errors(errors, prompts: int) -> dict:
    by_prompt = np.split(np.stack([e[0].mean() for e in errors]), prompts)
    all_errors, sharp = (np.concatenate([e[i].ravel() for e in errors]) for i in (0, 1))
    parts = {"error": all_errors, "error_sharp": all_errors[sharp], "error_diffuse": all_errors[~sharp]}
    means = {name: round(float(x.mean()), 4) if x.size else None for name, x in parts.items()}
    means["error_95"] = round(float(np.quantile(all_errors, 0.95)), 4)
    return means | dict(by_prompt=[round(float(x.mean()), 5) for x in by_prompt])


def measured(arguments: argparse.Namespace, console: Console) -> Iterator[dict]:
    """Yields the rows of all models and lengths; InputError for invalid options."""
    lengths = numbers("--lengths", "4096" if arguments.quick else arguments.lengths, least=SHORTEST)
    budgets = numbers("--budgets", "64,256" if arguments.quick else arguments.budgets, most=min(lengths) // 2)
    page_sizes = numbers("--page-sizes", arguments.page_sizes)
    num_prompts, facts = (integer(f"--{name}", getattr(arguments, name)) for name in ("prompts", "facts"))
    tile, seed = (integer(f"--{name}", getattr(arguments, name), least=0) for name in ("tile", "seed"))
    default_formations = "positional,tree-2048-greedy" if arguments.quick else ",".join(FORMATIONS)
    formations = listed("--formations", arguments.formations or default_formations, FORMATIONS)
    methods = SETS["ours" if arguments.quick and arguments.methods == "all" else arguments.methods]
    channels = dict(balance=not arguments.no_balance, uneven=number("--uneven", arguments.uneven, least=0, most=10))
    environment = channels | dict(device=str(devices.device().device_kind), jax=jax.__version__)
    for model_name, model, tokenizer in panel.readers(arguments.model, panel=arguments.panel, dtype="float32"):
        by_bytes = panel.reads_bytes(tokenizer)
        for length in lengths:
            rng = np.random.default_rng((seed, length))
            prompts: list[list[Captured]] = []
            for i in track(
                range(1 if arguments.quick else num_prompts), "capture", console=console, disable=not console.is_terminal
            ):
                if by_bytes:
                    prompt, answer = needle_prompt(rng, length=length, facts=facts)
                else:
                    name = texts.TASKS[i % len(texts.TASKS)]
                    prompt, answer = texts.prompt(tokenizer, name, length=length, number=1000 * seed + i)
                layers = capture(model, prompt, answer, **channels)
                prompts.append([tiled(x, tile, rng) for x in layers] if tile else layers)
            for row in rows(prompts, budgets=budgets, page_sizes=page_sizes, formations=formations, methods=methods):
                yield dict(model=model_name, length=tile or length) | row | environment
        jax.clear_caches()  # the programs of five models need more memory mappings than Linux allows a process


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.attention.pages", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ASSETS, help=panel.ANY)
    parser.add_argument("--panel", action="store_true", help="also the models of bench/needle/panel")
    parser.add_argument("--lengths", default="8192", help="tokens of the prompts, comma-separated")
    parser.add_argument(
        "--tile", type=int, default=0, help="repeat each prompt's keys and values with noise up to so many tokens"
    )
    parser.add_argument("--facts", type=int, default=4, help="pass keys of a prompt, if tokens are bytes")
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
    print_rows(parser, measured(arguments, Console(stderr=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
