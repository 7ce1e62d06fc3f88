"""The sizes of a layer's cache: what is kept of a token on the device, and what in the host pool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The shapes of one layer's cache.

    Attributes:
        head_dim: channels of queries and keys.
        value_dim: channels of values.
        latent: whether values are the first `value_dim` channels of the keys, as in multi-head latent attention, so that
            nothing but keys needs to be kept.
        prompt_capacity: tokens a padded prompt may have.
        new_capacity: tokens that may be generated after it.
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
        """Channels of every plane, which is what is kept of a token: its key, and its value unless the key holds it."""
        return (self.head_dim,) if self.latent else (self.head_dim, self.value_dim)


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """What a layer keeps in the host pool.

    Attributes:
        pages: pages it can need.
        page_size: slots of a page.
        unit: slots that are fetched at once: those of a page, or 1.
        planes: vectors per slot: keys and values are 2, keys alone 1.
        dtype: of the pages, by name.
        leaving: newest tokens that stand on the device on their way to the pool.
        compact_every: decoded tokens after which their pages are packed anew; 0: never.
    """

    pages: int
    page_size: int
    unit: int
    planes: int
    dtype: str
    leaving: int
    compact_every: int = 0
