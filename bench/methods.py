"""What a formation of pages, a score and a budget leave of one layer's attention: for `bench.pages` and `bench.sharing`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

import icejax
from bench.capture import Captured
from icejax.cache.index.digest_tree import Digested
from icejax.cache.policies.arkvale import CuboidIndex
from icejax.cache.policies.quest import BoundsIndex, bound
from icejax.ops.attention.dense import Attended, Scoring, merge_by_lse
from icejax.ops.pages import key_codes, tree, tree_walk
from icejax.ops.pages.code_reranking import RerankedTokens, rerank_by_codes
from icejax.ops.pages.digests import NARROW, digest, score
from icejax.ops.pages.key_scatter import along
from icejax.ops.pages.packing import pack
from icejax.ops.pages.paged_attention import attend_paged, attend_whole
from icejax.ops.pages.ranked_attention import rank_tokens
from icejax.ops.pages.value_fit import FromKeys, fitted, sums_of, unfitted
from icejax.ops.topk import best

STRETCH = 8192  # tokens; long texts are padded to whole ones
FORMATIONS = {
    "positional": None,
    "tree": dict(block=32),
    "greedy": dict(block=8192),
    "tree-1024-greedy": dict(block=1024),
    "tree-2048-greedy": dict(block=2048),  # the default
    "stretches-tree-2048-greedy": dict(block=2048, stretch=STRETCH),  # each packed on its own
}


def residents(budget: int) -> tuple[int, int]:
    """Returns sinks and window of a budget, as `Clustered` has them; the window full."""
    policy = icejax.Clustered(budget=budget)
    return policy.window_of.sinks, policy.window_of.slots


def form(
    layer: Captured, name: str, page_size: int, sinks: int, window: int, leader: Captured | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the paged middle: keys, values [1, K, P, p, H] and the mask of slots [1, K, P, p].

    By the layer's own keys, or by those of a `leader`.
    """
    heads, tokens, size = layer.k.shape
    middle = tokens - sinks - window
    padded = -(-middle // 1024) * 1024
    padded = padded if padded <= STRETCH else -(-padded // STRETCH) * STRETCH
    k, v, by = (
        jnp.pad(x[None, :, sinks : tokens - window], [(0, 0), (0, 0), (0, padded - middle), (0, 0)])
        for x in (layer.k, layer.v, (leader or layer).k)
    )
    valid = jnp.broadcast_to(jnp.arange(padded)[None, :] < middle, (1, padded))
    if FORMATIONS[name] is None:
        order = jnp.broadcast_to(jnp.arange(padded)[None, None, :], (1, heads, padded))
    else:
        order = _order(by, valid, page_size=page_size, **FORMATIONS[name])
    shape = (1, heads, padded // page_size, page_size)
    k, v = (jnp.take_along_axis(x, order[..., None], axis=2).reshape(*shape, size) for x in (k, v))
    return k, v, jnp.take_along_axis(jnp.broadcast_to(valid[:, None], order.shape), order, axis=2).reshape(shape)


@jax.jit(static_argnames=("page_size", "block", "stretch"))
def _order(k, valid, *, page_size: int, block: int, stretch: int | None = None) -> jax.Array:
    batch, heads, tokens, size = k.shape
    parts = -(-tokens // stretch) if stretch else 1
    k = k.reshape(batch, heads, parts, -1, size).swapaxes(1, 2).reshape(batch * parts, heads, -1, size)
    order = pack(k, valid.reshape(batch * parts, -1), page_size=page_size, block=block)
    order = order.reshape(batch, parts, heads, -1) + (jnp.arange(parts) * (tokens // parts))[None, :, None, None]
    return order.swapaxes(1, 2).reshape(batch, heads, tokens)


@dataclass(frozen=True)
class Method:
    """How pages are chosen and what becomes of the others.

    Attributes:
        score: `second-order` or a peer's.
        walk: by the digest tree, as `Clustered` does; else by a flat scan.
        candidates: pages fetched for each page of tokens attended exactly; None: by the rule of `Clustered`, which counts
            one or two pages more.
        fetched: pages fetched, whatever `candidates`; None: by that.
        opened: nodes of the tree opened per level; None: as many as `Clustered` opens.
        value_fit: whether the tail's values are fitted to keys.
        keys_first: whether the keys of twice as many pages are fetched, and the values of their best tokens alone.
        codes: bits of keys by which tokens of four times the pages are ranked before any is fetched, as `Coded` does.
        singly: whether these are then fetched one by one, not the pages that hold most.
    """

    score: str = "second-order"
    tail: bool = True
    walk: bool = True
    candidates: int | None = 1
    fetched: int | None = None
    opened: int | None = None
    value_fit: bool = True
    keys_first: bool = False
    codes: int | None = None
    singly: bool = True
    group: tree_walk.PageGroup = "sum"
    digest_dtype: str | None = None
    page_dtype: str | None = None


RERANKED = Method(candidates=None, keys_first=True)
WHOLE = replace(RERANKED, keys_first=False)
DEFAULT = (RERANKED, WHOLE, replace(RERANKED, value_fit=False), replace(RERANKED, walk=False))
FEWER = (RERANKED, *(replace(RERANKED, fetched=n) for n in (28, 40)), *(replace(RERANKED, opened=n) for n in (80, 96, 112)))
CODED = (RERANKED, *(replace(WHOLE, codes=bits, singly=singly) for singly in (True, False) for bits in key_codes.BITS))
METHODS = (
    Method(tail=False, walk=False),
    Method(walk=False),
    Method(),
    Method(candidates=2),
    Method(candidates=4),
    RERANKED,
    WHOLE,
    replace(WHOLE, tail=False),
    replace(RERANKED, value_fit=False),
    replace(RERANKED, walk=False),
    *(replace(RERANKED, digest_dtype=dtype) for dtype in NARROW),
    replace(WHOLE, page_dtype="int8"),
    replace(RERANKED, group="max"),
    replace(RERANKED, group="interleave"),
)
# min-max is Quest's, cuboid ArkVale's, exact-lse the oracle
PEERS = tuple(Method(score=name, tail=False, walk=False) for name in ("mean", "min-max", "cuboid", "exact-lse"))
SETS = dict(all=METHODS + PEERS, default=DEFAULT, ours=METHODS, fewer=FEWER, coded=CODED)


def scores(q: jax.Array, k: jax.Array, mask: jax.Array, index: Digested, name: str) -> jax.Array:
    """Returns the scores [1, K, G, P] of pages by a named rule."""
    s, digests = q.shape[-1] ** -0.5, index.levels[0]
    if name in ("second-order", "mean"):
        return score(q, digests, along(q, index.scatter, scoring=Scoring(s)), name, scoring=Scoring(s)).choice
    if name == "exact-lse":
        tokens = jnp.where(mask[:, :, None], jnp.einsum("bkgh,bkpsh->bkgps", q, k) * s, -jnp.inf)
        return jax.nn.logsumexp(tokens, axis=-1)
    index = CuboidIndex() if name == "cuboid" else BoundsIndex()
    return s * bound(q, index.describe(k, None, mask))


@jax.jit(static_argnames="dtype")
def index_of(pages, *, dtype: str | None = None) -> Digested:
    """Returns the digest tree of the pages, with values from keys."""
    shape, sums = pages[0].shape, sums_of(*pages)
    none, scatter = unfitted(*shape[:2], shape[-1], pages[1].shape[-1]), sums.keys.sum(2)
    return Digested(tree.build(digest(*pages, dtype)), scatter, fitted(none, jnp.zeros_like(scatter), sums))


def from_keys_of(index: Digested) -> FromKeys | None:
    """Returns values from keys, if there are any."""
    return None if index.fit is None else FromKeys(index.fit.matrix)


@jax.jit(static_argnames=("fetched", "method"))
def select(q, pages, index: Digested, *, fetched: int, method: Method, guess=None, path=None) -> tree_walk.WalkResult:
    """Returns the pages to fetch and the tail of the rest, for one query [1, K, G, H]; `guess` and `path` as in a walk."""
    scoring, from_keys = Scoring(q.shape[-1] ** -0.5), from_keys_of(index)
    if method.walk:
        opened = tree.num_opened(fetched, least=method.opened or icejax.Clustered().opened)
        rules = tree_walk.WalkRules(opened=opened, selected=fetched, tail=method.tail, score=method.score, group=method.group)
        about = dict(guess=guess, path=path, from_keys=from_keys)
        return tree_walk.walk(q, index.levels, index.scatter, scoring=scoring, rules=rules, **about)
    digests, shape = index.levels[0], index.levels[0].count.shape[2]
    k, mask = (jnp.pad(x, [(0, 0), (0, 0), (0, shape - x.shape[2])] + [(0, 0)] * (x.ndim - 3)) for x in (pages[0], pages[2]))
    found = scores(q, k, mask, index, method.score)
    chosen, taken, _ = best(jax.nn.softmax(jnp.maximum(found, -1e30), -1).sum(2), fetched)
    tail_out, tail_lse = jnp.zeros(q.shape), jnp.full(q.shape[:3], -jnp.inf)
    if method.tail:
        lies = along(q, index.scatter, scoring=scoring)
        weighed = score(q, digests, lies, scoring=scoring)
        weighed = weighed._replace(weight=jnp.where(taken[:, :, None], -jnp.inf, weighed.weight))
        tail_out, tail_lse = tree_walk.tail_of([(weighed, digests)], lies, from_keys)
    return tree_walk.WalkResult(
        chosen, jnp.take_along_axis(digests.count, chosen, axis=-1), tail_out, tail_lse, jnp.zeros_like(tail_lse), (chosen,)
    )


@jax.jit(static_argnames=("page_size", "bits", "wanted", "whole"))
def look_again(
    q,
    codes: key_codes.KeyCodes,
    index: Digested,
    found: tree_walk.WalkResult,
    *,
    page_size: int,
    bits: int,
    wanted: int,
    whole: bool,
) -> RerankedTokens:
    """Returns of the pages found the tokens or the pages to fetch, and the tail with the rest of these."""

    def at(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, found.page_ids.reshape(*found.page_ids.shape, *(1,) * (x.ndim - 3)), axis=2)[0]

    pages = replace(jax.tree.map(at, index.levels[0]), count=found.counts[0])
    keys = key_codes.decode_keys(jax.tree.map(lambda x: at(x)[None], codes), page_size, bits)[0]
    rest, fit = Attended(found.tail_out[0], found.tail_lse[0]), jax.tree.map(lambda x: x[0], from_keys_of(index))
    return rerank_by_codes(q[0], keys, pages, rest, fit, scoring=Scoring(q.shape[-1] ** -0.5), wanted=wanted, whole=whole)


def of_pages(found: tree_walk.WalkResult, looked: RerankedTokens) -> tree_walk.WalkResult:
    """Returns the pages that a second look has left of those found."""
    ids = jnp.take_along_axis(found.page_ids, looked.best[None], axis=2)
    return replace(
        found, page_ids=ids, counts=looked.counts[None], tail_out=looked.tail.out[None], tail_lse=looked.tail.lse[None]
    )


@jax.jit(static_argnames="budget")
def attention_of_tokens(q, k_all, v_all, pages, found: tree_walk.WalkResult, looked: RerankedTokens, *, budget: int):
    """Returns `attention` of tokens."""
    sinks, window = residents(budget)
    heads, tokens, size = k_all.shape

    def at(x: jax.Array) -> jax.Array:
        x = jnp.take_along_axis(x, found.page_ids[..., None, None], axis=2)[0].reshape(heads, -1, size)
        return jnp.take_along_axis(x, looked.best[..., None], axis=1)

    resident = [jnp.concatenate([x[:, :sinks], x[:, tokens - window :]], axis=1) for x in (k_all, v_all)]
    keys, values = (at(x)[:, :, None] for x in pages[:2])
    near, scoring = (*resident, jnp.ones(resident[0].shape[:2], bool)), Scoring(size**-0.5)
    attended, _ = attend_whole(q[0], near, (keys, values, looked.counts[..., None] > 0), scoring=scoring)
    logits = jnp.einsum("kgh,kmsh->kgms", q[0], keys)[..., 0] * size**-0.5
    return merge_by_lse(*attended, *looked.tail)[0], jnp.where(looked.counts[:, None] > 0, logits, -jnp.inf)


@jax.jit(static_argnames="budget")
def attention_of_keys(q, k_all, v_all, pages, index: Digested, found: tree_walk.WalkResult, *, budget: int):
    """Returns `attention` where the keys of the pages found come first."""
    sinks, window = residents(budget)
    heads, tokens, size = k_all.shape

    def at(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, found.page_ids.reshape(*found.page_ids.shape, *(1,) * (x.ndim - 3)), axis=2)[0]

    near, near_values = (jnp.concatenate([x[:, :sinks], x[:, tokens - window :]], axis=1) for x in (k_all, v_all))
    keys, values = (at(x) for x in pages[:2])
    known = rank_tokens(
        q[0], (near, jnp.ones(near.shape[:2], bool)), keys, replace(jax.tree.map(at, index.levels[0]), count=found.counts[0]),
        Attended(found.tail_out[0], found.tail_lse[0]), jax.tree.map(lambda x: x[0], from_keys_of(index)),
        scoring=Scoring(size**-0.5), room=jnp.full(heads, budget - sinks - window), most=budget - sinks - window,
    )  # fmt: skip
    flat = values.reshape(heads, -1, size)
    out = known.attended(near_values, jnp.take_along_axis(flat, known.best[..., None], axis=1)).out
    logits = jnp.einsum("kgh,ksh->kgs", q[0], keys.reshape(heads, -1, size)) * size**-0.5
    logits = jnp.take_along_axis(logits, known.best[:, None], axis=2)
    return out, jnp.where(known.there[:, None], logits, -jnp.inf)


@jax.jit(static_argnames=("budget", "tail"))
def attention(q, k_all, v_all, pages, found: tree_walk.WalkResult, from_keys: FromKeys | None, *, budget: int, tail: bool):
    """Returns the output per query head, and the scores of the page tokens attended exactly."""
    sinks, window = residents(budget)
    heads, tokens, size = k_all.shape
    taken = [
        jnp.take_along_axis(x, found.page_ids.reshape(*found.page_ids.shape, *(1,) * (x.ndim - 3)), axis=2)[0] for x in pages
    ]
    resident = [jnp.concatenate([x[:, :sinks], x[:, tokens - window :]], axis=1) for x in (k_all, v_all)]
    room = jnp.full(heads, budget - sinks - window)
    attended, weights, _ = attend_paged(
        q[0], (*resident, jnp.ones(resident[0].shape[:2], bool)), tuple(taken), (found.tail_out[0], found.tail_lse[0]),
        jax.tree.map(lambda x: x[0], from_keys), scoring=Scoring(size**-0.5), room=room, most=budget - sinks - window,
        tail=tail,
    )  # fmt: skip
    logits = jnp.einsum("kgh,kmsh->kgms", q[0], taken[0]) * size**-0.5
    return attended.out, jnp.where(weights[:, None] > 0, logits, -jnp.inf).reshape(*q.shape[1:3], -1)


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


def error(found: jax.Array, expected: jax.Array) -> jax.Array:
    return jnp.linalg.norm(found - expected, axis=-1) / jnp.linalg.norm(expected, axis=-1)
