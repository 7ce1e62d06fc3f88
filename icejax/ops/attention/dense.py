"""Dense attention: over a whole prompt in blocks, and of one query over a masked set of keys."""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from icejax.runtime import devices

LOG = logging.getLogger(__name__)
BLOCK = 512  # queries and keys per block; measured fastest of 128-1024 on two CPU cores
# fp32 products stay fp32 on every backend, as in PyTorch; other dtypes are not affected.
EINSUM = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class Scoring:
    """How products of queries and keys become the scores that softmax takes, in fp32.

    Attributes:
        scale: what they are multiplied by.
        softcap: what scores then come near and never exceed, by tanh (Gemma 2, arXiv 2408.00118); None: no bound.
    """

    scale: float
    softcap: float | None = None

    def __call__(self, products: Float[Array, "*R"]) -> Float[Array, "*R"]:
        """Returns the scores."""
        return self.capped(products * self.scale)

    def capped(self, scaled: Float[Array, "*R"]) -> Float[Array, "*R"]:
        """Returns the scores of products that are scaled already."""
        return scaled if self.softcap is None else self.softcap * jnp.tanh(scaled / self.softcap)

    def slope(self, scores: Float[Array, "*R"]) -> Float[Array, "*R"] | float:
        """Returns by how much a score grows with its scaled product."""
        return 1.0 if self.softcap is None else 1.0 - jnp.square(scores / self.softcap)


class Attended(NamedTuple):
    """What queries attended to.

    Attributes:
        out: the weighted mean of the values, dtype[B, T, N, Hv].
        lse: the natural log-sum-exp of the scores, f32[B, T, N].
    """

    out: jax.Array
    lse: jax.Array


def causal(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    *,
    lengths: Int[Array, " B"],
    window: int | None,
    scoring: Scoring,
) -> Attended:
    """Returns causal attention of a right-padded prompt, in the dtype of `q`; rows past `lengths` mean nothing.

    A query sees the `window` newest keys up to itself, all with None. Nothing of size T x T is made. What stands in
    padding, NaN included, does not reach a valid row. On CUDA half precision runs in cuDNN, if values are as wide as keys
    and scores have no cap; else blocks run with an online softmax (arXiv 2112.05682).
    """
    size, half = q.shape[-1], q.dtype in (jnp.bfloat16, jnp.float16)
    plain = v.shape[-1] == size and scoring.softcap is None
    if devices.platform() == "gpu" and half and plain and size % 8 == 0 and size <= 128:
        LOG.info("prefill attention: cudnn")
        valid = (jnp.arange(q.shape[1])[None, :] < lengths[:, None])[:, :, None, None]
        out, lse = jax.nn.dot_product_attention(
            q,
            jnp.where(valid, k, 0),
            jnp.where(valid, v, 0),
            is_causal=True,
            scale=scoring.scale,
            local_window_size=None if window is None else (window - 1, 0),
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            implementation="cudnn",
            return_residual=True,
        )
        # cuDNN's softmax statistics are this log-sum-exp in fp32. JAX rounds it to the dtype of `q`: XLA drops a rounding
        # that is undone at once, and the barrier keeps the two together.
        return Attended(out, lax.optimization_barrier(lse.astype(jnp.float32)))
    LOG.info("prefill attention: blockwise")
    out, lse = causal_with_lse(q, k, v, lengths=lengths, window=window, scoring=scoring)
    return Attended(out.astype(q.dtype), lse)


def causal_with_lse(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    *,
    lengths: Int[Array, " B"],
    window: int | None,
    scoring: Scoring,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Returns `causal`, blockwise and all in fp32."""
    batch, tokens, heads, size = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    block = math.gcd(BLOCK, tokens)
    valid = jnp.arange(tokens)[None, :] < lengths[:, None]
    k = jnp.where(valid[:, :, None, None], k, 0).transpose(0, 2, 1, 3)  # B K T H
    v = jnp.where(valid[:, :, None, None], v, 0).transpose(0, 2, 1, 3)
    # Rows of a block are (query, head of the group), so that one product serves a KV head's whole group.
    rows = q.reshape(batch, tokens, kv_heads, group, size).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(batch, kv_heads, tokens * group, size)

    def query_block(i: jax.Array, so_far: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        queries = lax.dynamic_slice_in_dim(rows, i * block * group, block * group, axis=2)
        position = i * block + jnp.arange(block * group) // group

        def key_block(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
            total, weight, highest = carry
            keys, values = (lax.dynamic_slice_in_dim(x, j * block, block, axis=2) for x in (k, v))
            key_position = j * block + jnp.arange(block)
            seen = key_position[None, :] <= position[:, None]
            if window is not None:
                seen &= key_position[None, :] > position[:, None] - window
            scores = jnp.where(seen, scoring(EINSUM("bkrh,bksh->bkrs", queries, keys)), -jnp.inf)
            higher = jnp.maximum(highest, scores.max(-1))
            # A row may see nothing of a block that lies outside its window: -inf minus -inf is kept out.
            base = jnp.where(jnp.isneginf(higher), 0.0, higher)
            share = jnp.exp(scores - base[..., None])
            shrink = jnp.exp(highest - base)
            total = total * shrink[..., None] + EINSUM("bkrs,bksh->bkrh", share.astype(v.dtype), values)
            return total, weight * shrink + share.sum(-1), higher

        shape = (batch, kv_heads, block * group)
        empty = jnp.zeros((*shape, v.shape[-1])), jnp.zeros(shape), jnp.full(shape, -jnp.inf)
        first = 0 if window is None else jnp.maximum(0, (i * block - window + 1) // block)
        total, weight, highest = lax.fori_loop(first, i + 1, key_block, empty)
        return tuple(
            lax.dynamic_update_slice_in_dim(old, x.astype(old.dtype), i * block * group, axis=2)
            for old, x in zip(so_far, (total / weight[..., None], jnp.log(weight) + highest), strict=True)
        )

    blocks = (lengths.max() + block - 1) // block
    out, lse = lax.fori_loop(0, blocks, query_block, (jnp.zeros((*rows.shape[:3], v.shape[-1])), jnp.zeros(rows.shape[:3])))
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
    """Returns the attention of many queries over the keys in `mask`, in fp32, and its log-sum-exp: -inf if there is none.

    Queries run in blocks. Values outside `mask` must be finite.

    Args:
        near: which keys each query may see besides; None: all.
    """
    batch, tokens, heads, size = q.shape
    block = math.gcd(BLOCK, tokens)

    def some(part: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array]:
        queries, close = part  # B T' N H, B T' S
        queries = queries.reshape(batch, block, k.shape[1], -1, size)
        seen = mask[:, None, :, None] if close is None else (mask[:, None] & close[:, :, None])[:, :, :, None]
        scores = jnp.where(seen, scoring(EINSUM("btkgh,bksh->btkgs", queries, k)), -jnp.inf)
        highest = scores.max(-1, keepdims=True, initial=-jnp.inf)  # there may be no slot at all
        base = jnp.where(jnp.isneginf(highest), 0.0, highest)
        weights = jnp.exp(scores - base)
        total = weights.sum(-1, keepdims=True)
        out = EINSUM("btkgs,bksh->btkgh", (weights / jnp.maximum(total, 1e-30)).astype(v.dtype), v)
        return out.reshape(batch, block, heads, -1), (jnp.log(total) + base).reshape(batch, block, heads)

    parts = jax.tree.map(lambda x: x.reshape(batch, -1, block, *x.shape[2:]).swapaxes(0, 1), (q, near))
    out, lse = lax.map(some, parts)
    return tuple(x.swapaxes(0, 1).reshape(batch, tokens, heads, *x.shape[4:]) for x in (out, lse))


def attend_with_lse(
    q: Float[Array, "R G H"], k: Float[Array, "R S H"], v: Float[Array, "R S Hv"], mask: Bool[Array, "R S"], *, scoring: Scoring
) -> tuple[Float[Array, "R G Hv"], Float[Array, "R G"]]:
    """Returns the attention of one query per head over the keys in `mask`, in fp32, and its log-sum-exp; R is B K, in one axis.

    Assumes that every row sees a key and that the values outside `mask` are finite (keys there may be anything).
    """
    scores = masked_scores(q, k, mask[:, None], scoring=scoring)
    highest = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - highest)
    total = weights.sum(-1, keepdims=True)
    out = EINSUM("rgs,rsh->rgh", (weights / total).astype(v.dtype), v)
    return out, (jnp.log(total) + highest)[..., 0]


def masked_scores(
    q: Float[Array, "R G H"], k: Float[Array, "R S H"], mask: Bool[Array, "R g S"], *, scoring: Scoring
) -> Float[Array, "R G S"]:
    """Returns the scores of keys in fp32, -inf outside `mask`, which is of all heads or of each."""
    on_cpu, elsewhere = (functools.partial(form, scoring=scoring) for form in (_scores_keys_first, _scores_queries_first))
    return lax.platform_dependent(q, k, mask, cpu=on_cpu, default=elsewhere)


def _scores_queries_first(q: jax.Array, k: jax.Array, mask: jax.Array, *, scoring: Scoring) -> jax.Array:
    return jnp.where(mask, scoring(products(q, k)), -jnp.inf)


def _scores_keys_first(q: jax.Array, k: jax.Array, mask: jax.Array, *, scoring: Scoring) -> jax.Array:
    """Masked before they are turned: XLA:CPU would take a tenth longer for the whole attention."""
    return jnp.where(mask.swapaxes(1, 2), scoring(EINSUM("rsh,rgh->rsg", k, q)), -jnp.inf).swapaxes(1, 2)


def products(q: Float[Array, "*R G H"], k: Float[Array, "*R S H"]) -> Float[Array, "*R G S"]:
    """Returns the products of queries and keys in fp32."""
    return lax.platform_dependent(q, k, cpu=_keys_first, default=functools.partial(EINSUM, "...gh,...sh->...gs"))


def _keys_first(q: jax.Array, k: jax.Array) -> jax.Array:
    """XLA:CPU would transpose the keys as the second operand; XLA:GPU then fuses nothing into the products."""
    return EINSUM("...sh,...gh->...sg", k, q).swapaxes(-1, -2)


def merge_by_lse(
    out: Float[Array, "*R Hv"], lse: Float[Array, "*R"], other_out: Float[Array, "*R Hv"], other_lse: Float[Array, "*R"]
) -> tuple[Float[Array, "*R Hv"], Float[Array, "*R"]]:
    """Returns the attention over two disjoint sets from that over each, and its log-sum-exp; the first is not empty."""
    share = jax.nn.sigmoid(other_lse - lse)[..., None]
    return out * (1 - share) + other_out * share, jnp.logaddexp(lse, other_lse)
