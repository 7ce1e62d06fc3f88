"""How a clustered cache grows: new tokens behind it, window pages that go to the pool, newest pages sorted by meaning."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from icejax.cache.host import PoolLayer
from icejax.cache.policy import Lengths
from icejax.cache.state import NO_PAGE, ClusteredState, per_head, take
from icejax.ops import tree
from icejax.ops.attention import attend_all, causal_with_lse, merge_by_lse
from icejax.ops.digests import Digests, digest

if TYPE_CHECKING:
    from icejax.cache.clustered import Clustered

STREAMED = 128  # pages that new tokens attend to at once


def extend(policy: Clustered, state: ClusteredState, q, k, v, lengths: Lengths, new: jax.Array, pool: PoolLayer, guide):
    """Appends new tokens; see `CachePolicy.extend`."""
    batch, tokens, heads, size = k.shape
    new_k, new_v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    with jax.named_scope("attend"):
        found = causal_with_lse(q, k, v, lengths=new, window=None)
        resident = zip(
            (state.sinks_k, state.window_k),
            (state.sinks_v, state.window_v),
            policy.resident_masks(state, lengths, seen=lengths.seen),
            strict=True,
        )
        for keys, values, mask in resident:
            found = merge_by_lse(*found, *attend_all(q, keys, values, per_head(mask, new_k[:, :, 0])))
        counts = state.levels[0].count
        block = min(STREAMED, counts.shape[2])

        def page_block(i: jax.Array, found):
            ids = i * block + jnp.arange(block, dtype=jnp.int32)
            streamed = pool.fetch(jnp.broadcast_to(jnp.minimum(ids, counts.shape[2] - 1)[None, None], (batch, heads, block)))
            held = jnp.where((ids < counts.shape[2])[None, None], jnp.take(counts, ids, axis=2, mode="clip"), 0)
            mask = (jnp.arange(policy.page_size)[None, None, None] < held[..., None]).reshape(batch, heads, -1)
            keys, values = (x.reshape(batch, heads, -1, size) for x in streamed)
            return merge_by_lse(*found, *attend_all(q, keys, jnp.where(mask[..., None], values, 0), mask))

        out, _ = jax.lax.fori_loop(0, (lengths.pages + block - 1) // block, page_block, found)
    with jax.named_scope("pack"):
        # The window and the new tokens behind one another, by position: the newest stay, the others go to pages.
        start, sinks = policy.window_start(lengths), state.num_sinks[:, None]
        after = Lengths(lengths.seen + new, jnp.zeros_like(lengths.decoded), lengths.pages)

        def at(positions: jax.Array, valid: jax.Array):
            old, seen = positions < lengths.seen[:, None], lengths.seen[:, None]
            return (
                take(window, positions - start, valid & old) + take(x, positions - seen, valid & ~old)
                for window, x in ((state.window_k, new_k), (state.window_v, new_v))
            )

        recent, first = policy.window_positions(after), jnp.maximum(start, sinks)
        window_k, window_v = at(recent, (recent >= sinks) & (recent < after.prompt[:, None]))
        leaving = first + jnp.arange(tokens)[None, :]
        valid = leaving < policy.window_start(after)
        keys, values, digests, guide = policy.paged(*at(leaving, valid), valid, guide)
        levels = tree.update(state.levels, digests, lengths.pages)
    state = dataclasses.replace(state, window_k=window_k, window_v=window_v, levels=levels)
    used = (valid.sum(1).max() + policy.page_size - 1) // policy.page_size
    return out, state, (jnp.stack([keys, values], axis=3).transpose(2, 0, 1, 3, 4, 5), used), guide


def flush(policy: Clustered, state: ClusteredState, lengths: Lengths):
    """Reads the oldest window page and makes its digests; see `CachePolicy.flush`."""
    # Called with the window full: its first page holds the positions just before those that will start the next.
    p = policy.page_size
    position = policy.window_positions(lengths)[:, :p] - p
    count = jnp.minimum(p, p + position[:, :1] - state.num_sinks[:, None])  # the rest are sinks or before the start
    slots = jnp.arange(p)[None, :]
    # Tokens first, empty slots last: the page of a prompt shorter than sinks and window begins with empty ones.
    page_k, page_v = (take(x, slots + p - count, slots < count) for x in (state.window_k, state.window_v))
    mask = jnp.broadcast_to((slots < count)[:, None, None, :], (*page_k.shape[:2], 1, p))
    own = digest(page_k[:, :, None], page_v[:, :, None], mask, policy.digest_dtype)
    return jnp.stack([page_k, page_v], axis=2), tree.lineage(state.levels, own, lengths.pages)


def flushed(policy: Clustered, state: ClusteredState, news: tuple[Digests, ...], lengths: Lengths) -> ClusteredState:
    """Puts the digests of the page in the place of its tokens; see `CachePolicy.flushed`."""
    p = policy.page_size
    window_k, window_v = (jnp.roll(x, -p, axis=2).at[:, :, -p:].set(0) for x in (state.window_k, state.window_v))
    levels = tree.replace(state.levels, news, lengths.pages)
    return dataclasses.replace(state, window_k=window_k, window_v=window_v, levels=levels)


def compact(policy: Clustered, state: ClusteredState, pages: jax.Array, lengths: Lengths, guide):
    """Sorts the newest pages anew; see `CachePolicy.compact`."""
    count, batch, heads, _, p, size = pages.shape
    first, tokens = lengths.pages - count, count * p
    counts = jax.lax.dynamic_slice_in_dim(state.levels[0].count, first, count, axis=2)
    there = (jnp.arange(p)[None, None, :] < counts[:, 0, :, None]).reshape(batch, tokens)
    # Tokens first, for a page that was flushed in part.
    forward = jnp.argsort(~there, axis=1, stable=True)
    valid = jnp.arange(tokens)[None, :] < there.sum(1, keepdims=True)
    k, v = (pages[:, :, :, i].transpose(1, 2, 0, 3, 4).reshape(batch, heads, tokens, size) for i in (0, 1))
    k, v = (take(x, forward, valid) for x in (k, v))
    k, v, digests, guide = policy.paged(k, v, valid, guide)
    levels = tree.update(state.levels, digests, first)
    # What stays on the device of these pages is no longer what they are.
    state = dataclasses.replace(state, levels=levels, page_ids=jnp.full_like(state.page_ids, NO_PAGE))
    return state, jnp.stack([k, v], axis=3).transpose(2, 0, 1, 3, 4, 5), guide
