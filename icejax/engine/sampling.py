"""Sampling: chooses the next token i32[B] of each row from logits f32[B, V]. The decode step and the first token call it.

Example: logits with the probabilities 0.5, 0.25, 0.15 and 0.1 at temperature 1. `top_k=2` keeps the first two tokens,
`top_p=0.7` too (0.5 < 0.7 <= 0.75); `min_p=0.25` keeps three, down to 0.25 * 0.5 = 0.125.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from icejax.checks.errors import InputError, quoted
from icejax.checks.numbers import integer, number
from icejax.ops.threshold import least_of, ordered, threshold

MOST_BIASES = 1024  # token ids of a logit bias


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling options of a row, applied in this order: logit bias, penalties, temperature, top-k, top-p, min-p.

    So do vLLM (bias and penalties) and Hugging Face (the others).

    Attributes:
        temperature: divides the logits; 0 chooses the most likely token.
        top_k: keep the k most likely tokens, and all that tie with the k-th; 0 keeps all.
        top_p: keep the fewest most likely tokens whose probabilities sum to p or more (arXiv 1904.09751), and all that tie with
            the last of them.
        min_p: keep tokens with at least this share of the most likely token's probability (arXiv 2407.01082).
        repetition_penalty: divides positive logits and multiplies negative logits of tokens that are in the text, prompt
            included (arXiv 1909.05858).
        presence_penalty: subtracted from the logits of tokens that the present answer holds, from -2 to 2. This penalty and
            the next are OpenAI's, and vLLM's (https://platform.openai.com/docs/api-reference): the prompt does not count.
        frequency_penalty: subtracted from the logits of tokens once for each time that the present answer holds them, from
            -2 to 2.
        logit_bias: numbers from -100 to 100 that are added to the logits of at most 1,024 tokens, by token id (OpenAI's
            form: an id may also be a string of digits); None: none.

    Raises:
        InputError: an option is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        integer("top_k", self.top_k, least=0)
        number("top_p", self.top_p, least=0, most=1, above=True)
        number("min_p", self.min_p, least=0, most=1)
        number("repetition_penalty", self.repetition_penalty, least=1e-6, most=1e6)
        number("presence_penalty", self.presence_penalty, least=-2, most=2)
        number("frequency_penalty", self.frequency_penalty, least=-2, most=2)
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        if number("temperature", self.temperature, least=0, most=1e6):
            number("temperature above 0", self.temperature, least=1e-6, most=1e6)  # logits are divided by it

    @property
    def samples(self) -> bool:
        """Whether the row draws its tokens; a greedy row takes the most likely one."""
        return self.temperature > 0

    @property
    def penalised(self) -> bool:
        """Whether the row has a penalty or a logit bias."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty or self.logit_bias)


def _checked_bias(biases: object) -> dict[int, float] | None:
    """Returns a logit bias with whole numbers as token ids; None for an empty one."""
    if biases is None:
        return None
    if not isinstance(biases, Mapping):
        raise InputError(f"logit_bias must have a number for each of some token ids, got {quoted(biases)}")
    if len(biases) > MOST_BIASES:
        raise InputError(f"logit_bias must have at most {MOST_BIASES} token ids, got {len(biases)}")
    checked: dict[int, float] = {}
    for key, bias in biases.items():
        is_number = isinstance(key, Integral) and not isinstance(key, bool)
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
        token = integer("a token id of logit_bias", int(key) if is_number or is_digits else key, least=0)
        if token in checked:
            raise InputError(f"logit_bias has token {token} twice: give one number for it")
        checked[token] = number(f"logit_bias of token {token}", bias, least=-100, most=100)
    return checked or None


def check_bias(sampling: Sampling, vocabulary: int, *, place: str = "") -> None:
    """Raises InputError if the logit bias names a token beyond the vocabulary; the message begins with `place`."""
    largest = max(sampling.logit_bias or (0,))
    if largest >= vocabulary:
        raise InputError(
            f"{place}logit_bias has token {largest} and the model knows {vocabulary}: give token ids of this model"
        )


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
    """The options of `Sampling` that draw a token, as arrays with one value per row: a new value compiles no program."""

    temperature: jax.Array  # f32[B]
    top_k: jax.Array  # i32[B]
    top_p: jax.Array  # f32[B]
    min_p: jax.Array  # f32[B]

    @classmethod
    def of(cls, rows: Sequence[Sampling]) -> RowSampling:
        """Returns the rows' options: f32[B] each, `top_k` i32[B]."""
        values = {option.name: [getattr(row, option.name) for row in rows] for option in fields(cls)}
        return cls(**{name: jnp.asarray(x, jnp.int32 if name == "top_k" else jnp.float32) for name, x in values.items()})


def choose(logits: Float[Array, "B V"], rows: RowSampling | None, *, keys: Key[Array, " B"]) -> Int[Array, " B"]:
    """Returns one token per row. Each row draws with its own key, so equal keys give equal texts.

    Args:
        logits: the logits after bias and penalties.
        rows: sampling options; None if all rows are greedy.
        keys: random key of each row.
    """
    best = logits.argmax(-1).astype(jnp.int32)
    if rows is None:
        return best
    drawn = jax.vmap(jax.random.categorical)(keys, candidates(logits, rows)).astype(jnp.int32)
    return jnp.where(rows.temperature > 0, drawn, best)


def candidates(logits: Float[Array, "B V"], rows: RowSampling) -> Float[Array, "B V"]:
    """Returns (logits - max) / temperature, with -inf for the tokens that top-k, top-p and min-p remove.

    Thresholds are computed by counting instead of sorting: an accelerator sorts a vocabulary in more time than it takes to
    count it a few dozen times.
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
