"""Causal attention of a whole prompt, for the engine's prefill: by cuDNN on GPU where it can, else in blocks."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from icejax.ops.attention.dense import Attended, Scoring, causal_with_lse
from icejax.runtime import devices

LOG = logging.getLogger(__name__)


def causal(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    *,
    lengths: Int[Array, " B"],
    window: int | None,
    scoring: Scoring,
) -> Attended:
    """Returns causal attention of a right-padded prompt, in the dtype of `q`; outputs past `lengths` are undefined.

    No array of size T x T is made. Values in padding, NaN included, do not reach a valid output. On GPU bf16 and fp16 run in
    cuDNN, if the key size is a multiple of 8 up to 128, values have that size and scores have no cap; all else runs
    in blocks with an online softmax (arXiv 2112.05682).

    Example: with window 2 the query at position 5 sees the keys at 4 and 5.

    Args:
        lengths: tokens of each prompt, without padding.
        window: newest keys up to itself that a query sees; None: all.
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
        # cuDNN's softmax statistics are the log-sum-exp in fp32, which JAX rounds to the dtype of `q`. XLA drops the rounding
        # if the cast back to fp32 follows at once, and the barrier keeps both together.
        return Attended(out, lax.optimization_barrier(lse.astype(jnp.float32)))
    LOG.info("prefill attention: blockwise")
    out, lse = causal_with_lse(q, k, v, lengths=lengths, window=window, scoring=scoring)
    return Attended(out.astype(q.dtype), lse)
