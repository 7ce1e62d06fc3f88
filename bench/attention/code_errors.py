"""How well steps estimate the error that codes leave: ``python -m bench.attention.code_errors --model smollm2-135m``.

The command captures queries, keys and values of a model that reads real text: the last 4 tokens of a text, and `--steps` tokens
after it, of which every fourth is a step. It compares the true relative error of three forms with their estimates:

- `packed`: all pages in codes, the best `exact` tokens exactly. The estimate is that of `icejax.ops.pages.code_error`.
- `coded`, `look`: codes of 224 pages, or of as many as bring 1.05 times today's bytes; digests for the rest. The estimate is
  the root of two squares: of the codes' error, and of the digests', which is `spread` of `calibrate` times a gain. The
  gain is what makes both together as large as the true error of the text's last 4 tokens, mean over a layer's heads.
  `without_codes` leaves the codes' error out: it is what `tolerant` knows without it.

A step's error is the mean over heads and layers. A JSON line per form, bits, text and budget has `coverage`, the share of steps
whose true error is below the estimate times `factor`, the median of estimate over true error (`ratio`), and their rank
correlation.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import icejax
from bench import published
from bench.attention.calibrate import LAST, rank_correlation
from bench.attention.capture import capture
from bench.attention.methods import residents
from bench.attention.page_attention import from_keys_of
from bench.attention.paged import PAGE, Paged
from bench.attention.two_precisions import MORE, WIDTH
from bench.flags import listed, numbers, print_rows
from bench.needle import task
from bench.texts import excerpt
from icejax.api.generate import ASSETS
from icejax.cache.bases.reranking import KEY_ONLY_FACTOR, pages_for
from icejax.cache.policies.tolerant import COVERED
from icejax.cache.registry import Full, layer_policies
from icejax.checks.numbers import integer
from icejax.ops.attention.dense import Attended, Scoring, attend_with_lse, merge_by_lse
from icejax.ops.pages import tree_walk
from icejax.ops.pages.code_attention import CodedPages, attend_codes, encode_pages
from icejax.ops.pages.code_bytes import PageBytes
from icejax.ops.pages.code_error import relative_error
from icejax.ops.pages.digests import score
from icejax.ops.pages.key_scatter import along
from icejax.ops.pages.paged_attention import attend_beside
from icejax.ops.topk import ranks
from icejax.runtime import devices

EVERY = 4  # tokens after the text from step to step
FACTOR = 1.0  # the estimate of the codes' error as it is; `packed` multiplies it by its `COVERED`
TAIL_FACTOR = COVERED  # by which `tolerant` multiplies
CODED = 224  # pages that `coded` looks at


@functools.partial(jax.jit, static_argnames=("bits", "exact", "looked"))
def steps(
    q: jax.Array, near, pages, codes: CodedPages, index, *, bits: int, exact: int, looked: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the outputs of queries [Q, K, G, H], the codes' estimated error and the tail's unevenness, f32[Q, K, G].

    Args:
        near: keys and values [K, S, H] of sinks and window.
        pages: keys and values [1, K, P, p, H].
        looked: pages whose codes are read, chosen by digests; None: all.
    """
    scoring, digests, count = Scoring(q.shape[-1] ** -0.5), index.levels[0], codes.count.shape[2]
    keys, values = (x[0].reshape(x.shape[1], -1, x.shape[-1]) for x in pages)

    def step(q: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        outside, there = attend_with_lse(q, *near, jnp.ones(near[0].shape[:2], bool), scoring=scoring), codes.count > 0
        if looked is not None:
            spans = along(q[None], index.scatter, scoring=scoring)
            scores = score(q[None], digests, spans, scoring=scoring)
            chosen = (ranks(jax.nn.softmax(scores.choice, axis=-1).sum(2)) < looked) & (digests.count > 0)
            scores = scores._replace(weight=jnp.where(chosen[:, :, None], -jnp.inf, scores.weight))
            tail = tree_walk.tail_of([(scores, digests)], spans, from_keys_of(index))
            outside, there = merge_by_lse(*outside, *(x[0] for x in tail)), there & chosen[..., :count]
        seen = CodedPages(jnp.where(there, codes.count, 0), codes.keys, codes.values)
        sizes = dict(page_size=PAGE, bits=bits, wanted=exact, estimate=True)
        tokens = attend_codes(q[None], seen, Attended(*(x[None] for x in outside)), scoring=scoring, **sizes)
        best = (jnp.take_along_axis(x, tokens.ids[0][..., None], axis=1) for x in (keys, values))
        rest = Attended(*(x[0] for x in tokens.rest))
        attended, _ = attend_beside(q, *best, tokens.counts[0] > 0, rest, scoring=scoring)
        error, uneven = relative_error(jax.tree.map(lambda x: x[0], tokens.noise), attended), jnp.zeros(q.shape[:2])
        if looked is not None:
            uneven = tree_walk.uneven_of([(scores, digests)], attended.lse[None])[0]
            uneven = jnp.sqrt(uneven) / jnp.linalg.norm(attended.out, axis=-1)
        return attended.out, error, uneven

    return jax.lax.map(step, q)


def rows(layers: list[Paged], *, budget: int, bits: list[int]) -> Iterator[dict]:
    """Yields a row per form, number of bits, and knowledge of the estimate."""
    sinks, window = residents(budget)
    exact, size = budget - sinks - window, layers[0].k.shape[-1]
    num_pages = layers[0].pages[0].shape[2]
    keys_of = min(num_pages, KEY_ONLY_FACTOR * pages_for(exact // PAGE, PAGE, None))
    today = keys_of * PAGE * WIDTH * size + exact * WIDTH * size
    for b in bits:
        page_bytes = PageBytes(PAGE, (size, size), b).count
        equal = min(num_pages, int((MORE * today - exact * 2 * WIDTH * size) // page_bytes))
        codes = [encode_pages(*x.pages, b) for x in layers]
        forms = [("packed", None, n) for n in sorted({0, min(64, exact), exact})]
        forms += [("coded", min(CODED, num_pages), exact), ("look", equal, exact)]
        for form, looked, wanted in forms:
            parts = [
                steps(x.q, x.near, x.pages[:2], y, x.index, bits=b, exact=wanted, looked=looked)
                for x, y in zip(layers, codes, strict=True)
            ]
            true = np.stack([_relative(part[0], x.expected) for part, x in zip(parts, layers, strict=True)])
            error, uneven = (np.stack([np.asarray(part[i]) for part in parts]) for i in (1, 2))
            row = dict(form=form, budget=budget, bits=b, pages=looked or num_pages, exact=wanted)
            if looked is None or looked == num_pages:
                yield row | dict(factor=FACTOR) | figures(true, error, FACTOR)
                continue
            for name, known in (("both", error), ("without_codes", 0 * error)):
                estimates = np.sqrt(np.square(gains(true, known, uneven) * uneven) + np.square(known))
                yield row | dict(knows=name, factor=TAIL_FACTOR) | figures(true, estimates, TAIL_FACTOR)


def gains(true: np.ndarray, error: np.ndarray, uneven: np.ndarray) -> np.ndarray:
    """Returns for every layer what makes the estimates of the text's last tokens true, [L, 1, 1, 1], from [L, Q, K, G]."""
    true, error, uneven = (x[:, :LAST].mean((1, 2, 3), keepdims=True) for x in (true, error, uneven))
    return np.sqrt(np.maximum(np.square(true) - np.square(error), 0)) / np.maximum(uneven, 1e-9)


def figures(true: np.ndarray, estimates: np.ndarray, factor: float) -> dict:
    """Returns how estimates [L, Q, K, G] times a factor cover the true errors of the steps after the text."""
    true, estimates = (x[:, LAST:].mean((0, 2, 3)) for x in (true, factor * estimates))
    return dict(
        steps=len(true),
        error=round(float(true.mean()), 5),
        coverage=round(float((estimates >= true).mean()), 3),
        ratio=round(float(np.median(estimates / true)), 2),
        spearman=round(rank_correlation(estimates, true), 3),
    )


def _relative(out: jax.Array, expected: jax.Array) -> np.ndarray:
    return np.asarray(jnp.linalg.norm(out - expected, axis=-1) / jnp.linalg.norm(expected, axis=-1))


def measured(arguments: argparse.Namespace) -> Iterator[dict]:
    """Yields the rows of all texts; InputError for invalid options."""
    budgets = numbers("--budgets", arguments.budgets, least=64)
    length = integer("--length", arguments.length, least=2 * max(budgets), most=36_000)  # one level of digests
    more = integer("--steps", arguments.steps, least=EVERY, most=1024)
    bits, texts = [int(x) for x in listed("--bits", arguments.bits, ("2", "3", "4", "8"))], arguments.texts
    name = "bundled" if arguments.model == ASSETS else arguments.model
    folder = published.folder(name) if name in published.MODELS else arguments.model
    model, tokenizer = icejax.load(folder, dtype="float32")
    by_layer = layer_policies(icejax.Clustered(), model.config, capacity=length + more)
    for kind in listed("--texts", texts, task.KINDS):
        ids = excerpt(tokenizer, kind, tokens=length + more, seed=arguments.seed)
        captured = capture(model, ids[:length], ids[length:], last=LAST)
        captured = [replace(x, q=_some(x.q)) for x in captured if not isinstance(by_layer[x.layer], Full)]
        for budget in budgets:
            layers = [Paged.of(x, budget) for x in captured]
            for row in rows(layers, budget=budget, bits=bits):
                labels = dict(model=Path(name).name, text=kind, length=length)
                yield labels | row | dict(device=str(devices.device().device_kind), jax=jax.__version__)


def _some(q: jax.Array) -> jax.Array:
    return jnp.concatenate([q[:LAST], q[LAST::EVERY]])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.attention.code_errors", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ASSETS, help="a name of bench.published, or a folder (default: the bundled model)")
    parser.add_argument("--texts", default="code,documentation", help=f"kinds of text, of {', '.join(task.KINDS)}")
    parser.add_argument("--length", type=int, default=4118, help="tokens of a text (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=64, help="tokens behind it, of which every fourth is a step")
    parser.add_argument("--budgets", default="64,256")
    parser.add_argument("--bits", default="2,3,4,8", help="bits of a code")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    print_rows(parser, measured(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
