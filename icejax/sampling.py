"""How the next token is chosen from logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from icejax.ranges import number, whole


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling options, applied in Hugging Face's order: penalty, temperature, top-k, top-p, min-p.

    Attributes:
        temperature: 0 takes the most likely token.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the fewest most likely tokens whose probabilities reach p (arXiv 1904.09751).
        min_p: keep tokens of at least this share of the best one's probability (arXiv 2407.01082).
        repetition_penalty: logits of tokens already in the text are divided (positive) or multiplied by it
            (arXiv 1909.05858).

    Raises:
        InputError: an option is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        whole("top_k", self.top_k, least=0)
        number("top_p", self.top_p, least=0, most=1, above=True)
        number("min_p", self.min_p, least=0, most=1)
        number("repetition_penalty", self.repetition_penalty, least=1e-6, most=1e6)
        if number("temperature", self.temperature, least=0, most=1e6):
            number("temperature above 0", self.temperature, least=1e-6, most=1e6)  # logits are divided by it

    @property
    def needs_seen(self) -> bool:
        """Whether `choose` must be told which tokens the text holds."""
        return self.repetition_penalty != 1.0

    def choose(
        self, logits: Float[Array, "B V"], *, keys: Key[Array, " B"], seen: Bool[Array, "B V"] | None
    ) -> Int[Array, " B"]:
        """Returns one token per row; each draws from its own key, so equal keys give equal texts."""
        if self.needs_seen:
            penalised = jnp.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty)
            logits = jnp.where(seen, penalised, logits)
        if self.temperature == 0:
            return logits.argmax(-1).astype(jnp.int32)
        logits, tokens = self._candidates(logits / self.temperature)
        drawn = jax.vmap(jax.random.categorical)(keys, logits)
        return jnp.take_along_axis(tokens, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)

    def _candidates(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the logits left and their tokens; -inf for what is cut away."""
        vocabulary = logits.shape[-1]
        if self.top_k == 0 and self.top_p == 1.0:
            tokens = jnp.broadcast_to(jnp.arange(vocabulary)[None, :], logits.shape)
        else:
            logits, tokens = lax.top_k(logits, min(self.top_k or vocabulary, vocabulary))
        if self.top_p < 1.0:
            before = jnp.cumsum(jax.nn.softmax(logits, axis=-1), axis=-1) - jax.nn.softmax(logits, axis=-1)
            logits = jnp.where(before < self.top_p, logits, -jnp.inf)
        if self.min_p > 0.0:
            share = jax.nn.softmax(logits, axis=-1)
            logits = jnp.where(share >= self.min_p * share.max(-1, keepdims=True), logits, -jnp.inf)
        return logits, tokens


def row_keys(draws: Sequence[tuple[int, int]]) -> Key[Array, " B"]:
    """Returns the random keys of seeds and indices below 2^32."""
    seeds, indices = (np.asarray(x, np.uint32) for x in zip(*draws, strict=True))
    return jax.vmap(jax.random.fold_in)(jax.vmap(jax.random.key)(seeds), indices)


def folded(keys: Key[Array, " B"], number: Int[Array, ""]) -> Key[Array, " B"]:
    """Returns the keys of the same rows for another number."""
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, number)
