"""Dense attention in blocks of keys, and of one or many queries over a masked set of keys.

`causal.py` calls it for prompts; policies and their bases call the masked forms and merge parts by log-sum-exp.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

BLOCK = 512  # queries and keys per block; measured fastest of 128-1024 on two CPU cores
# fp32 products keep fp32 precision on every backend, as in PyTorch; narrower dtypes are not affected.
EINSUM = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class Scoring:
    """How products of queries and keys become scores for softmax, in fp32: a scale and a soft cap.

    Attributes:
        scale: factor of the products.
        softcap: bound c of the scaled products x, as c tanh(x / c) (Gemma 2, arXiv 2408.00118); None: no bound.
    """

    scale: float
    softcap: float | None = None

    def __call__(self, products: Float[Array, "*R"]) -> Float[Array, "*R"]:
        """Returns the scores of unscaled products."""
        return self.capped(products * self.scale)

    def capped(self, scaled: Float[Array, "*R"]) -> Float[Array, "*R"]:
        """Returns the scores of scaled products."""
        return scaled if self.softcap is None else self.softcap * jnp.tanh(scaled / self.softcap)

    def slope(self, scores: Float[Array, "*R"]) -> Float[Array, "*R"] | float:
        """Returns the derivative of the score with respect to its scaled product, 1 - (score / softcap)^2."""
        return 1.0 if self.softcap is None else 1.0 - jnp.square(scores / self.softcap)


class Attended(NamedTuple):
    """The attention output of queries.

    Attributes:
        out: weighted mean of the values, dtype[B, T, N, Hv].
        lse: natural log-sum-exp of the scores, f32[B, T, N].
    """

    out: jax.Array
    lse: jax.Array


def causal_with_lse(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    *,
    lengths: Int[Array, " B"],
    window: int | None,
    scoring: Scoring,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Returns causal attention of a right-padded prompt, as `causal.causal` does, in fp32 and in blocks on every platform."""
    block = math.gcd(BLOCK, q.shape[1])
    valid = (jnp.arange(q.shape[1])[None, :] < lengths[:, None])[:, :, None, None]
    k, v = (jnp.where(valid, x, 0).transpose(0, 2, 1, 3) for x in (k, v))  # B K T H
    return attend_slots(q, k, v, seen=None, lengths=lengths, window=window, scoring=scoring, block=block)


def attend_slots(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S Hv"],
    *,
    seen: Int[Array, " B"] | None,
    lengths: Int[Array, " B"],
    window: int | None,
    scoring: Scoring,
    block: int = BLOCK,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Returns causal attention of new tokens to slots that hold them and all tokens before them, in fp32.

    Slot s holds position s. The cost grows with the slots in use, not with S: later slots are never read. Values in slots that
    a query does not see must be finite.

    Example: after 100 tokens the first new query, at position 100, sees slots 0 to 100.

    Args:
        seen: tokens of each row before the new ones; None: no row has any.
        lengths: new tokens of each row; outputs past them are undefined.
        window: newest keys up to itself that a query sees; None: all.
        block: keys per block.
    """

    def read(start: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        return tuple(lax.dynamic_slice_in_dim(x, start, count, axis=2) for x in (k, v))

    sizes = dict(kv_heads=k.shape[1], slots=k.shape[2], value_dim=v.shape[3])
    return attend_blocks(q, read, seen=seen, lengths=lengths, window=window, scoring=scoring, block=block, **sizes)


def attend_blocks(
    q: Float[Array, "B T N H"],
    read: Callable[[jax.Array, int], tuple[jax.Array, jax.Array]],
    *,
    kv_heads: int,
    slots: int,
    value_dim: int,
    seen: Int[Array, " B"] | None,
    lengths: Int[Array, " B"],
    scoring: Scoring,
    window: int | None = None,
    below: Int[Array, " B"] | None = None,
    block: int = BLOCK,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Returns the same as `attend_slots` for slots that are read block by block, as those of a cache in codes are.

    Args:
        read: returns keys [B, K, count, H] and values [B, K, count, Hv] of the slots from `start` on, given (start, count).
        below: slots of each row that every query sees, all before this one, and the log-sum-exp is -inf without any; None:
            the slots up to the query's position.
    """
    batch, tokens, heads, size = q.shape
    group, queries_per_block, block = heads // kv_heads, math.gcd(BLOCK, tokens), min(block, slots)
    before, fewest, most = (0, 0, 0) if seen is None else (seen[:, None, None, None], seen.min(), seen.max())
    # A row is a pair (query, head of the group), so one product serves all query heads of a KV head.
    rows = q.reshape(batch, tokens, kv_heads, group, size).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(batch, kv_heads, tokens * group, size)

    def query_block(i: jax.Array, outputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first_query, count = i * queries_per_block, queries_per_block * group
        queries = lax.dynamic_slice_in_dim(rows, first_query * group, count, axis=2)
        position = before + (first_query + jnp.arange(count) // group)[None, None, :, None]

        def key_block(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
            total, weight, highest = carry
            start = j * block if slots % block == 0 else jnp.minimum(j * block, slots - block)
            keys, values = read(start, block)
            key_position = (start + jnp.arange(block))[None, None, None, :]
            visible = key_position <= position if below is None else key_position < below[:, None, None, None]
            if slots % block:  # the last block begins earlier, with keys of the block before
                visible &= key_position >= j * block
            if window is not None:
                visible &= key_position > position - window
            scores = jnp.where(visible, scoring(EINSUM("bkrh,bksh->bkrs", queries, keys)), -jnp.inf)
            new_highest = jnp.maximum(highest, scores.max(-1))
            # A query may see no key of a block outside its window, and -inf minus -inf would be NaN.
            base = jnp.where(jnp.isneginf(new_highest), 0.0, new_highest)
            share = jnp.exp(scores - base[..., None])
            shrink = jnp.exp(highest - base)
            total = total * shrink[..., None] + EINSUM("bkrs,bksh->bkrh", share.astype(values.dtype), values)
            return total, weight * shrink + share.sum(-1), new_highest

        shape = (batch, kv_heads, count)
        empty = jnp.zeros((*shape, value_dim)), jnp.zeros(shape), jnp.full(shape, -jnp.inf)
        first = 0 if window is None else jnp.maximum(0, (fewest + first_query - window + 1) // block)
        last = jnp.minimum(most + first_query + queries_per_block, slots) if below is None else jnp.minimum(below.max(), slots)
        last = (last + block - 1) // block
        total, weight, highest = lax.fori_loop(first, last, key_block, empty)
        mean = total / (weight if below is None else jnp.maximum(weight, 1e-30))[..., None]
        return tuple(
            lax.dynamic_update_slice_in_dim(output, x.astype(output.dtype), first_query * group, axis=2)
            for output, x in zip(outputs, (mean, jnp.log(weight) + highest), strict=True)
        )

    blocks = (lengths.max() + queries_per_block - 1) // queries_per_block
    out, lse = lax.fori_loop(0, blocks, query_block, (jnp.zeros((*rows.shape[:3], value_dim)), jnp.zeros(rows.shape[:3])))
    out, lse = (x.reshape(batch, kv_heads, tokens, group, *x.shape[3:]).swapaxes(1, 2) for x in (out, lse))
    return out.reshape(batch, tokens, heads, -1), lse.reshape(batch, tokens, heads)


def attend_all(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S Hv"],
    mask: Bool[Array, "B K S"],
    near: Bool[Array, "B T S"] | None = None,
    *,
    scoring: Scoring,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Returns the attention of many queries over the keys in `mask`, in fp32, and its log-sum-exp: -inf if a query sees none.

    Queries run in blocks. Values outside `mask` must be finite.

    Args:
        mask: keys that hold a token.
        near: keys in `mask` that each query sees; None: all.
    """
    batch, tokens, heads, size = q.shape
    block, kv_heads = math.gcd(BLOCK, tokens), k.shape[1]

    def query_block(part: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array]:
        queries, visible = part  # [B, block, N, H], [B, block, S]
        # A row is a pair (query, head of the group), as in `attend_slots`: XLA:CPU would transpose scores in another order.
        rows = queries.reshape(batch, block, kv_heads, -1, size).transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, size)
        seen = mask[:, :, None, :]
        if visible is not None:
            seen &= jnp.repeat(visible, heads // kv_heads, axis=1)[:, None]
        scores = jnp.where(seen, scoring(EINSUM("bkrh,bksh->bkrs", rows, k)), -jnp.inf)
        highest = scores.max(-1, keepdims=True, initial=-jnp.inf)  # S may be 0
        base = jnp.where(jnp.isneginf(highest), 0.0, highest)
        weights = jnp.exp(scores - base)
        total = weights.sum(-1, keepdims=True)
        out = EINSUM("bkrs,bksh->bkrh", (weights / jnp.maximum(total, 1e-30)).astype(v.dtype), v)
        out, lse = (x.reshape(batch, kv_heads, block, -1, x.shape[-1]).swapaxes(1, 2) for x in (out, jnp.log(total) + base))
        return out.reshape(batch, block, heads, -1), lse.reshape(batch, block, heads)

    parts = jax.tree.map(lambda x: x.reshape(batch, -1, block, *x.shape[2:]).swapaxes(0, 1), (q, near))
    out, lse = lax.map(query_block, parts)
    return tuple(x.swapaxes(0, 1).reshape(batch, tokens, heads, *x.shape[4:]) for x in (out, lse))


def attend_with_lse(
    q: Float[Array, "R G H"], k: Float[Array, "R S H"], v: Float[Array, "R S Hv"], mask: Bool[Array, "R S"], *, scoring: Scoring
) -> tuple[Float[Array, "R G Hv"], Float[Array, "R G"]]:
    """Returns the attention of one query per head over the keys in `mask`, in fp32, and its log-sum-exp; R is B K in one axis.

    Assumes that every row has a key in `mask` and that values outside `mask` are finite; keys there may be NaN.
    """
    scores = masked_scores(q, k, mask[:, None], scoring=scoring)
    highest = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - highest)
    total = weights.sum(-1, keepdims=True)
    out = EINSUM("rgs,rsh->rgh", (weights / total).astype(v.dtype), v)
    return out, (jnp.log(total) + highest)[..., 0]


def attend_first(
    q: Float[Array, "R G H"], k: Float[Array, "R S H"], v: Float[Array, "R S Hv"], last: Int[Array, " R"], *, scoring: Scoring
) -> tuple[Float[Array, "R G Hv"], Float[Array, "R G"]]:
    """Returns the attention of one query per head over the slots up to `last`, as `attend_with_lse` does.

    On a CPU the cost grows with the slots in use: where that are less than half, later blocks of slots are never read. On an
    accelerator a loop would end the CUDA graph of a step.
    """
    slots = k.shape[1]

    def whole(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        return attend_with_lse(q, k, v, jnp.arange(slots)[None, :] <= last[:, None], scoring=scoring)

    def in_use(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        def read(start: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
            return tuple(lax.dynamic_slice_in_dim(x, start, count, axis=1)[:, None] for x in (k, v))

        sizes = dict(kv_heads=1, slots=slots, value_dim=v.shape[2], lengths=jnp.ones(len(q), jnp.int32))
        out, lse = attend_blocks(q[:, None], read, seen=None, below=last + 1, scoring=scoring, **sizes)
        return out[:, 0], lse[:, 0]

    def on_cpu(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.cond(last.max() < slots // 2, in_use, whole, *arrays)

    return lax.platform_dependent(q, k, v, cpu=on_cpu if slots > 2 * BLOCK else whole, default=whole)


def masked_scores(
    q: Float[Array, "R G H"], k: Float[Array, "R S H"], mask: Bool[Array, "R g S"], *, scoring: Scoring
) -> Float[Array, "R G S"]:
    """Returns the scores of keys in fp32, -inf outside `mask`, which all query heads share (g = 1) or each has (g = G)."""
    on_cpu, elsewhere = (functools.partial(form, scoring=scoring) for form in (_scores_keys_first, _scores_queries_first))
    return lax.platform_dependent(q, k, mask, cpu=on_cpu, default=elsewhere)


def _scores_queries_first(q: jax.Array, k: jax.Array, mask: jax.Array, *, scoring: Scoring) -> jax.Array:
    return jnp.where(mask, scoring(products(q, k)), -jnp.inf)


def _scores_keys_first(q: jax.Array, k: jax.Array, mask: jax.Array, *, scoring: Scoring) -> jax.Array:
    """Masks before the transposition: otherwise the whole attention takes XLA:CPU a tenth longer."""
    return jnp.where(mask.swapaxes(1, 2), scoring(EINSUM("rsh,rgh->rsg", k, q)), -jnp.inf).swapaxes(1, 2)


def products(q: Float[Array, "*R G H"], k: Float[Array, "*R S H"]) -> Float[Array, "*R G S"]:
    """Returns the products of queries and keys in fp32."""
    return lax.platform_dependent(q, k, cpu=_keys_first, default=functools.partial(EINSUM, "...gh,...sh->...gs"))


def _keys_first(q: jax.Array, k: jax.Array) -> jax.Array:
    # As the second operand, or joined with the swap, XLA:CPU transposes the keys. XLA:GPU would fuse nothing into this form.
    return lax.optimization_barrier(EINSUM("...sh,...gh->...sg", k, q)).swapaxes(-1, -2)


def merge_by_lse(
    out: Float[Array, "*R Hv"], lse: Float[Array, "*R"], other_out: Float[Array, "*R Hv"], other_lse: Float[Array, "*R"]
) -> tuple[Float[Array, "*R Hv"], Float[Array, "*R"]]:
    """Returns the attention over the union of two disjoint sets of keys, and its log-sum-exp, from the attention over each set.

    Assumes that the first set is not empty; the second may be (log-sum-exp -inf).

    Example: log-sum-exps of ln 3 and ln 1 weigh the outputs 3/4 and 1/4, and merge to ln 4.
    """
    share = jax.nn.sigmoid(other_lse - lse)[..., None]
    return out * (1 - share) + other_out * share, jnp.logaddexp(lse, other_lse)
