"""Log-probabilities of the chosen tokens and of the most likely tokens; the decode loop asks for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from icejax.engine.response import Logprob, TokenLogprobs
from icejax.text.token_text import token_text

USUAL = 20  # most likely tokens that OpenAI's clients ask for


class TopLogprobs:
    """The log-probabilities of a step's tokens and of the most likely ones, on the host.

    They are natural logarithms of the softmax of the model's own logits, before temperature and penalties.
    """

    def __init__(self, logits: Float[Array, "B V"], tokens: Int[Array, " B"], *, most: int) -> None:
        """Reads them.

        Args:
            most: the largest number of most likely tokens that any row of the run asks for.
        """
        arrays = _top_logprobs(logits, tokens, count=compiled_count(most, logits.shape[-1]))
        self._tokens, self._chosen, self._best, self._ids = (np.asarray(x) for x in (tokens, *arrays))

    def named(self, row: int, count: int, tokenizer: Any) -> TokenLogprobs:
        """Returns the log-probability of a row's token, and its `count` largest; InputError: the tokenizer fails."""
        top = zip(self._ids[row, :count], self._best[row, :count], strict=True)
        return named(tokenizer, self._tokens[row], self._chosen[row], top)


def compiled_count(most: int, vocabulary: int) -> int:
    """Returns how many of the largest log-probabilities a program computes: one program serves all usual numbers."""
    return min(USUAL if most <= USUAL else 1 << (most - 1).bit_length(), vocabulary)


def named(tokenizer: Any, token: int, logprob: float, top: Iterable[tuple[int, float]]) -> TokenLogprobs:
    """Returns the log-probability of a token, and those of the most likely ones, with the texts of the tokens."""

    def one(token: int, logprob: float) -> Logprob:
        text, text_bytes = token_text(tokenizer, int(token))
        return Logprob(int(token), text, float(logprob), tuple(text_bytes))

    return TokenLogprobs(one(token, logprob), tuple(one(*pair) for pair in top))


_top_logprobs = jax.jit(lambda logits, tokens, *, count: top_logprobs(logits, tokens, count=count), static_argnames="count")


def top_logprobs(
    logits: Float[Array, "B V"], tokens: Int[Array, " B"], *, count: int
) -> tuple[Float[Array, " B"], Float[Array, "B n"], Int[Array, "B n"]]:
    """Returns f32[B] of `tokens`, and the `count` largest f32[B, count] with their token ids i32[B, count]."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    chosen = jnp.take_along_axis(logprobs, jnp.maximum(tokens, 0)[:, None], axis=-1)[:, 0]
    return chosen, *jax.lax.top_k(logprobs, count)
