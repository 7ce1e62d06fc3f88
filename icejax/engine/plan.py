"""What is fixed before a generation begins: how each layer caches, and the sizes that are compiled for."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from icejax.cache.pool.extents import extents_for, row_extents
from icejax.cache.pool.host_pool import EXTENT, PoolLayer
from icejax.cache.pool.page_format import page_rows
from icejax.cache.protocol import CachePolicy, KVCache, Report
from icejax.cache.registry import display_name, layer_policies
from icejax.cache.sizes import CacheSpec, PoolSpec
from icejax.checks.errors import InputError
from icejax.checks.numbers import LARGEST
from icejax.config import ModelConfig
from icejax.engine.buckets import SHORTEST, bucket, room_for
from icejax.models.decoder import CausalLM
from icejax.ops.rope import check_rerotation
from icejax.runtime import devices
from icejax.runtime.host_reads.choose import ORDER, fetch_backend

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What is static about a generation: how each layer caches, how large, and what ends a text.

    Attributes:
        fetch_backend: the way the pool is read, a key of `fetch.BACKENDS`; empty without a pool.
        platform: what the programs are compiled for: cpu, gpu or tpu.
        heads: KV heads and their size of each layer that has others than `spec`; None for one that has not.
    """

    policies: tuple[CachePolicy, ...]
    spec: CacheSpec
    eos_token_ids: tuple[int, ...]
    fetch_backend: str
    platform: str
    heads: tuple[tuple[int, int] | None, ...]

    def spec_of(self, layer: int) -> CacheSpec:
        """Returns the sizes of one layer's cache."""
        if self.heads[layer] is None:
            return self.spec
        count, size = self.heads[layer]
        return dataclasses.replace(self.spec, num_kv_heads=count, head_dim=size, value_dim=size)

    @functools.cached_property
    def pooled(self) -> tuple[int, ...]:
        """The layers that keep pages in the pool, in the pool's order."""
        return tuple(i for i, policy in enumerate(self.policies) if policy.pool(self.spec) is not None)

    @functools.cached_property
    def pool(self) -> PoolSpec | None:
        """What these layers keep there, the same in all of them; None without a pool."""
        return self.policies[self.pooled[0]].pool(self.spec) if self.pooled else None

    @property
    def page_size(self) -> int:
        """Slots of a pool page; 0 without a pool."""
        return self.pool.page_size if self.pool else 0

    @property
    def prompt_pages(self) -> int:
        """Pages that a prompt may have, behind which those of new tokens come; 0 without a pool."""
        return self.spec.prompt_capacity // self.page_size if self.pool else 0

    @property
    def growth_pages(self) -> int:
        """Pages for new tokens, which are filled over and over again in a batch where rows come and go."""
        return self.pool.pages - self.prompt_pages if self.pool else 0

    @property
    def joining_tokens(self) -> int:
        """How many tokens a row may decode that joins a batch at any step, until its oldest new ones are written over.

        A round of compaction less than there is room for: what a row has put into one comes to its front.
        """
        if self.pool is None:
            return self.spec.new_capacity
        return (self.growth_pages - 1) * self.page_size - self.compact_every

    @property
    def compact_every(self) -> int:
        """Decoded tokens after which their pages are packed anew; 0: never, as where there is no room for so many."""
        return self.pool.compact_every if self.pool and self.pool.compact_every <= self.spec.new_capacity else 0

    def pages(
        self, layer: int, pool: jax.Array | None, table: jax.Array | None, ended: jax.Array | None = None
    ) -> PoolLayer | None:
        """Returns what `layer` reads of the pool, where rows that have `ended` need nothing; None for one without pages."""
        if layer not in self.pooled:
            return None
        return PoolLayer(pool, table, ended, np.int32(self.pooled.index(layer)), self.fetch_backend, self.spec.dtype)

    def padded(self, tokens: int) -> int:
        """Returns the size that new tokens behind a cache are padded to, so that those leaving the window fit too."""
        return bucket(tokens + (self.pool.leaving if self.pool else 0))

    def room_for_answer(self, tokens: int, *, pages: int) -> int:
        """Returns how many tokens may be decoded behind new ones, behind `pages` pages; below 0: these do not fit."""
        if self.pool is None:
            return self.spec.capacity
        return (self.pool.pages - pages) * self.page_size - self.padded(tokens) - 1  # the last page is never full

    @property
    def pool_dtype(self) -> str:
        """Dtype of the pages in the pool, by name; that of keys and values without a pool."""
        return self.pool.dtype if self.pool else self.spec.dtype

    def extents(self, tokens: int) -> np.ndarray:
        """Returns which extents a row needs whose prompt has so many tokens, bool[X], and as many new ones as there may be."""
        most = self.pool.pages
        # Few sizes, as of the prompts: the programs are compiled for the size of the pool.
        return row_extents(bucket(tokens) // self.page_size, range(self.prompt_pages, most), most=extents_for(most))

    def pool_shape(self, extents: int) -> tuple[int, ...]:
        """Returns the shape [E, L, 64, K, planes, rows, W] of a pool of so many extents, as wide as the widest plane.

        Raises:
            InputError: single slots are fetched, and there are more than 32 bits count.
        """
        page = (self.pool.planes, page_rows(self.page_size, self.pool_dtype), max(self.spec.planes))
        shape = (extents, len(self.pooled), EXTENT, self.spec.num_kv_heads, *page)
        if self.pool.unit < self.page_size and (slots := math.prod(shape[:-1])) > LARGEST:
            raise InputError(
                f"a pool whose single tokens are fetched has at most {LARGEST} keys and values, this one would have {slots}: "
                "use a smaller batch or context, or whole pages (--cache clustered --cache-option keys_first=false)"
            )
        return shape


def reports(plan: Plan, cache: KVCache) -> list[Report]:
    """Returns what every layer says of its state, with shapes in the place of arrays."""
    pairs = zip(plan.policies, cache.layers, strict=True)
    return [jax.eval_shape(policy.report, state, cache.lengths) for policy, state in pairs]


def make_plan(
    model: CausalLM,
    policy: CachePolicy,
    *,
    batch_size: int,
    prompt_tokens: int,
    new_tokens: int,
    several: bool = False,
    platform: str | None = None,
) -> Plan:
    """Returns the plan for prompts of at most `prompt_tokens` and texts of at most `new_tokens`.

    Args:
        several: whether the new tokens come as several texts, too. These are padded, and each begins a page anew: in pages half
            as much again is kept free.
        platform: cpu, gpu or tpu, for programs that are compiled and do not run here: the pool is then read in the way that is
            best there, untried. None: the platform that JAX runs on.

    Raises:
        InputError: the policy needs what this platform does not have.
    """
    target = platform or devices.platform()
    spec = _spec(model, batch_size, prompt_tokens, new_tokens)
    policies = layer_policies(policy, model.config, capacity=spec.capacity)
    policies = tuple(each.for_platform(target, latent=spec.latent) for each in policies)
    spec = _with_pages(spec, policies, new_tokens, several=several)
    _check(policies, spec, policy, model.config, target)
    sizes = (batch_size, prompt_tokens, spec.prompt_capacity, spec.new_capacity)
    LOG.info("%d rows of at most %d tokens, padded to %d, and room for %d new ones", *sizes)
    LOG.info("layers: %s", _by_layer(policies))
    pooled = any(each.pool(spec) for each in policies)
    backend = (fetch_backend() if platform is None else ORDER[platform][0]) if pooled else ""
    return Plan(policies, spec, model.config.eos_token_ids, backend, target, _other_heads(model.config))


def _spec(model: CausalLM, batch_size: int, prompt_tokens: int, new_tokens: int) -> CacheSpec:
    """Returns the sizes of a cache without regard to pages."""
    config, prompt = model.config, bucket(prompt_tokens)
    return CacheSpec(
        batch_size=batch_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        value_dim=config.value_dim,
        latent=config.latent is not None,
        prompt_capacity=prompt,
        new_capacity=room_for(new_tokens, prompt=prompt),
        dtype=model.dtype,
    )


def _with_pages(spec: CacheSpec, policies: Sequence[CachePolicy], new_tokens: int, *, several: bool) -> CacheSpec:
    """Returns the sizes with room for the pages of new tokens: whole rounds of compaction, as these pages are used again."""
    if several and any(each.pool(spec) for each in policies):
        room = room_for(new_tokens * 3 // 2 + 2 * SHORTEST, prompt=spec.prompt_capacity)
        spec = dataclasses.replace(spec, new_capacity=room)
    pools = [pool for pool in (each.pool(spec) for each in policies) if pool is not None]
    every = max((pool.compact_every for pool in pools), default=0)
    if spec.new_capacity > every > 0:
        spec = dataclasses.replace(spec, new_capacity=-(-spec.new_capacity // every) * every)
    return spec


def _check(policies: Sequence[CachePolicy], spec: CacheSpec, policy: CachePolicy, config: ModelConfig, platform: str) -> None:
    """Raises InputError for policies that do not fit each other, the model or the platform."""
    if any(each.rerotates for each in policies):
        for layer in config.layers:
            check_rerotation(layer.rope)
    pools = {pool for pool in (each.pool(spec) for each in policies) if pool is not None}
    if len(pools) > 1:
        raise InputError(f"layers must keep pages of one kind, got {' and '.join(map(str, pools))}: choose one policy for them")
    if platform == "tpu" and any(pool.dtype == "int8" for pool in pools):
        raise InputError("page_dtype=int8 does not compile on TPU: leave it out")
    if platform == "tpu" and any(pool.unit < pool.page_size for pool in pools):  # host memory is in tiles of several rows there
        raise InputError(f"{display_name(policy)} fetches single tokens, which TPU cannot: use a cache that fetches pages")


def _other_heads(config: ModelConfig) -> tuple[tuple[int, int] | None, ...]:
    """Returns KV heads and their size of each layer that has others than the model's; None for one that has not."""
    sizes = ((layer.kv_heads, layer.head_dim) for layer in config.layers)
    return tuple(None if each == (config.num_key_value_heads, config.head_dim) else each for each in sizes)


def _by_layer(policies: tuple[CachePolicy, ...]) -> str:
    """Returns which layers have which cache, in a line."""
    parts = []
    for policy, layers in itertools.groupby(range(len(policies)), key=policies.__getitem__):
        numbers = list(layers)
        several = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
        parts.append(f"{several} {display_name(policy)}")
    return ", ".join(parts)
