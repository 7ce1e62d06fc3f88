"""The digest tree: digests of pages, of nodes of 8 pages, of nodes of 8 nodes and so on, up to a level of at most 2,304 nodes.

The digest-tree index builds and updates it, as one `Digests` of arrays [B, K, nodes, ...] per level. A walk from the top down
(`tree_walk`) selects pages at a cost that grows with the logarithm of their number. Digests merge exactly, so that new pages
change only the nodes above them: 4 pages from index 30 on change the nodes 3 and 4 of the level above, which hold the pages 24
to 39.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from icejax.ops.pages.digests import Digests, merge, put
from icejax.ops.topk import best

FAN_OUT = 8  # children of a node: pages, or nodes of the level below
TOP_MULTIPLE = 64  # of the highest level's nodes: XLA:GPU then fuses its concatenations of them into the products
SHARE = 4  # the nodes in use of a level are gathered from at most a quarter of its blocks: the copy then costs little
TOP = 2304  # most nodes of the highest level, all of which are scored; 32,768 + 4,096 tokens have as many pages


def num_levels(pages: int) -> int:
    """Returns the levels of nodes above `pages` pages: 0 up to 2,304 pages, 1 up to 18,432."""
    levels = 0
    while pages > TOP:
        pages, levels = -(-pages // FAN_OUT), levels + 1
    return levels


def num_opened(pages: int, *, least: int) -> int:
    """Returns the nodes to open per level to select `pages` pages: as many as hold twice the pages, and at least `least`."""
    return max(least, 2 * -(-pages // FAN_OUT))


def build(pages: Digests) -> tuple[Digests, ...]:
    """Returns the levels of the tree: the digests of pages, then of each level of nodes above them, highest last."""
    levels = [pages]
    for _ in range(num_levels(pages.count.shape[-1])):
        levels[-1] = _padded(levels[-1], FAN_OUT)  # padded here once, so that no step pads
        levels.append(merge(families(levels[-1])))
    many = levels[-1].count.shape[-1] > 8 * TOP_MULTIPLE  # a short level is cheap, and padding would lengthen it much
    return (*levels[:-1], _padded(levels[-1], TOP_MULTIPLE)) if many else tuple(levels)


def lineage(levels: tuple[Digests, ...], pages: Digests, first: Int[Array, ""]) -> tuple[Digests, ...]:
    """Returns the digests [B, K, n] that change if `pages` are written from index `first` on: `pages`, and all nodes above.

    Args:
        levels: the levels of the tree, or for a single page its `families_around`.
    """
    changed = [pages]
    for level in levels[:-1]:
        node, count = _nodes_above(level, changed[-1], first)
        siblings = jax.tree.map(
            lambda x, at=node, n=count: jax.lax.dynamic_slice_in_dim(x, at * FAN_OUT, n * FAN_OUT, axis=2), level
        )
        changed.append(merge(families(put(siblings, changed[-1], first - node * FAN_OUT))))
        first = node
    return tuple(changed)


def replace(levels: tuple[Digests, ...], changed: tuple[Digests, ...], first: Int[Array, ""]) -> tuple[Digests, ...]:
    """Returns the tree with the `lineage` of the pages from index `first` on; only writes to it, so that XLA copies nothing."""
    replaced = []
    for level, new in zip(levels, changed, strict=True):
        replaced.append(put(level, new, first))
        first = _nodes_above(level, new, first)[0]
    return tuple(replaced)


def families_around(levels: tuple[Digests, ...], page: Int[Array, ""]) -> tuple[Digests, ...]:
    """Returns the family of `page`, then of the node above it, and so on, with the highest level: all that its `lineage` reads.

    Of page 30 these are the pages 24 to 31, then, if node 3 is not in the highest level, the nodes 0 to 7.
    """
    families = []
    for level in levels[:-1]:
        start = page // FAN_OUT * FAN_OUT
        families.append(jax.tree.map(lambda x, at=start: jax.lax.dynamic_slice_in_dim(x, at, FAN_OUT, axis=2), level))
        page = page // FAN_OUT
    return (*families, levels[-1])


def _nodes_above(level: Digests, changed: Digests, first: Int[Array, ""]) -> tuple[Int[Array, ""], int]:
    """Returns the first node above the entries `changed` of a level from index `first` on, and how many nodes to merge."""
    nodes = level.count.shape[2] // FAN_OUT
    count = min((changed.count.shape[2] + 2 * FAN_OUT - 2) // FAN_OUT, nodes)  # enough for any position of `first` in its node
    node = first // FAN_OUT
    return node if count == 1 else jnp.minimum(node, nodes - count), count  # a single node exists, also in `families_around`


def _padded(digests: Digests, whole: int) -> Digests:
    """Returns the level padded with empty nodes to a multiple of `whole`."""
    missing = -digests.count.shape[-1] % whole
    return jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 3)), digests)


def families(digests: Digests) -> Digests:
    """Returns a level [B, K, P, ...] grouped by the node above: [B, K, P / 8, 8, ...]."""
    return jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1, FAN_OUT, *x.shape[3:]), digests)


def few_blocks(nodes: int, *, least: int) -> int:
    """Returns the largest number of blocks of 64 nodes to gather from a level; 0: none is gathered.

    None is gathered from a level that is no multiple of 64, nor where a quarter of the level has fewer than `least` nodes.

    Example: of 832 nodes in 13 blocks up to 4 blocks are gathered, unless `least` is more than 256.
    """
    few = -(-nodes // (SHARE * TOP_MULTIPLE))
    return few if nodes % TOP_MULTIPLE == 0 and least <= few * TOP_MULTIPLE < nodes else 0


def blocks_in_use(count: Int[Array, "B K P"]) -> Bool[Array, " n"]:
    """Returns which blocks of 64 nodes have a token in any row and head."""
    return (count > 0).any((0, 1)).reshape(-1, TOP_MULTIPLE).any(1)


def gather(level: Digests, in_use: Bool[Array, " n"], *, few: int) -> tuple[Digests, Int[Array, "B K M"]]:
    """Returns the digests of the first `few` blocks in use, filled up with empty ones, and the nodes' indices in the level."""
    blocks = best(in_use.astype(jnp.float32), few)[0]

    def of_blocks(x: jax.Array) -> jax.Array:
        in_blocks = x.reshape(*x.shape[:2], -1, TOP_MULTIPLE, *x.shape[3:])
        return jnp.take(in_blocks, blocks, axis=2, mode="clip").reshape(*x.shape[:2], -1, *x.shape[3:])

    ids = (blocks[:, None] * TOP_MULTIPLE + jnp.arange(TOP_MULTIPLE, dtype=jnp.int32)[None]).reshape(1, 1, -1)
    return jax.tree.map(of_blocks, level), jnp.broadcast_to(ids, (*level.count.shape[:2], few * TOP_MULTIPLE))
