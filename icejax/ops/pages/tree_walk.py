"""The walk down a digest tree: which pages a query needs, and what all others contribute.

Of 9,216 pages in 1,152 nodes all nodes are scored, the best 88 are opened, and of the 704 pages that come to light the best 56
are chosen. The other 1,064 nodes and 648 pages are the tail: they count by their digests.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from icejax.ops.attention.dense import Scoring
from icejax.ops.pages.digests import Digests, Score, Scores, score, weighted
from icejax.ops.pages.key_scatter import Along, along
from icejax.ops.pages.tree import FAN_OUT, families
from icejax.ops.pages.value_fit import FromKeys
from icejax.ops.topk import best, mask_of

PageGroup = Literal["sum", "max", "interleave"]


@dataclass(frozen=True, kw_only=True)
class WalkRules:
    """How a walk chooses.

    Attributes:
        opened: nodes opened per level.
        selected: pages chosen, if there are so many.
        tail: whether what is not chosen is estimated; else `tail_lse` is -inf.
        score: how a node is scored.
        group: how the query heads of a KV head agree: by the `sum` or the `max` of the softmax over candidates of each,
            or by `interleave`, each head's best first in turn (IceCache's).
    """

    opened: int
    selected: int
    tail: bool = True
    score: Score = "second-order"
    group: PageGroup = "sum"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WalkResult:
    """What a walk found.

    Attributes:
        page_ids: the chosen pages, best first.
        counts: tokens of each.
        tail_out: attention output of everything else, by its digests; of whole keys where digests have no values.
        tail_lse: estimated log-sum-exp of everything else; -inf if there is nothing.
        tail_uneven: summed squares of how far the weights of its tokens are from the mean of their node, expected of
            scores that are normal; the weight of all of it is 1.
        path: the nodes opened at every level, highest first, and the pages chosen, as indices of what had come to light.
    """

    page_ids: jax.Array  # i32[B, K, M]
    counts: jax.Array  # i32[B, K, M]
    tail_out: jax.Array  # f32[B, K, G, Hv]
    tail_lse: jax.Array  # f32[B, K, G]
    tail_uneven: jax.Array  # f32[B, K, G]
    path: tuple[jax.Array, ...]  # i32[B, K, n]


class _Query(NamedTuple):
    """Queries, and what pages are along them.

    Attributes:
        q: those whose attention is estimated.
        guess: those that choose in their place; None: they choose themselves.
    """

    q: jax.Array  # f32[B, K, G, H]
    guess: jax.Array | None
    along_q: Along
    along_guess: Along | None
    scoring: Scoring


class _Found(NamedTuple):
    """What one level of a walk found among its candidates.

    Attributes:
        indices: the nodes or pages chosen, as indices of the candidates, best first, i32[B, K, M].
        counts: tokens of each.
        nodes: which nodes or pages of the tree they are.
        taken: which candidates they are, bool[B, K, P].
    """

    indices: jax.Array
    counts: jax.Array
    nodes: jax.Array
    taken: jax.Array


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
    """Returns the pages of highest score, and what the rest contributes.

    From the highest level down, the best nodes of a level are opened and the others go to the tail; of the pages that come to
    light the best are chosen. A KV head has one set of nodes and pages.

    Args:
        scatter: how keys lie about the means of their pages.
        guess: queries to choose by in the place of `q`; the tail is always of `q`.
        path: that of another walk, over a tree of the same tokens, to be followed without any choice.
        from_keys: values from keys; None: a node's value is the mean of its tokens'.
    """
    along_q = along(q, scatter, scoring=scoring)
    query = _Query(q, guess, along_q, None if guess is None else along(guess, scatter, scoring=scoring), scoring)
    candidates, visited = levels[-1], []
    ids = jax.lax.broadcasted_iota(jnp.int32, candidates.count.shape, 2)
    rest: list[tuple[Scores, Digests]] = []
    for below in (*levels[-2::-1], None):
        scores = score(q, candidates, along_q, rules.score, scoring=scoring)
        if path is None:
            wanted = rules.selected if below is None else rules.opened
            found = _choose(query, candidates, scores, ids, rules, wanted)
        else:
            found = _follow(path[len(visited)], candidates, ids)
        visited.append(found.indices)
        rest.append((scores._replace(weight=jnp.where(found.taken[:, :, None], -jnp.inf, scores.weight)), candidates))
        if below is not None:
            candidates, ids = _open(below, found)
    page_ids = jnp.where(found.counts > 0, found.nodes, 0)  # an empty one may lie past the last page
    if not rules.tail:
        empty = jnp.full(q.shape[:3], -jnp.inf)
        size = (candidates.value or candidates.mean).data.shape[-1]
        return WalkResult(page_ids, found.counts, jnp.zeros((*q.shape[:3], size)), empty, jnp.zeros_like(empty), tuple(visited))
    out, lse = tail_of(rest, along_q, from_keys)
    return WalkResult(page_ids, found.counts, out, lse, uneven_of(rest, lse), tuple(visited))


def _choose(
    query: _Query, candidates: Digests, scores: Scores, ids: Int[Array, "B K P"], rules: WalkRules, wanted: int
) -> _Found:
    """Returns the `wanted` best candidates, if there are so many."""
    estimates = scores.choice
    if query.guess is not None:
        estimates = score(query.guess, candidates, query.along_guess, rules.score, scoring=query.scoring).choice
    wanted = min(wanted, estimates.shape[-1])
    worth = jnp.where(candidates.count > 0, _worth(estimates, rules.group, wanted), -jnp.inf)
    indices, taken, (counts, nodes) = best(worth, wanted, candidates.count, ids)
    return _Found(indices, counts, nodes, taken)


def _follow(indices: Int[Array, "B K M"], candidates: Digests, ids: Int[Array, "B K P"]) -> _Found:
    """Returns the candidates that another walk chose."""
    counts, nodes = (jnp.take_along_axis(x, indices, axis=-1) for x in (candidates.count, ids))
    return _Found(indices, counts, nodes, mask_of(indices, candidates.count.shape[-1]))


def _open(below: Digests, found: _Found) -> tuple[Digests, Int[Array, "B K P"]]:
    """Returns the nodes or pages that stand below those found, and which of the level they are."""
    filled = found.counts > 0
    nodes = jnp.where(filled, found.nodes, 0)  # an empty node may lie past the last family
    opened = jax.tree.map(lambda x: _rows(x, nodes), families(below))
    opened = dataclasses.replace(opened, count=jnp.where(filled[..., None], opened.count, 0))
    ids = nodes[..., None] * FAN_OUT + jnp.arange(FAN_OUT, dtype=jnp.int32)[None, None, None, :]
    return jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1, *x.shape[4:]), opened), ids.reshape(*nodes.shape[:2], -1)


def tail_of(
    rest: list[tuple[Scores, Digests]], lies: Along, from_keys: FromKeys | None = None
) -> tuple[Float[Array, "B K G _"], Float[Array, "B K G"]]:
    """Returns output and log-sum-exp of nodes by what they weigh and their mean values.

    Softmax prefers keys that lie along the query, to which their mean moves, to first order, and with values `from_keys` the
    mean value by what that brings.
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
    """Returns `Selection.tail_uneven` of nodes whose log-sum-exp is known.

    Of n tokens with normal scores of variance d^2 the weights, which add up to 1, vary by (exp(d^2) - 1) / n in all.
    """
    base = jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None]
    uneven = jnp.zeros_like(lse)
    for scores, digests in rest:
        count = jnp.maximum(digests.count[:, :, None].astype(jnp.float32), 1.0)
        alone = jnp.minimum(jnp.expm1(scores.wide) / count, 1.0)
        uneven += (jnp.exp(2 * (scores.weight - base)) * alone).sum(-1)
    return uneven


def _worth(scores: Float[Array, "B K G P"], group: PageGroup, wanted: int) -> Float[Array, "B K P"]:
    """Returns what nodes are worth to a KV head, of which `wanted` are to be chosen; safe where all are empty."""
    if group == "interleave":
        batch, heads, size, nodes = scores.shape
        first = best(scores, wanted)[0].reshape(batch * heads, -1)
        turns = (jnp.arange(wanted)[None, :] * size + jnp.arange(size)[:, None]).reshape(1, -1)
        worth = jnp.full((batch * heads, nodes), -jnp.inf, jnp.float32).at[jnp.arange(batch * heads)[:, None], first]
        return worth.max(-turns.astype(jnp.float32)).reshape(batch, heads, nodes)
    # Rows and heads in one axis, and an axis less for XLA:CPU to reduce over, in a tenth of the time.
    shares = jax.nn.softmax(jnp.maximum(scores, -1e30).reshape(-1, *scores.shape[2:]), axis=-1)
    return (shares.sum(1) if group == "sum" else shares.max(1)).reshape(*scores.shape[:2], -1)


def _rows(x: jax.Array, nodes: jax.Array) -> jax.Array:
    """Returns the families [B, K, M, 8, ...] of `nodes` [B, K, M]."""
    return jnp.take_along_axis(x, nodes.reshape(*nodes.shape, *(1,) * (x.ndim - 3)), axis=2, mode="promise_in_bounds")
