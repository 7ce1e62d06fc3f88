"""The digest tree: which pages a query needs, found in a cost that grows with the logarithm of their number."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from icejax.ops.attention.dense import Scoring
from icejax.ops.pages.digests import Digests, Score, Scores, merge, put, score, weighted
from icejax.ops.pages.key_scatter import Along, along
from icejax.ops.pages.value_fit import FromKeys
from icejax.ops.topk import best, chosen

FAN_OUT = 8  # pages of a node, nodes of a node above
Group = Literal["sum", "max", "interleave"]
EVEN = 64  # the highest level has whole 64s of nodes: XLA:GPU then fuses what it joins of them into the products
TOP = 2304  # nodes of the highest level, all of which are scored: 32,768 tokens and 4,096 new ones


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Selection:
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


def num_levels(pages: int) -> int:
    """Returns how many levels of nodes stand above `pages` pages."""
    levels = 0
    while pages > TOP:
        pages, levels = -(-pages // FAN_OUT), levels + 1
    return levels


def num_opened(pages: int, *, least: int) -> int:
    """Returns how many nodes are opened per level, so that twice `pages` come to light and a budget for all pages finds all."""
    return max(least, 2 * -(-pages // FAN_OUT))


def build(pages: Digests) -> tuple[Digests, ...]:
    """Returns the digests of pages and of every level above them, highest last."""
    levels = [pages]
    for _ in range(num_levels(pages.count.shape[-1])):
        levels[-1] = _padded(levels[-1], FAN_OUT)  # here once, so that no step pads
        levels.append(merge(_families(levels[-1])))
    many = levels[-1].count.shape[-1] > 8 * EVEN  # few cost little, and would become far more
    return (*levels[:-1], _padded(levels[-1], EVEN)) if many else tuple(levels)


def lineage(levels: tuple[Digests, ...], pages: Digests, first: Int[Array, ""]) -> tuple[Digests, ...]:
    """Returns the digests [B, K, n] of pages that are to stand from index `first` on, and those of all nodes above them.

    Args:
        levels: of the tree, or for a single page those `around` it.
    """
    changed = [pages]
    for level in levels[:-1]:
        above, count = _above(level, changed[-1], first)
        siblings = jax.tree.map(
            lambda x, at=above, n=count: jax.lax.dynamic_slice_in_dim(x, at * FAN_OUT, n * FAN_OUT, axis=2), level
        )
        changed.append(merge(_families(put(siblings, changed[-1], first - above * FAN_OUT))))
        first = above
    return tuple(changed)


def replace(levels: tuple[Digests, ...], changed: tuple[Digests, ...], first: Int[Array, ""]) -> tuple[Digests, ...]:
    """Returns the tree with the `lineage` of the pages from index `first` on; reads nothing, so that XLA copies nothing."""
    replaced = []
    for level, new in zip(levels, changed, strict=True):
        replaced.append(put(level, new, first))
        first = _above(level, new, first)[0]
    return tuple(replaced)


def around(levels: tuple[Digests, ...], page: Int[Array, ""]) -> tuple[Digests, ...]:
    """Returns of every level but the highest the family that holds `page`, or its node: all that its `lineage` reads."""
    families = []
    for level in levels[:-1]:
        start = page // FAN_OUT * FAN_OUT
        families.append(jax.tree.map(lambda x, at=start: jax.lax.dynamic_slice_in_dim(x, at, FAN_OUT, axis=2), level))
        page = page // FAN_OUT
    return (*families, levels[-1])


def _above(level: Digests, changed: Digests, first: Int[Array, ""]) -> tuple[Int[Array, ""], int]:
    """Returns the first and the number of the nodes that hold what is `changed` from index `first` of a level on."""
    nodes = level.count.shape[2] // FAN_OUT
    count = min((changed.count.shape[2] + 2 * FAN_OUT - 2) // FAN_OUT, nodes)  # wherever it begins in a node
    node = first // FAN_OUT
    return node if count == 1 else jnp.minimum(node, nodes - count), count  # a single one is there, also of what is `around`


def walk(
    q: Float[Array, "B K G H"],
    levels: tuple[Digests, ...],
    scatter: Float[Array, "B K H H"],
    *,
    scoring: Scoring,
    opened: int,
    selected: int,
    tail: bool,
    rule: Score = "second-order",
    group: Group = "sum",
    guess: Float[Array, "B K G H"] | None = None,
    path: tuple[jax.Array, ...] | None = None,
    from_keys: FromKeys | None = None,
) -> Selection:
    """Returns the pages of highest score, and what the rest contributes.

    From the highest level down, the `opened` best nodes of a level are opened and the others go to the tail; of the
    pages that come to light the `selected` best are chosen. A KV head has one set of nodes and pages.

    Args:
        scatter: how keys lie about the means of their pages.
        opened: nodes opened per level.
        selected: pages chosen, if there are so many.
        tail: whether what is not chosen is estimated; else `tail_lse` is -inf.
        rule: how a node is scored.
        group: how the query heads of a KV head agree: by the `sum` or the `max` of the softmax over candidates of each,
            or by `interleave`, each head's best first in turn (IceCache's).
        guess: queries to choose by in the place of `q`; the tail is always of `q`.
        path: that of another walk, over a tree of the same tokens, to be followed without any choice.
        from_keys: values from keys; None: a node's value is the mean of its tokens'.
    """
    candidates, visited = levels[-1], []
    ids = jax.lax.broadcasted_iota(jnp.int32, candidates.count.shape, 2)
    rest: list[tuple[Scores, Digests]] = []
    lies = along(q, scatter, scoring=scoring)
    asked = None if guess is None else along(guess, scatter, scoring=scoring)
    for below in (*levels[-2::-1], None):
        scores = score(q, candidates, lies, rule, scoring=scoring)
        if path is None:
            estimates = scores.choice if guess is None else score(guess, candidates, asked, rule, scoring=scoring).choice
            wanted = min(selected if below is None else opened, estimates.shape[-1])
            worth = jnp.where(candidates.count > 0, _worth(estimates, group, wanted), -jnp.inf)
            indices, taken, (counts, nodes) = best(worth, wanted, candidates.count, ids)
        else:
            indices = path[len(visited)]
            taken = chosen(indices, scores.weight.shape[-1])
            counts, nodes = (jnp.take_along_axis(x, indices, axis=-1) for x in (candidates.count, ids))
        visited.append(indices)
        rest.append((scores._replace(weight=jnp.where(taken[:, :, None], -jnp.inf, scores.weight)), candidates))
        if below is None:
            break
        filled = counts > 0
        nodes = jnp.where(filled, nodes, 0)  # an empty node may lie past the last family
        opened_nodes = jax.tree.map(lambda x, n=nodes: _rows(x, n), _families(below))
        opened_nodes = dataclasses.replace(opened_nodes, count=jnp.where(filled[..., None], opened_nodes.count, 0))
        candidates = jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1, *x.shape[4:]), opened_nodes)
        ids = (nodes[..., None] * FAN_OUT + jnp.arange(FAN_OUT, dtype=jnp.int32)[None, None, None, :]).reshape(
            *nodes.shape[:2], -1
        )
    page_ids = jnp.where(counts > 0, nodes, 0)  # an empty one may lie past the last page
    if not tail:
        empty = jnp.full(q.shape[:3], -jnp.inf)
        size = (candidates.value or candidates.mean).data.shape[-1]
        return Selection(page_ids, counts, jnp.zeros((*q.shape[:3], size)), empty, jnp.zeros_like(empty), tuple(visited))
    out, lse = tail_of(rest, lies, from_keys)
    return Selection(page_ids, counts, out, lse, uneven_of(rest, lse), tuple(visited))


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


def _worth(scores: Float[Array, "B K G P"], group: Group, wanted: int) -> Float[Array, "B K P"]:
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


def _padded(digests: Digests, whole: int) -> Digests:
    """Returns the level filled up with empty nodes to a multiple of `whole`."""
    missing = -digests.count.shape[-1] % whole
    return jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 3)), digests)


def _families(digests: Digests) -> Digests:
    """Returns [B, K, P, ...] as [B, K, P / 8, 8, ...]."""
    return jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1, FAN_OUT, *x.shape[3:]), digests)


def _rows(x: jax.Array, nodes: jax.Array) -> jax.Array:
    """Returns the families [B, K, M, 8, ...] of `nodes` [B, K, M]."""
    return jnp.take_along_axis(x, nodes.reshape(*nodes.shape, *(1,) * (x.ndim - 3)), axis=2, mode="promise_in_bounds")
