"""How a layer's pages are formed, scored and fetched, by name: for `pages`, `calibrate` and `sharing`.

Shapes: pages are keys and values f32[1, K, P, p, H] and a mask of slots bool[1, K, P, p].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

import icejax
from bench.attention.capture import Captured
from icejax.ops.pages import tree_walk
from icejax.ops.pages.digests import NARROW
from icejax.ops.pages.packing import pack

STRETCH = 8192  # tokens; longer texts are padded to a multiple
FORMATIONS = {
    "positional": None,
    "tree": dict(block=32),
    "greedy": dict(block=8192),
    "tree-1024-greedy": dict(block=1024),
    "tree-2048-greedy": dict(block=2048),  # the default
    "stretches-tree-2048-greedy": dict(block=2048, stretch=STRETCH),  # each stretch is packed separately
}


def residents(budget: int) -> tuple[int, int]:
    """Returns the numbers of sinks and of window slots of `Clustered` at a budget."""
    policy = icejax.Clustered(budget=budget)
    return policy.window_layout.sinks, policy.window_layout.slots


def form(
    layer: Captured, name: str, page_size: int, sinks: int, window: int, leader: Captured | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns pages of the tokens between sinks and window: keys, values [1, K, P, p, H] and the mask of slots [1, K, P, p].

    The tokens are packed by the layer's own keys, or by the keys of a `leader`. They are padded to a multiple of 1,024, or of
    `STRETCH` beyond it: 8,192 tokens without 32 sinks and a window of 32 are 8,128, padded to 8,192 and packed into 512 pages
    of 16.
    """
    heads, tokens, size = layer.k.shape
    middle = tokens - sinks - window
    padded = -(-middle // 1024) * 1024
    padded = padded if padded <= STRETCH else -(-padded // STRETCH) * STRETCH
    k, v, packed_by = (
        jnp.pad(x[None, :, sinks : tokens - window], [(0, 0), (0, 0), (0, padded - middle), (0, 0)])
        for x in (layer.k, layer.v, (leader or layer).k)
    )
    valid = jnp.broadcast_to(jnp.arange(padded)[None, :] < middle, (1, padded))
    if FORMATIONS[name] is None:
        order = jnp.broadcast_to(jnp.arange(padded)[None, None, :], (1, heads, padded))
    else:
        order = _order(packed_by, valid, page_size=page_size, **FORMATIONS[name])
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
    """How pages are chosen, and how tokens that are not attended exactly count.

    Attributes:
        score: `second-order`, or the name of a peer's score.
        tail: whether tokens that are not attended exactly count by their digests, or are dropped.
        walk: whether pages are chosen by the digest tree, as in `Clustered`, or by a flat scan.
        candidates: pages fetched per page of tokens attended exactly; None: the rule of `Clustered`, which fetches one or two
            pages more.
        fetched: number of pages fetched, instead of `candidates`; None: by `candidates`.
        opened: nodes of the tree opened per level; None: as in `Clustered`.
        value_fit: whether the tail's values are estimated from keys.
        keys_first: whether the keys of twice as many pages are fetched, and then only the values of the best tokens.
        codes: bits per channel of the codes that rank the tokens of four times as many pages before the fetch, as in `Coded`.
        singly: with `codes`, whether single tokens are fetched then, or whole pages.
        group: how the query heads of a KV head choose pages together (`icejax.ops.pages.tree_walk.PageGroup`).
        digest_dtype, page_dtype: narrower dtypes of digests and pages; None: fp32.
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
CODED = (RERANKED, *(replace(WHOLE, codes=bits, singly=singly) for singly in (True, False) for bits in (1, 2, 4)))
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
# scores of Quest (min-max), ArkVale (cuboid) and the oracle (exact-lse)
PEERS = tuple(Method(score=name, tail=False, walk=False) for name in ("mean", "min-max", "cuboid", "exact-lse"))
SETS = dict(all=METHODS + PEERS, default=DEFAULT, ours=METHODS, fewer=FEWER, coded=CODED)
