"""Sizes of the units of a prefill: how many tokens one program takes.

`PrefillJob` calls `unit_sizes` for every layer. The number of tokens is static, so a program is compiled for each kind of layer
and each padded length of a prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from icejax.cache.sizes import CacheSpec
from icejax.config import LayerConfig, ModelConfig

# Floating-point operations of a unit: some 40 ms of two CPU cores, and some 10 ms of a GPU or TPU.
WORK = {"cpu": 12e9}
WORK_ELSEWHERE = 2e12
FEWEST = 64  # tokens; fewer would read all weights of a layer for little work: products of 32 take twice as long on a CPU
MOST_QUERIES = 2048  # tokens, which bounds the activations of an MLP


@dataclass(frozen=True)
class UnitSizes:
    """Tokens of the units of a layer; each divides the padded length of the prompt.

    Attributes:
        tokens: tokens whose keys and values one unit computes.
        queries: tokens that one unit takes through attention and MLP.
    """

    tokens: int
    queries: int


def unit_sizes(config: ModelConfig, layer: LayerConfig, spec: CacheSpec, padded: int, platform: str) -> UnitSizes:
    """Returns the sizes of the units of a layer.

    Example: a query of Qwen2.5-Coder-0.5B takes 29 million operations for the matrices of a layer and, after 8,192 keys, 29
    million more for attention. A unit of 128 queries takes 7.5 billion.

    Args:
        spec: sizes of the layer's cache; queries have the size of its keys.
        padded: the padded length of the prompt.
        platform: cpu, gpu or tpu.
    """
    work, channels = WORK.get(platform, WORK_ELSEWHERE), spec.head_dim + spec.value_dim
    keys = padded if layer.window is None else min(padded, 2 * layer.window)
    of_token = 2 * config.hidden_size * spec.num_kv_heads * channels
    projections = 2 * config.hidden_size * spec.num_heads * channels
    of_query = projections + 6 * config.hidden_size * _inner_size(config, layer) + 2 * spec.num_heads * channels * keys
    return UnitSizes(_largest(work / of_token, padded), _largest(min(work / of_query, MOST_QUERIES), padded))


def _inner_size(config: ModelConfig, layer: LayerConfig) -> int:
    """Returns the inner size of the MLPs that a token goes through."""
    if layer.experts is None:
        return config.intermediate_size
    beside = config.intermediate_size if layer.experts.beside else 0
    return beside + layer.experts.chosen * layer.experts.size + layer.experts.shared


def _largest(tokens: float, padded: int) -> int:
    """Returns the largest divisor of `padded` that is 2^k or 3 2^k and at most `tokens`; at least `FEWEST`.

    Examples: 300 of 8,192 tokens give 256, 300 of 384 give 192, and 400 of 384 give 384.
    """
    most = max(tokens, FEWEST)
    power = math.gcd(padded, 1 << int(math.log2(most)))
    if padded % 3 or most < 3 * FEWEST:
        return power
    return max(power, 3 * math.gcd(padded // 3, 1 << int(math.log2(most / 3))))
