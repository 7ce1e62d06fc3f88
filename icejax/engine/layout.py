"""The layout of a cache: each layer's policy, and the sizes of its arrays, from a model's config and numbers of tokens.

`plan.make_plan` adds the sizes of a run; `api.choice` compares the layouts of two caches, of which it makes no array.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from icejax.cache.protocol import CachePolicy
from icejax.cache.registry import display_name, layer_policies
from icejax.cache.sizes import CacheSpec, PoolSpec
from icejax.checks.errors import InputError
from icejax.config import ModelConfig
from icejax.engine.buckets import SHORTEST, bucket, room_for
from icejax.models.sharding import check_one_device, share
from icejax.ops.rope import check_rerotation
from icejax.runtime.mesh import Mesh, holders


@dataclass(frozen=True)
class Layout:
    """The policies and sizes of a cache.

    Attributes:
        policies: the cache policy of each layer.
        spec: the sizes of a layer's cache.
        platform: the platform that the programs are compiled for: cpu, gpu or tpu.
        heads: for each layer, number of KV heads and head size where they differ from `spec`; else None.
        renewal: tokens at which a row is prefilled again, because LongRoPE's factors change there; 0: never.
        mesh: the devices that share the KV heads; policies and sizes are those of one device's share. None: one device.
    """

    policies: tuple[CachePolicy, ...]
    spec: CacheSpec
    platform: str
    heads: tuple[tuple[int, int] | None, ...]
    renewal: int
    mesh: Mesh | None

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


def make_layout(
    config: ModelConfig,
    dtype: str,
    policy: CachePolicy,
    *,
    batch_size: int,
    prompt_tokens: int,
    new_tokens: int,
    platform: str,
    extends: bool = False,
    joins: bool = False,
    mesh: Mesh | None = None,
) -> Layout:
    """Returns the layout of a cache for a model of `config` in `dtype`; the other arguments are those of `plan.make_plan`.

    Args:
        mesh: the devices that share the KV heads; None: one device.

    Raises:
        InputError: the policies do not fit each other, the model, the platform or the mesh.
    """
    config = share(config, mesh)
    several = batch_size > 1 or joins
    renewal = _renewal(config, prompt_tokens, new_tokens, several=several)
    # A session may be opened on another mesh, so its sizes do not depend on how many heads a device has.
    heads = None if extends else config.num_key_value_heads
    spec = _spec(config, dtype, batch_size, max(prompt_tokens, renewal), new_tokens, heads=heads)
    policies = layer_policies(policy, config, capacity=spec.capacity)
    policies = tuple(layer_policy.for_platform(platform, latent=spec.latent) for layer_policy in policies)
    spec = _with_pages(spec, policies, new_tokens, extends=extends, joins=batch_size > 1 and (joins or renewal > 0))
    _check(policies, spec, policy, config, platform)
    if mesh is not None:
        for layer_policy in policies:
            if not layer_policy.by_head:
                check_one_device(mesh, f"the cache {display_name(layer_policy)}")
            # Each device would keep other tokens, by its own query heads, or have arrays of these heads.
            differs = layer_policy.evicts and layer_policy.by_queries or layer_policy.per_query_head
            if differs and holders(mesh, latent=spec.latent) > 1:
                if spec.latent:
                    check_one_device(mesh, f"with latent attention the cache {display_name(layer_policy)}")
                raise InputError(
                    f"the cache {display_name(layer_policy)} keeps a KV head on one device: leave tokens out of {mesh}"
                )
    return Layout(policies, spec, platform, _other_heads(config), renewal, mesh)


def _spec(
    config: ModelConfig, dtype: str, batch_size: int, prompt_tokens: int, new_tokens: int, *, heads: int | None
) -> CacheSpec:
    """Returns the sizes of a cache before they are rounded to pages."""
    prompt = bucket(prompt_tokens)
    return CacheSpec(
        batch_size=batch_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        value_dim=config.value_dim,
        latent=config.latent is not None,
        prompt_capacity=prompt,
        new_capacity=room_for(new_tokens, prompt=prompt, heads=heads),
        dtype=dtype,
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
        sizes = dict(prompt=spec.prompt_capacity, heads=None if extends else spec.num_kv_heads)
        room = room_for(new_tokens + pools[0].page_size, **sizes)
        if room >= every > 0:  # as many tokens are packed again
            room = room_for(new_tokens + every + pools[0].page_size, **sizes)
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
