"""How the next token is chosen from logits."""

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
        temperature: 0 takes the most likely token.
        top_k: keep the k most likely tokens, and those as likely as the last of them; 0 keeps all.
        top_p: keep the fewest most likely tokens whose probabilities reach p (arXiv 1904.09751), and those as likely as the
            last of them.
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
        integer("top_k", self.top_k, least=0)
        number("top_p", self.top_p, least=0, most=1, above=True)
        number("min_p", self.min_p, least=0, most=1)
        number("repetition_penalty", self.repetition_penalty, least=1e-6, most=1e6)
        if number("temperature", self.temperature, least=0, most=1e6):
            number("temperature above 0", self.temperature, least=1e-6, most=1e6)  # logits are divided by it

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn: a greedy row takes the most likely one."""
        return self.temperature > 0

    @property
    def needs_seen(self) -> bool:
        """Whether `choose` must be told which tokens the text holds."""
        return self.repetition_penalty != 1.0


def checked_sampling(sampling: Sampling | None) -> Sampling:
    """Returns the options, greedy ones for None; InputError for anything else."""
    if sampling is not None and not isinstance(sampling, Sampling):
        raise InputError(f"sampling must be an icejax.Sampling(...), got {quoted(sampling)}")
    return sampling or Sampling()


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RowSampling:
    """A value per row of each option of `Sampling`: arrays, so that no program is compiled for a value.

    Attributes:
        samples: whether any row draws its tokens. Where none does, the programs only look for the largest logit.
    """

    temperature: jax.Array  # f32[B]
    top_k: jax.Array  # i32[B]
    top_p: jax.Array  # f32[B]
    min_p: jax.Array  # f32[B]
    repetition_penalty: jax.Array  # f32[B]
    samples: bool = field(metadata=dict(static=True))

    @classmethod
    def of(cls, rows: Sequence[Sampling]) -> RowSampling:
        """Returns the options of rows, f32[B] each, but for `top_k` i32[B]."""
        values = {each.name: [getattr(row, each.name) for row in rows] for each in fields(Sampling)}
        arrays = {name: jnp.asarray(x, jnp.int32 if name == "top_k" else jnp.float32) for name, x in values.items()}
        return cls(**arrays, samples=any(row.samples for row in rows))


def row_options(
    rows: Sequence[Sampling], texts: Sequence[Sequence[int]], vocabulary: int
) -> tuple[RowSampling | None, Bool[Array, "B V"] | None]:
    """Returns the options of rows and which tokens their texts hold; None for what no row needs."""
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
    """Returns one token i32[B] per row; each draws from its own key, so equal keys give equal texts.

    Args:
        rows: None where all are greedy and none has a penalty.
        seen: which tokens the texts hold; None where no row has a penalty.
    """
    if seen is not None:
        logits = penalised(logits, seen, rows.repetition_penalty)
    best = logits.argmax(-1).astype(jnp.int32)
    if rows is None or not rows.samples:
        return best
    drawn = jax.vmap(jax.random.categorical)(keys, candidates(logits, rows)).astype(jnp.int32)
    return jnp.where(rows.temperature > 0, drawn, best)


def penalised(logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: Float[Array, " B"]) -> Float[Array, "B V"]:
    """Returns the logits f32[B, V], those of tokens that the texts hold with the repetition penalty."""
    penalty = penalty[:, None]
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def candidates(logits: Float[Array, "B V"], rows: RowSampling) -> Float[Array, "B V"]:
    """Returns the logits f32[B, V] less the largest, over the temperature; -inf for what top-k, top-p and min-p cut away.

    Nothing is sorted: over a vocabulary that takes an accelerator longer than to count a few dozen times.
    """
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1)[:, None]
    scaled, order = (logits - logits.max(-1, keepdims=True)) / temperature, ordered(logits)
    kept = order >= kth_largest(order, rows.top_k)[:, None]
    weights = jnp.where(kept, jnp.exp(scaled), 0)
    kept &= order >= nucleus(order, weights, rows.top_p)[:, None]
    kept &= weights >= rows.min_p[:, None]
    kept |= order == order.max(-1, keepdims=True)  # whatever is rounded: the weight of the best may not be 1 to the bit
    return jnp.where(kept, scaled, -jnp.inf)


def kth_largest(order: UInt32[Array, "B V"], k: Int[Array, " B"]) -> UInt32[Array, " B"]:
    """Returns the k-th largest number u32[B] of each row, the smallest where k is 0 or more than there are.

    What is not below it are k numbers, and more where several equal it.
    """
    vocabulary = order.shape[-1]
    return least_of(order, jnp.where(k > 0, jnp.minimum(k, vocabulary), vocabulary))


def nucleus(order: UInt32[Array, "B V"], weights: Float[Array, "B V"], p: Float[Array, " B"]) -> UInt32[Array, " B"]:
    """Returns the number u32[B] from which on the weights of a row, which grow with the numbers, reach the share p of all.

    What is not below it are the fewest that do, and those equal to the least of them; all where p is 1.
    """
    share = p * weights.sum(-1)

    def reach(least: UInt32[Array, "B N"]) -> Bool[Array, "B N"]:
        return jnp.where(order[:, None] >= least[:, :, None], weights[:, None], 0).sum(-1) >= share[:, None]

    return jnp.where(p < 1, threshold(reach, len(p)), 0)


def row_keys(draws: Sequence[tuple[int, int]]) -> Key[Array, " B"]:
    """Returns the random keys of seeds and indices below 2^32."""
    seeds, indices = (np.asarray(x, np.uint32) for x in zip(*draws, strict=True))
    return jax.vmap(jax.random.fold_in)(jax.vmap(jax.random.key)(seeds), indices)


def fold_in(keys: Key[Array, " B"], numbers: Int[Array, " B"]) -> Key[Array, " B"]:
    """Returns the keys of the same rows for another number of each."""
    return jax.vmap(jax.random.fold_in)(keys, numbers)
