"""The plan of a generation: each layer's cache policy and the sizes that programs are compiled for.

The core, `Session`, attention maps and benchmarks call `make_plan`; prefill, extend and the decode step take the plan as
a static argument.

Example: pages of 8 tokens, prompts padded to 256, 256 slots for new tokens, `compact_every=32`. Then the pool has 64 pages
per row: 32 prompt pages and 32 growth pages. A row that joins a running batch may decode (32 - 1) * 8 - 32 = 216 tokens.
"""

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
from icejax.cache.pool.host_pool import EXTENT, Pool, PoolLayer
from icejax.cache.pool.page_format import page_rows
from icejax.cache.protocol import CachePolicy, KVCache, Report
from icejax.cache.registry import display_name, layer_policies
from icejax.cache.sizes import CacheSpec, PoolSpec, pages_leaving
from icejax.checks.errors import InputError
from icejax.checks.numbers import LARGEST
from icejax.config import ModelConfig
from icejax.engine.buckets import SHORTEST, bucket, room_for, text_bucket
from icejax.models.decoder import CausalLM
from icejax.ops.rope import check_rerotation
from icejax.runtime import devices
from icejax.runtime.host_reads.choose import ORDER, fetch_backend

LOG = logging.getLogger(__name__)
# Layers from which on a step on a CPU is a program per layer: starting a program takes some 20 us, which layers of a small
# model do not outweigh, and the programs of few layers compile in seconds as one.
LEAST_LAYERS = 8


@dataclass(frozen=True)
class Plan:
    """The static part of a generation.

    Attributes:
        policies: the cache policy of each layer.
        spec: the sizes of a layer's cache.
        eos_token_ids: tokens that end a text.
        fetch_backend: how the pool is read, a key of `host_reads.backends.BACKENDS`; empty without pages in host memory.
        platform: the platform that the programs are compiled for: cpu, gpu or tpu.
        heads: for each layer, number of KV heads and head size where they differ from `spec`; else None.
        renewal: tokens at which a row is prefilled anew, because LongRoPE's factors change there; 0: never.
    """

    policies: tuple[CachePolicy, ...]
    spec: CacheSpec
    eos_token_ids: tuple[int, ...]
    fetch_backend: str
    platform: str
    heads: tuple[tuple[int, int] | None, ...]
    renewal: int = 0

    def spec_of(self, layer: int) -> CacheSpec:
        """Returns the sizes of one layer's cache."""
        if self.heads[layer] is None:
            return self.spec
        count, size = self.heads[layer]
        return dataclasses.replace(self.spec, num_kv_heads=count, head_dim=size, value_dim=size)

    @functools.cached_property
    def pooled(self) -> tuple[int, ...]:
        """Indices of the layers that keep pages in the pool, in the pool's order."""
        return tuple(i for i, policy in enumerate(self.policies) if policy.pool(self.spec) is not None)

    @functools.cached_property
    def pool(self) -> PoolSpec | None:
        """The pool's sizes for one layer, equal in all pooled layers; None without a pool."""
        return self.policies[self.pooled[0]].pool(self.spec) if self.pooled else None

    @property
    def by_layers(self) -> bool:
        """Whether each layer of a step is a program of its own, so that each kind of layer is compiled once."""
        return self.platform == "cpu" and len(self.policies) >= LEAST_LAYERS

    @property
    def page_size(self) -> int:
        """Slots of a pool page; 0 without a pool."""
        return self.pool.page_size if self.pool else 0

    @property
    def prompt_pages(self) -> int:
        """Number of pages that a prompt may have; the growth pages follow them. 0 without a pool."""
        return self.spec.prompt_capacity // self.page_size if self.pool else 0

    @property
    def growth_pages(self) -> int:
        """Number of pages for new tokens: a ring, which a batch with joining rows fills again and again. 0 without a pool."""
        return self.pool.pages - self.prompt_pages if self.pool else 0

    @property
    def joining_tokens(self) -> int:
        """Number of tokens that a row may decode after it joins a batch, before its oldest new tokens are overwritten.

        The growth pages' slots less one page and one round of compaction: compaction moves a row's tokens to the front of its
        round.
        """
        if self.pool is None:
            return self.spec.new_capacity
        return (self.growth_pages - 1) * self.page_size - self.compact_every

    @property
    def compact_every(self) -> int:
        """Number of decoded tokens after which their pages are packed anew; 0: never, also if fewer tokens have room."""
        return self.pool.compact_every if self.pool and self.pool.compact_every <= self.spec.new_capacity else 0

    def pages(self, layer: int, pool: Pool | None, table: jax.Array | None, ended: jax.Array | None = None) -> PoolLayer | None:
        """Returns the pool as `layer` reads it; None for a layer without pages.

        Args:
            table: i32[B, X], the extents of each row.
            ended: bool[B], rows for which nothing is fetched; None: no row.
        """
        if layer not in self.pooled:
            return None
        return PoolLayer(pool, table, ended, np.int32(self.pooled.index(layer)), self.fetch_backend, self.spec.dtype)

    def text_slots(self, tokens: int) -> int:
        """Returns how many slots of pages `extend` writes for `tokens` new tokens; 0 without a pool."""
        return 0 if self.pool is None else pages_leaving(text_bucket(tokens), self.page_size) * self.page_size

    def room_for_answer(self, tokens: int, *, pages: int) -> int:
        """Returns how many tokens may be decoded after `extend` appends `tokens` to `pages` pages; below 0: they do not fit."""
        if self.pool is None:
            return self.spec.capacity
        return (self.pool.pages - pages) * self.page_size - self.text_slots(tokens) - 1  # the last page is never full

    def pool_sizes(self, extents: int) -> tuple[tuple[int, ...], str, int]:
        """Returns what `host_pool.allocate` takes: shape and dtype of the pages, and the bytes of a page's codes."""
        return self.pool_shape(extents), self.pool_dtype, self.pool.codes

    @property
    def pool_dtype(self) -> str:
        """Name of the dtype of the pool's pages; without a pool, of keys and values."""
        return self.pool.dtype if self.pool else self.spec.dtype

    def extents(self, tokens: int) -> np.ndarray:
        """Returns which extents a row with a prompt of `tokens` tokens needs, bool[X], all growth pages included.

        If rows are prefilled anew, a shorter prompt's row has room for that.

        Example: extents have 64 pages, and a row has 96 prompt pages and 32 growth pages. A prompt padded to 32 pages needs
        two extents: the first for pages 0-31, the second for growth pages 96-127.
        """
        pages = self.pool.pages
        # The prompt is padded to few sizes, because programs are compiled for the size of the pool.
        prompt_pages = bucket(max(tokens, self.renewal)) // self.page_size
        return row_extents(prompt_pages, range(self.prompt_pages, pages), most=extents_for(pages))

    def pool_shape(self, extents: int) -> tuple[int, ...]:
        """Returns the shape [E, L, 64, K, planes, rows, W] of a pool of `extents` extents; W is the width of the widest plane.

        Raises:
            InputError: the policy fetches single slots, and the pool has more of them than a 32-bit index can count.
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
    """Returns every layer's report, with shapes in place of arrays; layers of one kind are traced once."""
    layers, reports_by_kind = [], {}
    for policy, state in zip(plan.policies, cache.layers, strict=True):
        leaves, tree = jax.tree.flatten(state)
        kind = policy, tree, *((x.shape, x.dtype) for x in leaves)
        if kind not in reports_by_kind:
            reports_by_kind[kind] = jax.eval_shape(policy.report, state, cache.lengths)
        layers.append(reports_by_kind[kind])
    return layers


def make_plan(
    model: CausalLM,
    policy: CachePolicy,
    *,
    batch_size: int,
    prompt_tokens: int,
    new_tokens: int,
    extends: bool = False,
    joins: bool = False,
    platform: str | None = None,
) -> Plan:
    """Returns the plan for prompts of at most `prompt_tokens` tokens and at most `new_tokens` tokens after them.

    Args:
        extends: whether `extend` will add texts among the new tokens. Each text is padded and begins a new page, so a pool gets
            room for half as many tokens again, and for 512 more.
        joins: whether rows may join after the batch has decoded, which needs room for a page and a round of compaction more.
        platform: cpu, gpu or tpu, for programs that are compiled here and run elsewhere; the pool is then read by that
            platform's first backend, without a self-test. None: the platform that JAX runs on.

    Raises:
        InputError: the policies do not fit each other, the model or the platform.
    """
    target, several = platform or devices.platform(), batch_size > 1 or joins
    renewal = _renewal(model.config, prompt_tokens, new_tokens, several=several)
    spec = _spec(model, batch_size, max(prompt_tokens, renewal), new_tokens)
    policies = layer_policies(policy, model.config, capacity=spec.capacity)
    policies = tuple(layer_policy.for_platform(target, latent=spec.latent) for layer_policy in policies)
    spec = _with_pages(spec, policies, new_tokens, extends=extends, joins=batch_size > 1 and (joins or renewal > 0))
    _check(policies, spec, policy, model.config, target)
    sizes = (batch_size, prompt_tokens, spec.prompt_capacity, spec.new_capacity)
    LOG.info("%d rows of at most %d tokens, padded to %d, and room for %d new ones", *sizes)
    LOG.info("layers: %s", _by_layer(policies))
    in_host = any(pool.planes for pool in (layer_policy.pool(spec) for layer_policy in policies) if pool)
    backend = (fetch_backend() if platform is None else ORDER[platform][0]) if in_host else ""
    return Plan(policies, spec, model.config.eos_token_ids, backend, target, _other_heads(model.config), renewal)


def _spec(model: CausalLM, batch_size: int, prompt_tokens: int, new_tokens: int) -> CacheSpec:
    """Returns the sizes of a cache before they are rounded to pages."""
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


def _renewal(config: ModelConfig, prompt_tokens: int, new_tokens: int, *, several: bool) -> int:
    """Returns the tokens at which LongRoPE's factors change, if one of `several` rows, or the row, can reach them; else 0."""
    if config.short_context is None or prompt_tokens + new_tokens <= config.short_context + 1:
        return 0
    return 0 if not several and prompt_tokens > config.short_context else config.short_context + 1


def _with_pages(spec: CacheSpec, policies: Sequence[CachePolicy], new_tokens: int, *, extends: bool, joins: bool) -> CacheSpec:
    """Returns the sizes with room for the pages of new tokens, rounded up to whole rounds of compaction.

    Whole rounds, because the growth pages are a ring: a round must not wrap. If a row `joins` its batch again, a page and a
    round more (`Plan.joining_tokens`).
    """
    if extends and any(policy.pool(spec) for policy in policies):
        room = room_for(new_tokens * 3 // 2 + 2 * SHORTEST, prompt=spec.prompt_capacity)
        spec = dataclasses.replace(spec, new_capacity=room)
    pools = [pool for pool in (policy.pool(spec) for policy in policies) if pool is not None]
    every = max((pool.compact_every for pool in pools), default=0)
    if joins and pools:
        room = room_for(new_tokens + pools[0].page_size, prompt=spec.prompt_capacity)
        if room >= every > 0:  # so much room is packed anew
            room = room_for(new_tokens + every + pools[0].page_size, prompt=spec.prompt_capacity)
        spec = dataclasses.replace(spec, new_capacity=room)
    if spec.new_capacity > every > 0:
        spec = dataclasses.replace(spec, new_capacity=-(-spec.new_capacity // every) * every)
    return spec


def _check(policies: Sequence[CachePolicy], spec: CacheSpec, policy: CachePolicy, config: ModelConfig, platform: str) -> None:
    """Raises InputError if the layers' `policies` do not fit each other, the model or the platform."""
    if any(layer_policy.rerotates for layer_policy in policies):
        for layer in config.layers:
            check_rerotation(layer.rope)
    pools = {pool for pool in (layer_policy.pool(spec) for layer_policy in policies) if pool is not None}
    if len(pools) > 1:
        raise InputError(f"layers must keep pages of one kind, got {' and '.join(map(str, pools))}: choose one policy for them")
    if platform == "tpu" and any(pool.dtype == "int8" for pool in pools):
        raise InputError("page_dtype=int8 does not compile on TPU: leave it out")
    if platform == "tpu" and any(pool.unit < pool.page_size for pool in pools):  # TPU host memory has tiles of several rows
        raise InputError(f"{display_name(policy)} fetches single tokens, which TPU cannot: use a cache that fetches pages")


def _other_heads(config: ModelConfig) -> tuple[tuple[int, int] | None, ...]:
    """Returns, for each layer, number of KV heads and head size where they differ from the model's; else None."""
    layer_heads = ((layer.kv_heads, layer.head_dim) for layer in config.layers)
    return tuple(None if heads == (config.num_key_value_heads, config.head_dim) else heads for heads in layer_heads)


def _by_layer(policies: tuple[CachePolicy, ...]) -> str:
    """Returns one line that names each layer's cache, such as `0-1 full, 2-27 clustered`."""
    parts = []
    for policy, layers in itertools.groupby(range(len(policies)), key=policies.__getitem__):
        numbers = list(layers)
        interval = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
        parts.append(f"{interval} {display_name(policy)}")
    return ", ".join(parts)
