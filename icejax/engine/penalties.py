"""Penalties: the logit bias, and the penalties of tokens that a text holds, change logits f32[B, V] before sampling.

The decode step and the first token apply them. Counted tokens are those of the present answer, as in OpenAI's and vLLM's
`presence_penalty` and `frequency_penalty`; the repetition penalty covers the prompt too, as in transformers.

Example: a logit is 1, its token stands once in the prompt and twice in the answer. A bias of 3 makes it 4, a repetition penalty
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

PER_TOKEN = ("seen", "counts", "bias")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RowPenalties:
    """The penalties of `Sampling` as arrays with one value per row, and arrays with one per row and token.

    An array [B, V] that no row needs is None.

    Attributes:
        seen: how often the text holds each token, prompt and answer; for the repetition penalty.
        counts: how often the answer holds each token; for the presence and the frequency penalty.
        bias: what is added to the logit of each token.
    """

    repetition_penalty: jax.Array  # f32[B]
    presence_penalty: jax.Array  # f32[B]
    frequency_penalty: jax.Array  # f32[B]
    seen: jax.Array | None  # i32[B, V]
    counts: jax.Array | None  # i32[B, V]
    bias: jax.Array | None  # f32[B, V]

    @classmethod
    def of(cls, rows: Sequence[Sampling], texts: Sequence[Sequence[int]], vocabulary: int) -> RowPenalties:
        """Returns the rows' penalties before the first token of their answers.

        Args:
            texts: token ids before the answers.
            vocabulary: number of tokens; ids of `Sampling.logit_bias` are below it.
        """
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        values = {name: jnp.asarray([getattr(row, name) for row in rows], jnp.float32) for name in names}
        seen = counts = bias = None
        if any(row.repetition_penalty != 1 for row in rows):
            seen = np.zeros((len(rows), vocabulary), np.int32)
            for row_seen, text in zip(seen, texts, strict=True):
                np.add.at(row_seen, np.asarray(text), 1)
            seen = jnp.asarray(seen)
        if any(row.presence_penalty or row.frequency_penalty for row in rows):
            counts = jnp.zeros((len(rows), vocabulary), jnp.int32)
        if any(row.logit_bias for row in rows):
            bias = np.zeros((len(rows), vocabulary), np.float32)
            for row_bias, row in zip(bias, rows, strict=True):
                for token, value in (row.logit_bias or {}).items():
                    row_bias[token] = value
            bias = jnp.asarray(bias)
        return cls(**values, seen=seen, counts=counts, bias=bias)

    def apply(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Returns the logits with bias, repetition, frequency and presence penalty, in vLLM's order."""
        if self.bias is not None:
            logits = logits + self.bias
        if self.seen is not None:
            penalty = self.repetition_penalty[:, None]
            logits = jnp.where(self.seen > 0, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
        if self.counts is not None:
            logits = logits - self.frequency_penalty[:, None] * self.counts.astype(jnp.float32)
            logits = logits - jnp.where(self.counts > 0, self.presence_penalty[:, None], 0)
        return logits

    def after(self, tokens: Int[Array, " B"]) -> RowPenalties:
        """Returns the penalties behind one more answer token of each row."""
        return self._counted(tokens, 1)

    def before(self, tokens: Int[Array, " B"]) -> RowPenalties:
        """Returns the penalties before each row's newest token, which is taken back."""
        return self._counted(tokens, -1)

    def _counted(self, tokens: Int[Array, " B"], times: int) -> RowPenalties:
        row = jnp.arange(len(tokens))
        seen, counts = (None if x is None else x.at[row, tokens].add(times) for x in (self.seen, self.counts))
        return replace(self, seen=seen, counts=counts)

    def behind(self, text: Int[Array, " T"]) -> RowPenalties:
        """Returns the penalties of one row before its answer to a further text."""
        seen = None if self.seen is None else self.seen.at[0, text].add(1)
        return replace(self, seen=seen, counts=None if self.counts is None else jnp.zeros_like(self.counts))


def row_options(
    rows: Sequence[Sampling], texts: Sequence[Sequence[int]], vocabulary: int
) -> tuple[RowSampling | None, RowPenalties | None]:
    """Returns the rows' sampling options, None if all rows are greedy, and their penalties, None if no row has one."""
    samples, penalised = any(row.samples for row in rows), any(row.penalised for row in rows)
    return RowSampling.of(rows) if samples else None, RowPenalties.of(rows, texts, vocabulary) if penalised else None


def with_same_arrays(batches: Sequence[RowPenalties | None], sizes: Sequence[int]) -> list[RowPenalties | None]:
    """Returns the penalties of batches of `sizes` rows with the arrays of all of them; a batch gets neutral ones."""
    present = [batch for batch in batches if batch is not None]
    arrays = {name: x for batch in present for name in PER_TOKEN if (x := getattr(batch, name)) is not None}
    completed: list[RowPenalties | None] = []
    for batch, size in zip(batches, sizes, strict=True):
        if arrays:
            batch = batch or RowPenalties.of([Sampling()] * size, [()] * size, 0)
            missing = {name: x for name, x in arrays.items() if getattr(batch, name) is None}
            batch = replace(batch, **{name: jnp.zeros((size, x.shape[1]), x.dtype) for name, x in missing.items()})
        completed.append(batch)
    return completed
