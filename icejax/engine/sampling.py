"""Sampling: chooses the next token i32[B] of each row from logits f32[B, V]. The decode step and the first token call it.

Example: logits with the probabilities 0.5, 0.25, 0.15 and 0.1 at temperature 1. `top_k=2` keeps the first two tokens,
`top_p=0.7` too (0.5 < 0.7 <= 0.75); `min_p=0.25` keeps three, down to 0.25 * 0.5 = 0.125.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from icejax.checks.errors import InputError, quoted
from icejax.checks.numbers import integer, number
from icejax.ops.threshold import least_of, ordered, threshold


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling options of a row, applied in Hugging Face's order: penalty, temperature, top-k, top-p, min-p.

    Attributes:
        temperature: divides the logits; 0 chooses the most likely token.
        top_k: keep the k most likely tokens, and all that tie with the k-th; 0 keeps all.
        top_p: keep the fewest most likely tokens whose probabilities sum to p or more (arXiv 1904.09751), and all that tie with
            the last of them.
        min_p: keep tokens with at least this share of the most likely token's probability (arXiv 2407.01082).
        repetition_penalty: divides positive logits and multiplies negative logits of tokens that are in the text
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
        integer("top_k", self.top_k, least=0)
        number("top_p", self.top_p, least=0, most=1, above=True)
        number("min_p", self.min_p, least=0, most=1)
        number("repetition_penalty", self.repetition_penalty, least=1e-6, most=1e6)
        if number("temperature", self.temperature, least=0, most=1e6):
            number("temperature above 0", self.temperature, least=1e-6, most=1e6)  # logits are divided by it

    @property
    def samples(self) -> bool:
        """Whether the row draws its tokens; a greedy row takes the most likely one."""
        return self.temperature > 0

    @property
    def needs_seen(self) -> bool:
        """Whether `choose` needs `seen`, the tokens that the text holds."""
        return self.repetition_penalty != 1.0


def checked_sampling(sampling: Sampling | None) -> Sampling:
    """Returns the options; for None, greedy ones.

    Raises:
        InputError: `sampling` is neither None nor a `Sampling`.
    """
    if sampling is not None and not isinstance(sampling, Sampling):
        raise InputError(f"sampling must be an icejax.Sampling(...), got {quoted(sampling)}")
    return sampling or Sampling()


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RowSampling:
    """The options of `Sampling` as arrays with one value per row, so that a new value compiles no program.

    Attributes:
        samples: whether any row draws its tokens. If none does, the programs only take the largest logit.
    """

    temperature: jax.Array  # f32[B]
    top_k: jax.Array  # i32[B]
    top_p: jax.Array  # f32[B]
    min_p: jax.Array  # f32[B]
    repetition_penalty: jax.Array  # f32[B]
    samples: bool = field(metadata=dict(static=True))

    @classmethod
    def of(cls, rows: Sequence[Sampling]) -> RowSampling:
        """Returns the rows' options: f32[B] each, `top_k` i32[B]."""
        values = {option.name: [getattr(row, option.name) for row in rows] for option in fields(Sampling)}
        arrays = {name: jnp.asarray(x, jnp.int32 if name == "top_k" else jnp.float32) for name, x in values.items()}
        return cls(**arrays, samples=any(row.samples for row in rows))


def row_options(
    rows: Sequence[Sampling], texts: Sequence[Sequence[int]], vocabulary: int
) -> tuple[RowSampling | None, Bool[Array, "B V"] | None]:
    """Returns the rows' options, and which tokens of the vocabulary their texts hold.

    The options are None if all rows are greedy without a penalty; the mask is None if no row has a penalty.
    """
    seen = None
    if any(row.needs_seen for row in rows):
        seen = np.zeros((len(rows), vocabulary), bool)
        for row, text in zip(seen, texts, strict=True):
            row[np.asarray(text)] = True
        seen = jnp.asarray(seen)
    return RowSampling.of(rows) if seen is not None or any(row.samples for row in rows) else None, seen


def choose(
    logits: Float[Array, "B V"],
    rows: RowSampling | None,
    *,
    keys: Key[Array, " B"],
    seen: Bool[Array, "B V"] | None,
) -> Int[Array, " B"]:
    """Returns one token per row. Each row draws with its own key, so equal keys give equal texts.

    Args:
        rows: sampling options; None if all rows are greedy without a penalty.
        keys: random key of each row.
        seen: which tokens the texts hold; None if no row has a penalty.
    """
    if seen is not None:
        logits = penalised(logits, seen, rows.repetition_penalty)
    best = logits.argmax(-1).astype(jnp.int32)
    if rows is None or not rows.samples:
        return best
    drawn = jax.vmap(jax.random.categorical)(keys, candidates(logits, rows)).astype(jnp.int32)
    return jnp.where(rows.temperature > 0, drawn, best)


def penalised(logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: Float[Array, " B"]) -> Float[Array, "B V"]:
    """Returns the logits with the repetition penalty on the tokens that the texts hold.

    Example: a penalty of 1.5 takes the logits 3 and -3 of seen tokens to 2 and -4.5.
    """
    penalty = penalty[:, None]
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def candidates(logits: Float[Array, "B V"], rows: RowSampling) -> Float[Array, "B V"]:
    """Returns (logits - max) / temperature, with -inf for the tokens that top-k, top-p and min-p remove.

    Thresholds are found by counting instead of sorting: on an accelerator, sorting a vocabulary takes longer than counting it
    a few dozen times.
    """
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1)[:, None]
    scaled, order = (logits - logits.max(-1, keepdims=True)) / temperature, ordered(logits)
    mask = order >= kth_largest(order, rows.top_k)[:, None]
    weights = jnp.where(mask, jnp.exp(scaled), 0)
    mask &= order >= nucleus(order, weights, rows.top_p)[:, None]
    mask &= weights >= rows.min_p[:, None]
    mask |= order == order.max(-1, keepdims=True)  # rounding may leave the best token's weight just below 1
    return jnp.where(mask, scaled, -jnp.inf)


def kth_largest(order: UInt32[Array, "B V"], k: Int[Array, " B"]) -> UInt32[Array, " B"]:
    """Returns the k-th largest number of each row; the smallest if k is 0 or above V.

    At least k numbers are as large as it, more with ties. Example: of 5, 9, 7, 7 the 2nd largest is 7, which keeps three.
    """
    vocabulary = order.shape[-1]
    return least_of(order, jnp.where(k > 0, jnp.minimum(k, vocabulary), vocabulary))


def nucleus(order: UInt32[Array, "B V"], weights: Float[Array, "B V"], p: Float[Array, " B"]) -> UInt32[Array, " B"]:
    """Returns each row's largest threshold such that the numbers from it upwards hold at least the share p of the weights.

    Weights grow with the numbers. With p = 1 the threshold is 0. Example: the numbers 5, 9, 7, 7 have the weights 0.1, 0.5,
    0.2, 0.2; p = 0.5 gives 9, and p = 0.6 gives 7.
    """
    share = p * weights.sum(-1)

    def reach(least: UInt32[Array, "B N"]) -> Bool[Array, "B N"]:
        return jnp.where(order[:, None] >= least[:, :, None], weights[:, None], 0).sum(-1) >= share[:, None]

    return jnp.where(p < 1, threshold(reach, len(p)), 0)


def row_keys(draws: Sequence[tuple[int, int]]) -> Key[Array, " B"]:
    """Returns the random key of each pair of a seed and an index, both below 2^32."""
    return _folded_keys(*(np.asarray(x, np.uint32) for x in zip(*draws, strict=True)))


@jax.jit
def _folded_keys(seeds: UInt32[Array, " B"], indices: UInt32[Array, " B"]) -> Key[Array, " B"]:
    return jax.vmap(jax.random.fold_in)(jax.vmap(jax.random.key)(seeds), indices)


def fold_in(keys: Key[Array, " B"], numbers: Int[Array, " B"]) -> Key[Array, " B"]:
    """Returns each row's key with the row's number folded in."""
    return jax.vmap(jax.random.fold_in)(keys, numbers)
