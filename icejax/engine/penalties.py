"""Penalties: the logit bias, and the penalties of tokens that a text holds, change logits f32[B, V] before sampling.

The decode step and the first token apply them. Counted tokens are those of the present answer, as in OpenAI's and vLLM's
`presence_penalty` and `frequency_penalty`; the repetition penalty covers the prompt too, as in transformers.

Example: a logit is 1, its token is once in the prompt and twice in the answer. A bias of 3 makes it 4, a repetition penalty
of 2 then 2, a frequency penalty of 0.5 then 2 - 0.5 * 2 = 1, and a presence penalty of 0.25 then 0.75.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from icejax.engine.sampling import RowSampling, Sampling


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RowPenalties:
    """The penalties of `Sampling` as arrays with one value per row, and arrays with one per row and token.

    All kinds have their arrays, so that each program that has penalties is compiled once.

    Attributes:
        seen: how often the text holds each token, prompt and answer; for the repetition penalty.
        counts: how often the answer holds each token; for the presence and the frequency penalty.
        bias: numbers added to the logits.
    """

    repetition_penalty: jax.Array  # f32[B]
    presence_penalty: jax.Array  # f32[B]
    frequency_penalty: jax.Array  # f32[B]
    seen: jax.Array  # i32[B, V]
    counts: jax.Array  # i32[B, V]
    bias: jax.Array  # f32[B, V]

    @classmethod
    def of(cls, rows: Sequence[Sampling], texts: Sequence[Sequence[int]], vocabulary: int) -> RowPenalties:
        """Returns the rows' penalties before the first token of their answers.

        Args:
            texts: token ids before the answers.
            vocabulary: number of tokens; ids of `Sampling.logit_bias` are below it.
        """
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        values = {name: jnp.asarray([getattr(row, name) for row in rows], jnp.float32) for name in names}
        seen, bias = np.zeros((len(rows), vocabulary), np.int32), np.zeros((len(rows), vocabulary), np.float32)
        for row_seen, text in zip(seen, texts, strict=True):
            np.add.at(row_seen, np.asarray(text, np.int64), 1)
        for row_bias, row in zip(bias, rows, strict=True):
            for token, value in (row.logit_bias or {}).items():
                row_bias[token] = value
        return cls(**values, seen=jnp.asarray(seen), counts=jnp.zeros(seen.shape, jnp.int32), bias=jnp.asarray(bias))

    def apply(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Returns the logits with bias, repetition, frequency and presence penalty, in vLLM's order."""
        logits = logits + self.bias
        penalty = self.repetition_penalty[:, None]
        logits = jnp.where(self.seen > 0, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
        logits = logits - self.frequency_penalty[:, None] * self.counts.astype(jnp.float32)
        return logits - jnp.where(self.counts > 0, self.presence_penalty[:, None], 0)

    def after(self, tokens: Int[Array, " B"]) -> RowPenalties:
        """Returns the penalties after one more answer token of each row."""
        return self._counted(tokens, 1)

    def before(self, tokens: Int[Array, " B"]) -> RowPenalties:
        """Returns the penalties before each row's newest token, which is taken back."""
        return self._counted(tokens, -1)

    def _counted(self, tokens: Int[Array, " B"], times: int) -> RowPenalties:
        row = jnp.arange(len(tokens))
        return replace(self, seen=self.seen.at[row, tokens].add(times), counts=self.counts.at[row, tokens].add(times))

    def behind(self, text: Sequence[int]) -> RowPenalties:
        """Returns the penalties of one row before its answer to a further text."""
        # Counted by NumPy: programs would be compiled for every length of a text.
        new = np.bincount(np.asarray(text, np.int64), minlength=self.seen.shape[1])[None].astype(np.int32)
        return replace(self, seen=self.seen + new, counts=jnp.zeros_like(self.counts))


def row_options(
    rows: Sequence[Sampling], texts: Sequence[Sequence[int]], vocabulary: int
) -> tuple[RowSampling | None, RowPenalties | None]:
    """Returns the rows' sampling options, None if all rows are greedy, and their penalties, None if no row has one."""
    samples, penalised = any(row.samples for row in rows), any(row.penalised for row in rows)
    return RowSampling.of(rows) if samples else None, RowPenalties.of(rows, texts, vocabulary) if penalised else None


def neutral_where_none(batches: Sequence[RowPenalties | None], sizes: Sequence[int]) -> list[RowPenalties | None]:
    """Returns the penalties of batches of `sizes` rows; if one has some, the others get neutral ones."""
    vocabulary = next((batch.bias.shape[1] for batch in batches if batch is not None), None)
    if vocabulary is None:
        return [*batches]
    pairs = zip(batches, sizes, strict=True)
    return [batch or RowPenalties.of([Sampling()] * size, [()] * size, vocabulary) for batch, size in pairs]
