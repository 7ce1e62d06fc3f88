"""The sizes of one layer's cache, on the device and in the host pool; the engine's plan makes them, policies read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The shapes of one layer's cache.

    Attributes:
        head_dim: channels of queries and keys.
        value_dim: channels of values.
        latent: whether values are the first `value_dim` channels of the keys, as in multi-head latent attention; then only
            keys are kept.
        prompt_capacity: the most tokens of a padded prompt.
        new_capacity: the most tokens generated after it.
        dtype: dtype of keys and values, by name.
    """

    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    prompt_capacity: int
    new_capacity: int
    dtype: str
    latent: bool = False

    @property
    def capacity(self) -> int:
        """Tokens of prompt and generation together."""
        return self.prompt_capacity + self.new_capacity

    @property
    def planes(self) -> tuple[int, ...]:
        """Channels of each plane, one vector per token: its key, and its value unless the key holds it."""
        return (self.head_dim,) if self.latent else (self.head_dim, self.value_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of every row: a vector of each plane per KV head."""
        return self.batch_size * self.num_kv_heads * sum(self.planes) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """The sizes of a layer's pages in the host pool.

    Attributes:
        pages: the most pages the layer can need.
        page_size: slots of a page.
        unit: slots fetched together: `page_size`, or 1 where single tokens are fetched.
        planes: vectors per slot: 2 for keys and values, 1 for keys alone, 0 where the device keeps all of a token.
        dtype: dtype of the pages, by name.
        compact_every: decoded tokens between two compactions, which pack their pages again; 0: never.
        codes: bytes of a page's codes, in the pool's second array; 0: pages have none.
    """

    pages: int
    page_size: int
    unit: int
    planes: int
    dtype: str
    compact_every: int = 0
    codes: int = 0


@dataclass(frozen=True, kw_only=True)
class StepReads:
    """The bytes, about, that a decode step reads of a layer's cache, over all rows.

    Attributes:
        device: bytes on the device.
        host: bytes that come from host memory.
    """

    device: int
    host: int = 0


def num_bytes(arrays: Any) -> int:
    """Returns the bytes of all arrays, or shapes, in a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def pages_leaving(tokens: int, page_size: int) -> int:
    """Returns how many pages leave the window for a text of at most `tokens` tokens.

    The text pushes out as many tokens as it has, and the tokens decoded since a page last left, which are fewer than a page.

    Example: 16 tokens and pages of 16: at most 31 tokens leave, in 2 pages.
    """
    return -(-(tokens + page_size - 1) // page_size)
