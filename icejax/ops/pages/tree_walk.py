"""The walk down a digest tree: selects the pages a query needs and estimates the attention to all others.

Policies with digests call `walk` in a decode step, with queries [B, K, G, H]. Of 9,216 pages in 1,152 nodes all nodes are
scored, the best 88 are opened, and of their 704 pages the best 56 are selected. The other 1,064 nodes and 648 pages are the
tail: their digests estimate it.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from icejax.ops.attention.dense import Scoring
from icejax.ops.pages.digests import Digests, Score, Scores, score, weighted
from icejax.ops.pages.key_scatter import Along, along
from icejax.ops.pages.tree import FAN_OUT, blocks_in_use, families, few_blocks, gather
from icejax.ops.pages.value_fit import FromKeys
from icejax.ops.topk import best, mask_of

PageGroup = Literal["sum", "max", "interleave"]


@dataclass(frozen=True, kw_only=True)
class WalkRules:
    """How a walk selects pages.

    Attributes:
        opened: nodes opened per level.
        selected: pages selected, or all if there are fewer.
        tail: whether to estimate the attention to the other pages; else `tail_lse` is -inf.
        score: how a page or node is scored.
        group: how the query heads of a KV head agree on pages: by the `sum` or the `max` over heads of each head's softmax over
            the candidates, or by `interleave`, which takes each head's best candidates in turn (IceCache's rule).
    """

    opened: int
    selected: int
    tail: bool = True
    score: Score = "second-order"
    group: PageGroup = "sum"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WalkResult:
    """The result of a walk.

    Attributes:
        page_ids: the selected pages, best first.
        counts: tokens of each selected page; 0 for none.
        tail_out: estimated attention output of the tail, all other pages; over whole keys where digests have no values.
        tail_lse: estimated log-sum-exp of the tail; -inf for an empty tail.
        tail_uneven: expected sum over tail tokens of (weight - mean weight of their node)^2, for normal scores and weights that
            add up to 1 over the tail.
        path: indices of the nodes opened at each level, highest first, then of the selected pages, among a level's candidates.
    """

    page_ids: jax.Array  # i32[B, K, M]
    counts: jax.Array  # i32[B, K, M]
    tail_out: jax.Array  # f32[B, K, G, Hv]
    tail_lse: jax.Array  # f32[B, K, G]
    tail_uneven: jax.Array  # f32[B, K, G]
    path: tuple[jax.Array, ...]  # i32[B, K, n]


class _Query(NamedTuple):
    """Queries, and the covariance of pages applied to them.

    Attributes:
        q: queries whose attention is estimated.
        guess: queries that select instead of `q`; None: `q` selects.
    """

    q: jax.Array  # f32[B, K, G, H]
    guess: jax.Array | None
    along_q: Along
    along_guess: Along | None
    scoring: Scoring


class _Picks(NamedTuple):
    """The nodes or pages chosen at one level of a walk.

    Attributes:
        indices: indices among the level's candidates, best first, i32[B, K, M].
        counts: tokens of each, i32[B, K, M].
        nodes: indices in the tree's level, i32[B, K, M].
        chosen: which candidates are chosen, bool[B, K, P].
    """

    indices: jax.Array
    counts: jax.Array
    nodes: jax.Array
    chosen: jax.Array


def walk(
    q: Float[Array, "B K G H"],
    levels: tuple[Digests, ...],
    scatter: Float[Array, "B K H H"],
    *,
    scoring: Scoring,
    rules: WalkRules,
    guess: Float[Array, "B K G H"] | None = None,
    path: tuple[jax.Array, ...] | None = None,
    from_keys: FromKeys | None = None,
) -> WalkResult:
    """Returns the pages of highest score, and the estimated attention to all others.

    From the highest level down, the best nodes of a level are opened and the others go to the tail. At the last level the best
    pages of the opened nodes are selected. All query heads of a KV head share one set of nodes and pages.

    Args:
        levels: the levels of the tree, highest last.
        scatter: sum over tokens of c c^T, where c is the token's key minus the mean key of its page.
        guess: queries to select by instead of `q`; the tail is always that of `q`.
        path: the `path` of another walk over a tree of the same tokens, to follow instead of choosing.
        from_keys: estimator of values from keys; None: a node's value is its mean value.
    """
    along_q = along(q, scatter, scoring=scoring)
    query = _Query(q, guess, along_q, None if guess is None else along(guess, scatter, scoring=scoring), scoring)
    descend = functools.partial(_descend, query, levels[:-1], rules=rules, path=path, from_keys=from_keys)
    highest = levels[-1]
    ids = jax.lax.broadcasted_iota(jnp.int32, highest.count.shape, 2)
    few = few_blocks(highest.count.shape[2], least=max(rules.opened, rules.selected))
    if few == 0 or path is not None:  # a path counts all nodes
        return descend(highest, ids)

    def of_nodes_in_use(highest: Digests) -> WalkResult:  # on a CPU an empty digest takes as long as a full one
        in_use = blocks_in_use(highest.count)
        gathered = functools.partial(gather, in_use=in_use, few=few)
        return jax.lax.cond(in_use.sum() <= few, lambda x: descend(*gathered(x)), lambda x: descend(x, ids), highest)

    return jax.lax.platform_dependent(highest, cpu=of_nodes_in_use, default=lambda x: descend(x, ids))


def _descend(
    query: _Query,
    lower: tuple[Digests, ...],
    candidates: Digests,
    ids: Int[Array, "B K P"],
    *,
    rules: WalkRules,
    path: tuple[jax.Array, ...] | None,
    from_keys: FromKeys | None,
) -> WalkResult:
    """Walks from `candidates`, nodes of the highest level with the indices `ids`, through the `lower` levels."""
    q, along_q, scoring = query.q, query.along_q, query.scoring
    visited, tail = [], []
    for below in (*lower[::-1], None):
        scores = score(q, candidates, along_q, rules.score, scoring=scoring)
        if path is None:
            wanted = rules.selected if below is None else rules.opened
            picks = _choose(query, candidates, scores, ids, rules, wanted)
        else:
            picks = _follow(path[len(visited)], candidates, ids)
        visited.append(picks.indices if visited else picks.nodes)
        tail.append((scores._replace(weight=jnp.where(picks.chosen[:, :, None], -jnp.inf, scores.weight)), candidates))
        if below is not None:
            candidates, ids = _open(below, picks)
    page_ids = jnp.where(picks.counts > 0, picks.nodes, 0)  # an empty page may lie past the last page
    if not rules.tail:
        empty = jnp.full(q.shape[:3], -jnp.inf)
        size = (candidates.value or candidates.mean).data.shape[-1]
        return WalkResult(page_ids, picks.counts, jnp.zeros((*q.shape[:3], size)), empty, jnp.zeros_like(empty), tuple(visited))
    out, lse = tail_of(tail, along_q, from_keys)
    return WalkResult(page_ids, picks.counts, out, lse, uneven_of(tail, lse), tuple(visited))


def _choose(
    query: _Query, candidates: Digests, scores: Scores, ids: Int[Array, "B K P"], rules: WalkRules, wanted: int
) -> _Picks:
    """Returns the `wanted` best candidates, or all if there are fewer."""
    estimates = scores.choice
    if query.guess is not None:
        estimates = score(query.guess, candidates, query.along_guess, rules.score, scoring=query.scoring).choice
    wanted = min(wanted, estimates.shape[-1])
    worth = jnp.where(candidates.count > 0, _worth(estimates, rules.group, wanted), -jnp.inf)
    indices, chosen, (counts, nodes) = best(worth, wanted, candidates.count, ids)
    return _Picks(indices, counts, nodes, chosen)


def _follow(indices: Int[Array, "B K M"], candidates: Digests, ids: Int[Array, "B K P"]) -> _Picks:
    """Returns the candidates that another walk chose."""
    counts, nodes = (jnp.take_along_axis(x, indices, axis=-1) for x in (candidates.count, ids))
    return _Picks(indices, counts, nodes, mask_of(indices, candidates.count.shape[-1]))


def _open(below: Digests, picks: _Picks) -> tuple[Digests, Int[Array, "B K P"]]:
    """Returns the children of the chosen nodes, and their indices in the level below."""
    filled = picks.counts > 0
    nodes = jnp.where(filled, picks.nodes, 0)  # an empty node may lie past the last family
    opened = jax.tree.map(lambda x: _take_families(x, nodes), families(below))
    opened = dataclasses.replace(opened, count=jnp.where(filled[..., None], opened.count, 0))
    ids = nodes[..., None] * FAN_OUT + jnp.arange(FAN_OUT, dtype=jnp.int32)[None, None, None, :]
    return jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1, *x.shape[4:]), opened), ids.reshape(*nodes.shape[:2], -1)


def tail_of(
    rest: list[tuple[Scores, Digests]], lies: Along, from_keys: FromKeys | None = None
) -> tuple[Float[Array, "B K G _"], Float[Array, "B K G"]]:
    """Returns the estimated output and log-sum-exp of nodes, from their scores and mean values.

    Softmax prefers keys along the query, so that a node's weighted mean key lies off its mean, to first order by
    `lean * lies.moved`; `from_keys` moves the mean value accordingly.

    Args:
        rest: scores and digests of the nodes, level by level; a `weight` of -inf leaves a node out.
        lies: the covariance of pages applied to the queries.
        from_keys: estimator of values from keys; None: mean values are not moved.
    """
    highest = jnp.stack([scores.weight.max(-1) for scores, _ in rest]).max(0)
    base = jnp.where(jnp.isneginf(highest), 0.0, highest)
    weights = [jnp.exp(scores.weight - base[..., None]) for scores, _ in rest]
    total = sum(w.sum(-1) for w in weights)
    out = sum(weighted(w, digests) for w, (_, digests) in zip(weights, rest, strict=True))
    if from_keys is not None:
        moved = sum((w * scores.lean).sum(-1) for w, (scores, _) in zip(weights, rest, strict=True))
        out += from_keys(moved[..., None] * lies.moved)
    return out / jnp.maximum(total, 1e-30)[..., None], jnp.log(total) + base


def uneven_of(rest: list[tuple[Scores, Digests]], lse: Float[Array, "B K G"]) -> Float[Array, "B K G"]:
    """Returns `WalkResult.tail_uneven` of nodes with the log-sum-exp `lse`.

    For n tokens with normal scores of variance d^2 and weights that add up to 1, the expected sum of squares of the weights
    minus their mean is (exp(d^2) - 1) / n, at most 1 here.
    """
    base = jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None]
    uneven = jnp.zeros_like(lse)
    for scores, digests in rest:
        count = jnp.maximum(digests.count[:, :, None].astype(jnp.float32), 1.0)
        node_uneven = jnp.minimum(jnp.expm1(scores.wide) / count, 1.0)
        uneven += (jnp.exp(2 * (scores.weight - base)) * node_uneven).sum(-1)
    return uneven


def _worth(scores: Float[Array, "B K G P"], group: PageGroup, wanted: int) -> Float[Array, "B K P"]:
    """Returns the worth of candidates to a KV head, by which `wanted` of them are chosen; not NaN even if all are empty.

    By `interleave`, query heads with the best candidates (3, 1) and (5, 3) rank them 3, 5, 1.
    """
    if group == "interleave":
        batch, heads, size, nodes = scores.shape
        best_of_heads = best(scores, wanted)[0].reshape(batch * heads, -1)
        turns = (jnp.arange(wanted)[None, :] * size + jnp.arange(size)[:, None]).reshape(1, -1)
        worth = jnp.full((batch * heads, nodes), -jnp.inf, jnp.float32).at[jnp.arange(batch * heads)[:, None], best_of_heads]
        return worth.max(-turns.astype(jnp.float32)).reshape(batch, heads, nodes)
    # Rows and KV heads in one axis: XLA:CPU reduces over one axis less in a tenth of the time.
    shares = jax.nn.softmax(jnp.maximum(scores, -1e30).reshape(-1, *scores.shape[2:]), axis=-1)
    return (shares.sum(1) if group == "sum" else shares.max(1)).reshape(*scores.shape[:2], -1)


def _take_families(x: jax.Array, nodes: jax.Array) -> jax.Array:
    """Returns the families [B, K, M, 8, ...] of `nodes` [B, K, M]."""
    return jnp.take_along_axis(x, nodes.reshape(*nodes.shape, *(1,) * (x.ndim - 3)), axis=2, mode="promise_in_bounds")
