"""Log-probabilities of the tokens that were chosen, and of the most likely ones."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from icejax.engine.response import Logprob, TokenLogprobs
from icejax.text.detokenize import decoded


def token_logprobs(
    logits: Float[Array, "B V"], tokens: Int[Array, " B"], *, rows: Sequence[int], count: int, tokenizer: Any
) -> dict[int, TokenLogprobs]:
    """Returns the log-probability of one token by the model's own logits, and the `count` largest, for each of `rows`."""
    likely = _likely(logits, tokens, count=min(count, logits.shape[-1]))
    tokens, chosen, best, ids = (np.asarray(x) for x in (tokens, *likely))

    def named(token: int, logprob: float) -> Logprob:
        return Logprob(int(token), decoded(tokenizer, [int(token)]), float(logprob))

    return {
        i: TokenLogprobs(named(tokens[i], chosen[i]), tuple(named(*each) for each in zip(ids[i], best[i], strict=True)))
        for i in rows
    }


@functools.partial(jax.jit, static_argnames="count")
def _likely(logits: jax.Array, tokens: jax.Array, *, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    chosen = jnp.take_along_axis(logprobs, jnp.maximum(tokens, 0)[:, None], axis=-1)[:, 0]
    return chosen, *jax.lax.top_k(logprobs, count)
