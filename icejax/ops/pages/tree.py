"""The digest tree: digests of pages, of nodes of 8 neighbouring pages, of nodes of 8 nodes, up to some 2,304 of them.

A walk from the top down (`tree_walk`) finds pages in a cost that grows with the logarithm of their number. Digests merge
exactly, so that new pages change only the nodes above them: 4 pages from index 30 on change the nodes 3 and 4 of the level
above, which hold the pages 24 to 39.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from icejax.ops.pages.digests import Digests, merge, put

FAN_OUT = 8  # pages of a node, nodes of a node above
TOP_MULTIPLE = 64  # the highest level has whole 64s of nodes: XLA:GPU then fuses what it joins of them into the products
TOP = 2304  # nodes of the highest level, all of which are scored: 32,768 tokens and 4,096 new ones


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
        levels.append(merge(families(levels[-1])))
    many = levels[-1].count.shape[-1] > 8 * TOP_MULTIPLE  # few cost little, and would become far more
    return (*levels[:-1], _padded(levels[-1], TOP_MULTIPLE)) if many else tuple(levels)


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
        changed.append(merge(families(put(siblings, changed[-1], first - above * FAN_OUT))))
        first = above
    return tuple(changed)


def replace(levels: tuple[Digests, ...], changed: tuple[Digests, ...], first: Int[Array, ""]) -> tuple[Digests, ...]:
    """Returns the tree with the `lineage` of the pages from index `first` on; reads nothing, so that XLA copies nothing."""
    replaced = []
    for level, new in zip(levels, changed, strict=True):
        replaced.append(put(level, new, first))
        first = _above(level, new, first)[0]
    return tuple(replaced)


def families_around(levels: tuple[Digests, ...], page: Int[Array, ""]) -> tuple[Digests, ...]:
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


def _padded(digests: Digests, whole: int) -> Digests:
    """Returns the level filled up with empty nodes to a multiple of `whole`."""
    missing = -digests.count.shape[-1] % whole
    return jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 3)), digests)


def families(digests: Digests) -> Digests:
    """Returns [B, K, P, ...] as [B, K, P / 8, 8, ...]."""
    return jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1, FAN_OUT, *x.shape[3:]), digests)
