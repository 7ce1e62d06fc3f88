"""Runs a function of a prompt's tokens chunk by chunk, which bounds its activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

CHUNK = 2048  # tokens


def by_chunks(function: Callable[..., Any], tokens: jax.Array, *others: jax.Array) -> Any:
    """Returns `function` of arrays [B, T, ...], computed over at most `CHUNK` tokens at a time.

    An array may have fewer rows than T: those of a device's own tokens on a mesh. So may results; each has as many in every
    chunk, and they are joined along that axis.

    Args:
        tokens: an array of all T tokens; its length sets the number of chunks.
    """
    count = tokens.shape[1] // math.gcd(CHUNK, tokens.shape[1])
    if count == 1:
        return function(tokens, *others)

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(len(x), count, -1, *x.shape[2:]).swapaxes(0, 1)

    results = lax.map(lambda chunk: function(*chunk), tuple(map(split, (tokens, *others))))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:]), results)
