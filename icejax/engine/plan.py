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
from dataclasses import dataclass

import jax
import numpy as np

from icejax.cache.pool.extents import extents_for, row_extents
from icejax.cache.pool.host_pool import EXTENT, Pool, PoolLayer
from icejax.cache.pool.page_format import page_rows
from icejax.cache.protocol import CachePolicy, KVCache, Report
from icejax.cache.registry import display_name, warn_unused
from icejax.cache.shares import state_cuts
from icejax.cache.sizes import pages_leaving
from icejax.checks.errors import InputError
from icejax.checks.numbers import LARGEST
from icejax.engine.buckets import bucket, text_bucket
from icejax.engine.layout import Layout, make_layout
from icejax.models.decoder import CausalLM
from icejax.runtime import devices, processes
from icejax.runtime.host_reads.choose import ORDER, fetch_backend
from icejax.runtime.mesh import WHOLE, size

LOG = logging.getLogger(__name__)
# Layers from which on a step on a CPU is a program per layer: starting a program takes some 20 us, which layers of a small
# model do not outweigh, and the programs of few layers compile in seconds as one.
LEAST_LAYERS = 8


@dataclass(frozen=True)
class Plan(Layout):
    """The static part of a generation.

    Attributes:
        eos_token_ids: tokens that end a text.
        fetch_backend: how the pool is read, a key of `host_reads.backends.BACKENDS`; empty without pages in host memory.
    """

    eos_token_ids: tuple[int, ...]
    fetch_backend: str

    @property
    def by_layers(self) -> bool:
        """Whether each layer of a step is a program of its own, so that each kind of layer is compiled once."""
        return self.platform == "cpu" and len(self.policies) >= LEAST_LAYERS

    @property
    def smaller_sizes(self) -> tuple[int, ...]:
        """Numbers of places, below all of them, that a step may compute: powers of two, on a CPU.

        Elsewhere a step reads the weights, however few its rows, and each size would compile all layers again.
        """
        doublings = (self.spec.batch_size - 1).bit_length() if self.platform == "cpu" and self.mesh is None else 0
        return tuple(1 << doubling for doubling in range(doublings))

    @functools.cached_property
    def cuts(self) -> KVCache:
        """How the arrays of the cache are cut for the mesh."""
        layers = (state_cuts(policy, self.spec_of(i), self.mesh) for i, policy in enumerate(self.policies))
        return KVCache(tuple(layers), WHOLE, WHOLE)

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
        """Number of decoded tokens after which their pages are packed again; 0: never, also if fewer tokens have room."""
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
        """Returns what `allocation.allocate` takes: the whole pool's shape and dtype, and the bytes of a page's codes."""
        *before, heads, planes, rows, width = self.pool_shape(extents)
        return (*before, heads * size(self.mesh), planes, rows, width), self.pool_dtype, self.pool.codes

    @property
    def pool_dtype(self) -> str:
        """Name of the dtype of the pool's pages; without a pool, of keys and values."""
        return self.pool.dtype if self.pool else self.spec.dtype

    def extents(self, tokens: int) -> np.ndarray:
        """Returns which extents a row with a prompt of `tokens` tokens needs, bool[X], all growth pages included.

        If rows are prefilled again, a shorter prompt's row has room for that.

        Example: extents have 64 pages, and a row has 96 prompt pages and 32 growth pages. A prompt padded to 32 pages needs
        two extents: the first for pages 0-31, the second for growth pages 96-127.
        """
        pages = self.pool.pages
        # The prompt is padded to few sizes, because programs are compiled for the size of the pool.
        prompt_pages = bucket(max(tokens, self.renewal)) // self.page_size
        return row_extents(prompt_pages, range(self.prompt_pages, pages), most=extents_for(pages))

    def pool_shape(self, extents: int) -> tuple[int, ...]:
        """Returns the shape [E, L, 64, K, planes, rows, W] of a device's pool; W is the width of the widest plane.

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
    tokens = dict(prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    options = dict(batch_size=batch_size, extends=extends, joins=joins, platform=platform or devices.platform())
    layout = make_layout(model.config, model.dtype, policy, **tokens, **options, mesh=model.mesh)
    warn_unused(policy, layout.policies)
    sizes = (batch_size, prompt_tokens, layout.spec.prompt_capacity, layout.spec.new_capacity)
    LOG.info("%d rows of at most %d tokens, padded to %d, and room for %d new ones", *sizes)
    LOG.info("layers: %s", _by_layer(layout.policies))
    in_host = layout.pool is not None and layout.pool.planes > 0
    backend = (fetch_backend() if platform is None else ORDER[platform][0]) if in_host else ""
    if model.mesh is not None and platform is None:
        processes.check_alike("the fetch backends", backend)  # each process has tried them alone
    fields = {field.name: getattr(layout, field.name) for field in dataclasses.fields(Layout)}
    return Plan(**fields, eos_token_ids=model.config.eos_token_ids, fetch_backend=backend)


def _by_layer(policies: tuple[CachePolicy, ...]) -> str:
    """Returns one line that names each layer's cache, such as `0-1 full, 2-27 clustered`."""
    parts = []
    for policy, layers in itertools.groupby(range(len(policies)), key=policies.__getitem__):
        numbers = list(layers)
        interval = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
        parts.append(f"{interval} {display_name(policy)}")
    return ", ".join(parts)
