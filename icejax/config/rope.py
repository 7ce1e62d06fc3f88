"""The configuration of rotary position embeddings (RoPE). `models/families` builds it, `ops.rope` computes with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are scaled for longer contexts; fields are named as in the paper or code of each `rope_type`.

    Attributes:
        rope_type: `linear` (kaiokendev), `dynamic` (NTK by length, bloc97), `yarn` (arXiv 2309.00071), `llama3`, `longrope`
            (arXiv 2402.13753) or `proportional` (Gemma 4).
        factor: the extended context over the original one.
        original_max_position_embeddings: tokens of the original context (`dynamic`: the trained context).
        low_freq_factor, high_freq_factor: `llama3` only, bounds of the blended band, in turns over the original context.
        attention_factor: `yarn` and `longrope` only, factor of cos and sin.
        beta_fast, beta_slow, truncate: `yarn` only, bounds of the ramp, and whether they are rounded outwards.
        query_beta: `yarn` only, queries are multiplied by 1 + query_beta ln(1 + n), where n whole original contexts precede
            the query's position (Ministral 3).
        factors, short_factors: `longrope` only, divisors of the frequencies; the short ones apply to all keys of a text within
            the original context, the others to all keys of a longer text.
        part: `proportional` only, the share of the frequencies, highest first, that are not 0.
        score_factor: `yarn` only, factor of the scores in multi-head latent attention.
    """

    rope_type: Literal["linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]
    factor: float
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    attention_factor: float = 1.0
    beta_fast: float = 0.0
    beta_slow: float = 0.0
    truncate: bool = True
    query_beta: float = 0.0
    factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    part: float = 1.0
    score_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embeddings (RoPE) of a head.

    Attributes:
        size: number of rotated channels.
        theta: base of the frequencies.
        scaling: how frequencies are scaled; None: not at all.
    """

    size: int
    theta: float
    scaling: RopeScaling | None
