"""Which pages, which scores, what tail: ``python -m bench.pages [--quick]``.

On the queries, keys and values of a model where it answers questions about long texts, every row says what a formation of
pages, a score and a budget leave of the attention: `mass`, the share of the attention mass outside sinks and window that is
attended exactly; `error`, the relative L2 error of a head's attention output, mean over heads and queries, also for heads whose
top 64 tokens hold more (sharp) or less (diffuse) than 0.9 of the mass; `recall`, the share of each head's top tokens
among those attended. Budgets include 32 sinks and 32 window tokens (8 and 24 at a budget of 64).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

import icejax
from bench.capture import Captured, capture, needle_prompt, tiled
from icejax.cache.encoding import decode, encode
from icejax.generation import ASSETS
from icejax.ops import tree
from icejax.ops.digests import NARROW, Digests, digest, score
from icejax.ops.paged import attend_paged
from icejax.ops.pages import pack

SPAN, REPEATS = 8192, 5
FORMATIONS = {
    "positional": None,
    "tree": dict(block=32),
    "greedy": dict(block=SPAN),
    "tree-1024-greedy": dict(block=1024),
    "tree-2048-greedy": dict(block=2048),  # the default
    "tree-2048-greedy-runs-2": dict(block=2048, run=2),
    "tree-2048-greedy-runs-4": dict(block=2048, run=4),
}
METHOD_SETS = ("all", "default", "ours")
PEERS = ("mean", "min-max", "cuboid", "exact-lse")  # min-max is Quest's, cuboid ArkVale's, exact-lse the oracle


def residents(budget: int) -> tuple[int, int]:
    """Returns sinks and window of a budget, as `Clustered` has them; the window full."""
    policy = icejax.Clustered(budget=budget)
    return policy.num_sinks, policy.num_window


def form(
    layer: Captured, name: str, page_size: int, sinks: int, window: int, leader: Captured | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the paged middle: keys, values [1, K, P, p, H] and the mask of slots [1, K, P, p].

    By the layer's own keys, or by those of a `leader`.
    """
    heads, tokens, size = layer.k.shape
    middle = tokens - sinks - window
    padded = -(-middle // 1024) * 1024
    padded = padded if padded <= SPAN else -(-padded // SPAN) * SPAN
    k, v, by = (
        jnp.pad(x[None, :, sinks : tokens - window], [(0, 0), (0, 0), (0, padded - middle), (0, 0)])
        for x in (layer.k, layer.v, (leader or layer).k)
    )
    valid = jnp.broadcast_to(jnp.arange(padded)[None, :] < middle, (1, padded))
    if FORMATIONS[name] is None:
        order = jnp.broadcast_to(jnp.arange(padded)[None, None, :], (1, heads, padded))
    else:
        order = _pack(by, valid, page_size=page_size, span=SPAN, **FORMATIONS[name])
    shape = (1, heads, padded // page_size, page_size)
    k, v = (jnp.take_along_axis(x, order[..., None], axis=2).reshape(*shape, size) for x in (k, v))
    return k, v, jnp.take_along_axis(jnp.broadcast_to(valid[:, None], order.shape), order, axis=2).reshape(shape)


_pack = jax.jit(pack, static_argnames=("page_size", "span", "run", "block"))


@dataclass(frozen=True)
class Method:
    """How pages are chosen and what becomes of the others.

    Attributes:
        score: `second-order` or a peer's.
        walk: by the digest tree, as `Clustered` does; else by a flat scan.
        candidates: pages fetched for each page of tokens attended exactly.
    """

    score: str = "second-order"
    tail: bool = True
    walk: bool = True
    candidates: int = 1
    group: tree.Group = "sum"
    digest_dtype: str | None = None
    page_dtype: str | None = None


RERANKED = Method(candidates=icejax.Clustered().candidates)
METHODS = (
    Method(tail=False, walk=False),
    Method(walk=False),
    Method(),
    Method(candidates=2),
    RERANKED,
    replace(RERANKED, tail=False),
    replace(RERANKED, walk=False),
    *(replace(RERANKED, digest_dtype=dtype) for dtype in NARROW),
    replace(RERANKED, page_dtype="int8"),
    replace(RERANKED, group="max"),
    replace(RERANKED, group="interleave"),
)


def scores(q: jax.Array, k: jax.Array, mask: jax.Array, digests: Digests, name: str) -> jax.Array:
    """Returns the scores [1, K, G, P] of pages by a named rule."""
    s = q.shape[-1] ** -0.5
    if name in ("second-order", "mean"):
        return score(q, digests, name)[0]
    if name == "exact-lse":
        tokens = jnp.where(mask[:, :, None], jnp.einsum("bkgh,bkpsh->bkgps", q, k) * s, -jnp.inf)
        return jax.nn.logsumexp(tokens, axis=-1)
    low, high = (f(jnp.where(mask[..., None], k, fill), axis=3) for f, fill in ((jnp.min, jnp.inf), (jnp.max, -jnp.inf)))
    if name == "cuboid":  # ArkVale: the middle of the box, and the mean distance from it
        centre = (low + high) / 2
        spread = jnp.where(mask[..., None], jnp.abs(k - centre[..., None, :]), 0).sum(3)
        spread /= jnp.maximum(digests.count, 1)[..., None]
        low, high = centre - spread, centre + spread
    low, high = (jnp.where(digests.count[..., None] > 0, x, 0) for x in (low, high))
    positive, negative = jnp.maximum(q, 0), jnp.minimum(q, 0)
    found = (jnp.einsum("bkgh,bkph->bkgp", positive, high) + jnp.einsum("bkgh,bkph->bkgp", negative, low)) * s
    return jnp.where(digests.count[:, :, None, :] > 0, found, -jnp.inf)


@jax.jit(static_argnames="dtype")
def levels_of(pages, *, dtype: str | None) -> tuple[Digests, ...]:
    """Returns the digest tree of the pages."""
    return tree.build(digest(*pages, dtype))


@jax.jit(static_argnames=("fetched", "method"))
def select(q, pages, levels, *, fetched: int, method: Method, guess=None, path=None) -> tree.Selection:
    """Returns the pages to fetch and the tail of the rest, for one query [1, K, G, H]; `guess` and `path` as in a walk."""
    if method.walk:
        opened = max(icejax.Clustered().opened, 2 * -(-fetched // tree.FAN_OUT))
        rules = dict(tail=method.tail, rule=method.score, group=method.group)
        return tree.walk(q, levels, opened=opened, selected=fetched, **rules, guess=guess, path=path)
    digests, shape = levels[0], levels[0].count.shape[2]
    k, mask = (jnp.pad(x, [(0, 0), (0, 0), (0, shape - x.shape[2])] + [(0, 0)] * (x.ndim - 3)) for x in (pages[0], pages[2]))
    found = scores(q, k, mask, digests, method.score)
    chosen = jax.lax.top_k(jax.nn.softmax(jnp.maximum(found, -1e30), -1).sum(2), fetched)[1]
    tail_out, tail_lse = jnp.zeros(q.shape), jnp.full(q.shape[:3], -jnp.inf)
    if method.tail:
        tail_out, tail_lse = tree.tail_of([(tree.without(score(q, digests)[1], chosen), digests.value)])
    return tree.Selection(chosen, jnp.take_along_axis(digests.count, chosen, axis=-1), tail_out, tail_lse, (chosen,))


@jax.jit(static_argnames=("budget", "tail"))
def attention(q, k_all, v_all, pages, found: tree.Selection, *, budget: int, tail: bool):
    """Returns the output per query head, and the scores of the page tokens attended exactly."""
    sinks, window = residents(budget)
    heads, tokens, size = k_all.shape
    taken = [
        jnp.take_along_axis(x, found.page_ids.reshape(*found.page_ids.shape, *(1,) * (x.ndim - 3)), axis=2)[0] for x in pages
    ]
    resident = [jnp.concatenate([x[:, :sinks], x[:, tokens - window :]], axis=1) for x in (k_all, v_all)]
    room = jnp.full(heads, budget - sinks - window)
    out, weights = attend_paged(
        q[0], (*resident, jnp.ones(resident[0].shape[:2], bool)), tuple(taken), (found.tail_out[0], found.tail_lse[0]),
        room=room, most=budget - sinks - window, tail=tail,
    )  # fmt: skip
    logits = jnp.einsum("kgh,kmsh->kgms", q[0], taken[0]) * size**-0.5
    return out, jnp.where(weights[:, None] > 0, logits, -jnp.inf).reshape(*q.shape[1:3], -1)


@jax.jit(static_argnames="budget")
def exact(q, k, v, *, budget: int):
    """Returns dense output, scores of the middle, log-sum-exp of all, and the output of each head's top tokens."""
    sinks, window = residents(budget)
    s = jnp.einsum("kgh,ksh->kgs", q, k) * q.shape[-1] ** -0.5
    out = jnp.einsum("kgs,ksh->kgh", jax.nn.softmax(s, -1), v)
    middle = jnp.arange(k.shape[1])[None, None, :]
    inside = (middle >= sinks) & (middle < k.shape[1] - window)
    outside = jnp.where(inside, s, -jnp.inf)
    least = jax.lax.top_k(outside, budget - sinks - window)[0][..., -1:]
    kept = jnp.where(inside & (s < least), -jnp.inf, s)
    top = jnp.einsum("kgs,ksh->kgh", jax.nn.softmax(kept, -1), v)
    sharp = jnp.exp(jax.nn.logsumexp(jax.lax.top_k(s, 64)[0], -1) - jax.nn.logsumexp(s, -1)) > 0.9
    return out, outside, least, top, sharp


def rows(
    layers: list[Captured], *, budgets: list[int], page_sizes: list[int], formations: list[str], methods: Sequence[Method]
) -> Iterator[dict]:
    """Yields one row per budget, formation, page size and method, over all captured layers."""
    for budget in budgets:
        truth = [[exact(q.reshape(x.k.shape[0], -1, q.shape[-1]), x.k, x.v, budget=budget) for q in x.q] for x in layers]
        errors = [(np.asarray(error(t[3], t[0])), np.asarray(t[4])) for each in truth for t in each]
        yield dict(pages="exact top tokens", score="oracle", tail=False, budget=budget) | _errors(errors)
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
                    found = _measure(layers, paged, truth, budget=budget, method=method)
                    row = dict(pages=name, page_size=page_size) | asdict(method) | dict(budget=budget)
                    yield row | found | dict(build_ms_per_1k=round(build, 2))


def _measure(layers, paged, truth, *, budget: int, method: Method) -> dict:
    errors, masses, recalls, micros, exact_tokens = [], [], [], [], []
    sinks, window = residents(budget)
    for layer, pages, each in zip(layers, paged, truth, strict=True):
        page_size = pages[0].shape[3]
        fetched = min(pages[0].shape[2], method.candidates * ((budget - sinks - window) // page_size))
        levels = levels_of(pages, dtype=method.digest_dtype)
        if method.page_dtype is not None:
            pages = (*(decode(encode(x, np.dtype(np.uint8)), "float32") for x in pages[:2]), pages[2])
        for q, (out, outside, least, _, sharp) in zip(layer.q, each, strict=True):
            grouped = q.reshape(1, layer.k.shape[0], -1, q.shape[-1])
            run = lambda g=grouped, p=pages, n=levels, f=fetched: select(g, p, n, fetched=f, method=method)  # noqa: E731
            jax.block_until_ready(run())
            for _ in range(REPEATS):
                started = time.perf_counter()
                chosen = jax.block_until_ready(run())
                micros.append((time.perf_counter() - started) * 1e6)
            found, inside = attention(grouped, layer.k, layer.v, pages, chosen, budget=budget, tail=method.tail)
            errors.append((np.asarray(error(found, out)), np.asarray(sharp)))
            masses.append(np.exp(jax.nn.logsumexp(inside, -1) - jax.nn.logsumexp(outside, -1)))
            recalls.append(np.asarray((inside >= least).sum(-1) / (outside >= least).sum(-1)))
            exact_tokens.append(sinks + window + int((inside[:, 0] > -jnp.inf).sum(-1).max()))
    return _errors(errors) | dict(
        mass=round(float(np.mean(masses)), 4),
        recall=round(float(np.mean(recalls)), 4),
        exact_tokens=max(exact_tokens),
        pages_fetched=fetched,
        digest_bytes=sum(x.nbytes for x in jax.tree.leaves(levels)),
        select_us=round(float(np.median(micros)), 1),
    )


def error(found: jax.Array, expected: jax.Array) -> jax.Array:
    return jnp.linalg.norm(found - expected, axis=-1) / jnp.linalg.norm(expected, axis=-1)


def _errors(errors) -> dict:
    every, sharp = (np.concatenate([e[i].ravel() for e in errors]) for i in (0, 1))
    parts = {"error": every, "error_sharp": every[sharp], "error_diffuse": every[~sharp]}
    return {name: round(float(x.mean()), 4) if x.size else None for name, x in parts.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ASSETS, help="checkpoint folder (default: the bundled one)")
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
    parser.add_argument("--methods", choices=METHOD_SETS, default="all", help="default: tree and flat; ours: no peers' scores")
    parser.add_argument("--quick", action="store_true", help="one prompt of 4,096 tokens, two formations, two budgets")
    arguments = parser.parse_args(argv)
    model, _ = icejax.load(arguments.model, dtype="float32")
    lengths = [4096] if arguments.quick else [int(n) for n in arguments.lengths.split(",")]
    budgets = [64, 256] if arguments.quick else [int(n) for n in arguments.budgets.split(",")]
    formations = (
        arguments.formations.split(",")
        if arguments.formations
        else ["positional", "tree-2048-greedy"]
        if arguments.quick
        else [*FORMATIONS]
    )
    peers = [Method(score=name, tail=False, walk=False) for name in PEERS]
    methods = [*METHODS, *peers] if arguments.methods == "all" and not arguments.quick else METHODS
    methods = [RERANKED, replace(RERANKED, walk=False)] if arguments.methods == "default" else methods
    page_sizes = [int(n) for n in arguments.page_sizes.split(",")]
    console = Console(stderr=True)
    where = dict(device=str(jax.devices()[0].device_kind), jax=jax.__version__)
    for length in lengths:
        rng = np.random.default_rng((arguments.seed, length))
        layers: list[Captured] = []
        for _ in track(
            range(1 if arguments.quick else arguments.prompts), "capture", console=console, disable=not console.is_terminal
        ):
            found = capture(model, *needle_prompt(rng, length=length, facts=arguments.facts))
            layers += [tiled(x, arguments.tile, rng) for x in found] if arguments.tile else found
        for row in rows(layers, budgets=budgets, page_sizes=page_sizes, formations=formations, methods=methods):
            print(json.dumps(dict(length=arguments.tile or length) | row | where), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
