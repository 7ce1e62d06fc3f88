"""Attention of one step through the pages of a `Method`, and its error: for `bench.attention.pages`, `calibrate` and `sharing`.

Shapes: queries of one step [1, K, G, H]; pages are keys and values f32[1, K, P, p, H] and a mask of slots bool[1, K, P, p].
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

import icejax
from bench.attention.methods import Method, residents
from icejax.cache.bases.reranking import at
from icejax.cache.index.digest_tree import Digested
from icejax.cache.policies.arkvale import CuboidIndex
from icejax.cache.policies.quest import BoundsIndex, bound
from icejax.ops.attention.dense import Attended, Scoring, merge_by_lse
from icejax.ops.pages import tree, tree_walk
from icejax.ops.pages.code_attention import CodedPages, CodedTokens, attend_codes
from icejax.ops.pages.digests import digest, score
from icejax.ops.pages.key_scatter import along
from icejax.ops.pages.paged_attention import attend_paged, attend_whole
from icejax.ops.pages.ranked_attention import rank_tokens
from icejax.ops.pages.value_fit import FromKeys, empty_fit, page_sums, update_fit
from icejax.ops.topk import best


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
    """Returns the digest tree of the pages, with the matrix that estimates values from keys."""
    shape, sums = pages[0].shape, page_sums(*pages)
    none, scatter = empty_fit(*shape[:2], shape[-1], pages[1].shape[-1]), sums.keys.sum(2)
    return Digested(tree.build(digest(*pages, dtype)), scatter, update_fit(none, jnp.zeros_like(scatter), sums))


def from_keys_of(index: Digested) -> FromKeys | None:
    """Returns the matrix that estimates values from keys; None without one."""
    return None if index.fit is None else FromKeys(index.fit.matrix)


@jax.jit(static_argnames=("fetched", "method"))
def select(q, pages, index: Digested, *, fetched: int, method: Method, guess=None, path=None) -> tree_walk.WalkResult:
    """Returns the pages to fetch, and the tail of all others, for one query [1, K, G, H].

    Args:
        guess, path: as in `icejax.ops.pages.tree_walk.walk`.
    """
    scoring, from_keys = Scoring(q.shape[-1] ** -0.5), from_keys_of(index)
    if method.walk:
        opened = tree.num_opened(fetched, least=method.opened or icejax.Clustered().opened)
        rules = tree_walk.WalkRules(opened=opened, selected=fetched, tail=method.tail, score=method.score, group=method.group)
        inputs = dict(guess=guess, path=path, from_keys=from_keys)
        return tree_walk.walk(q, index.levels, index.scatter, scoring=scoring, rules=rules, **inputs)
    digests, padded_pages = index.levels[0], index.levels[0].count.shape[2]
    k, mask = (
        jnp.pad(x, [(0, 0), (0, 0), (0, padded_pages - x.shape[2])] + [(0, 0)] * (x.ndim - 3)) for x in (pages[0], pages[2])
    )
    page_scores = scores(q, k, mask, index, method.score)
    ids, chosen_mask, _ = best(jax.nn.softmax(jnp.maximum(page_scores, -1e30), -1).sum(2), fetched)
    tail_out, tail_lse = jnp.zeros(q.shape), jnp.full(q.shape[:3], -jnp.inf)
    if method.tail:
        spans = along(q, index.scatter, scoring=scoring)
        tail_scores = score(q, digests, spans, scoring=scoring)
        tail_scores = tail_scores._replace(weight=jnp.where(chosen_mask[:, :, None], -jnp.inf, tail_scores.weight))
        tail_out, tail_lse = tree_walk.tail_of([(tail_scores, digests)], spans, from_keys)
    return tree_walk.WalkResult(
        ids,
        jnp.take_along_axis(digests.count, ids, axis=-1),
        tail_out,
        tail_lse,
        jnp.zeros_like(tail_lse),
        (ids,),
    )


@jax.jit(static_argnames=("page_size", "bits", "wanted", "whole"))
def look_again(
    q, codes: CodedPages, walk: tree_walk.WalkResult, *, page_size: int, bits: int, wanted: int, whole: bool
) -> CodedTokens:
    """Ranks the tokens of the chosen pages by codes; returns the tokens or pages to fetch, and the tail with the others."""
    return attend_codes(
        q, replace(at(codes, walk.page_ids), count=walk.counts), Attended(walk.tail_out, walk.tail_lse),
        scoring=Scoring(q.shape[-1] ** -0.5), page_size=page_size, bits=bits, wanted=wanted, whole=whole,
    )  # fmt: skip


def of_pages(walk: tree_walk.WalkResult, looked: CodedTokens) -> tree_walk.WalkResult:
    """Returns the walk's result with only the pages that ranking by codes has kept."""
    ids = jnp.take_along_axis(walk.page_ids, looked.ids, axis=2)
    return replace(walk, page_ids=ids, counts=looked.counts, tail_out=looked.rest.out, tail_lse=looked.rest.lse)


@jax.jit(static_argnames="budget")
def attention_of_tokens(q, k_all, v_all, pages, walk: tree_walk.WalkResult, looked: CodedTokens, *, budget: int):
    """Returns output and scores as `attention` does, where single tokens are fetched."""
    sinks, window = residents(budget)
    heads, tokens, size = k_all.shape

    def take(x: jax.Array) -> jax.Array:
        x = jnp.take_along_axis(x, walk.page_ids[..., None, None], axis=2)[0].reshape(heads, -1, size)
        return jnp.take_along_axis(x, looked.ids[0][..., None], axis=1)

    resident = [jnp.concatenate([x[:, :sinks], x[:, tokens - window :]], axis=1) for x in (k_all, v_all)]
    keys, values = (take(x)[:, :, None] for x in pages[:2])
    resident_slots, scoring = (*resident, jnp.ones(resident[0].shape[:2], bool)), Scoring(size**-0.5)
    attended, _ = attend_whole(q[0], resident_slots, (keys, values, looked.counts[0][..., None] > 0), scoring=scoring)
    logits = jnp.einsum("kgh,kmsh->kgms", q[0], keys)[..., 0] * size**-0.5
    return merge_by_lse(*attended, *(x[0] for x in looked.rest))[0], jnp.where(looked.counts[0][:, None] > 0, logits, -jnp.inf)


@jax.jit(static_argnames="budget")
def attention_of_keys(q, k_all, v_all, pages, index: Digested, walk: tree_walk.WalkResult, *, budget: int):
    """Returns output and scores as `attention` does, where the keys of the chosen pages are fetched first."""
    sinks, window = residents(budget)
    heads, tokens, size = k_all.shape

    def take(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, walk.page_ids.reshape(*walk.page_ids.shape, *(1,) * (x.ndim - 3)), axis=2)[0]

    near, near_values = (jnp.concatenate([x[:, :sinks], x[:, tokens - window :]], axis=1) for x in (k_all, v_all))
    keys, values = (take(x) for x in pages[:2])
    ranked = rank_tokens(
        q[0], (near, jnp.ones(near.shape[:2], bool)), keys, replace(jax.tree.map(take, index.levels[0]), count=walk.counts[0]),
        Attended(walk.tail_out[0], walk.tail_lse[0]), jax.tree.map(lambda x: x[0], from_keys_of(index)),
        scoring=Scoring(size**-0.5), room=jnp.full(heads, budget - sinks - window), most=budget - sinks - window,
    )  # fmt: skip
    flat = values.reshape(heads, -1, size)
    out = ranked.attended(near_values, jnp.take_along_axis(flat, ranked.best[..., None], axis=1)).out
    logits = jnp.einsum("kgh,ksh->kgs", q[0], keys.reshape(heads, -1, size)) * size**-0.5
    logits = jnp.take_along_axis(logits, ranked.best[:, None], axis=2)
    return out, jnp.where(ranked.there[:, None], logits, -jnp.inf)


@jax.jit(static_argnames=("budget", "tail"))
def attention(q, k_all, v_all, pages, walk: tree_walk.WalkResult, from_keys: FromKeys | None, *, budget: int, tail: bool):
    """Returns the output [K, G, H], and the scores [K, G, tokens] of page tokens; -inf where not attended exactly."""
    sinks, window = residents(budget)
    heads, tokens, size = k_all.shape
    fetched_pages = [
        jnp.take_along_axis(x, walk.page_ids.reshape(*walk.page_ids.shape, *(1,) * (x.ndim - 3)), axis=2)[0] for x in pages
    ]
    resident = [jnp.concatenate([x[:, :sinks], x[:, tokens - window :]], axis=1) for x in (k_all, v_all)]
    room = jnp.full(heads, budget - sinks - window)
    attended, weights, _ = attend_paged(
        q[0], (*resident, jnp.ones(resident[0].shape[:2], bool)), tuple(fetched_pages), (walk.tail_out[0], walk.tail_lse[0]),
        jax.tree.map(lambda x: x[0], from_keys), scoring=Scoring(size**-0.5), room=room, most=budget - sinks - window,
        tail=tail,
    )  # fmt: skip
    logits = jnp.einsum("kgh,kmsh->kgms", q[0], fetched_pages[0]) * size**-0.5
    return attended.out, jnp.where(weights[:, None] > 0, logits, -jnp.inf).reshape(*q.shape[1:3], -1)


@jax.jit(static_argnames="budget")
def exact(q, k, v, *, budget: int):
    """Returns exact attention of one query [K, G, H], and that of each head's top tokens.

    Returns:
        The dense output [K, G, H]; the scores [K, G, S], -inf for sinks and window; the lowest score [K, G, 1] among each
        head's top tokens; the output of sinks, window and top tokens alone; and which heads are sharp, bool[K, G].
    """
    sinks, window = residents(budget)
    scores = jnp.einsum("kgh,ksh->kgs", q, k) * q.shape[-1] ** -0.5
    out = jnp.einsum("kgs,ksh->kgh", jax.nn.softmax(scores, -1), v)
    positions = jnp.arange(k.shape[1])[None, None, :]
    in_middle = (positions >= sinks) & (positions < k.shape[1] - window)
    middle_scores = jnp.where(in_middle, scores, -jnp.inf)
    threshold = jax.lax.top_k(middle_scores, budget - sinks - window)[0][..., -1:]
    kept_scores = jnp.where(in_middle & (scores < threshold), -jnp.inf, scores)
    top_out = jnp.einsum("kgs,ksh->kgh", jax.nn.softmax(kept_scores, -1), v)
    sharp = jnp.exp(jax.nn.logsumexp(jax.lax.top_k(scores, 64)[0], -1) - jax.nn.logsumexp(scores, -1)) > 0.9
    return out, middle_scores, threshold, top_out, sharp


def error(actual: jax.Array, expected: jax.Array) -> jax.Array:
    """Returns the relative L2 error along the last axis; of (3, 4) for (3, 0) it is 4 / 3."""
    return jnp.linalg.norm(actual - expected, axis=-1) / jnp.linalg.norm(expected, axis=-1)
