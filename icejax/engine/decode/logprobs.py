"""Log-probabilities of the chosen tokens and of the most likely tokens; the decode loop asks for them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from icejax.engine.response import Logprob, TokenLogprobs
from icejax.text.token_text import token_text


def token_logprobs(
    logits: Float[Array, "B V"], tokens: Int[Array, " B"], *, counts: Mapping[int, int], most: int, tokenizer: Any
) -> dict[int, TokenLogprobs]:
    """Returns, for each row in `counts`, the log-probability of its token and its number of largest log-probabilities.

    They are natural logarithms of the softmax of the model's own logits, before temperature and penalties.

    Args:
        counts: number of most likely tokens by row.
        most: the largest number that any row of the run asks for; the program is compiled for it.
    """
    top_logprobs = _top_logprobs(logits, tokens, count=min(most, logits.shape[-1]))
    tokens, chosen, best, ids = (np.asarray(x) for x in (tokens, *top_logprobs))

    def named(token: int, logprob: float) -> Logprob:
        text, text_bytes = token_text(tokenizer, int(token))
        return Logprob(int(token), text, float(logprob), tuple(text_bytes))

    return {
        i: TokenLogprobs(named(tokens[i], chosen[i]), tuple(named(*pair) for pair in zip(ids[i, :n], best[i, :n], strict=True)))
        for i, n in counts.items()
    }


@functools.partial(jax.jit, static_argnames="count")
def _top_logprobs(logits: jax.Array, tokens: jax.Array, *, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns f32[B] of `tokens`, and the `count` largest f32[B, count] with their token ids i32[B, count]."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    chosen = jnp.take_along_axis(logprobs, jnp.maximum(tokens, 0)[:, None], axis=-1)[:, 0]
    return chosen, *jax.lax.top_k(logprobs, count)
