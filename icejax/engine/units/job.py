"""A prefill of one row that runs unit by unit: ``while not job.done: pool = job.advance(pool)``, with steps in between.

The engine makes a job for a prompt that joins a running batch. The units of a layer are the keys and values of its tokens, then
blocks of queries, then the cache policy's state, then the write of its pages to the pool. So all keys of a layer are packed
together, as in `prefill`, and the pool may be read and written by other rows between two units.

Example: a prompt of 8,192 tokens of Qwen2.5-Coder-0.5B with the clustered cache on a CPU has 68 units a layer: 1 of keys and
values, 64 of 128 queries, 2 of KV heads, and 1 write.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from icejax.cache.pool.host_pool import Pool
from icejax.cache.protocol import Outcome, Shared
from icejax.cache.sizes import CacheSpec
from icejax.engine.decode.attention_map import positions_in
from icejax.engine.decode.state import DecodeState, Step
from icejax.engine.layers import embed
from icejax.engine.plan import Plan
from icejax.engine.prefill import first_state, lengths_of, padded_prompts, write_layer
from icejax.engine.sampling import Sampling
from icejax.engine.units import programs
from icejax.engine.units.sizes import UnitSizes, unit_sizes
from icejax.models.decoder import CausalLM
from icejax.ops.experts.offloaded_experts import with_experts_on_device
from icejax.ops.quantized.products import with_dense_matrices

LOG = logging.getLogger(__name__)


class PrefillJob:
    """A prefill of one row, in units.

    Attributes:
        done: whether all units have run.
        layers_done: number of layers whose units have all run.
        positions: layer -> i32[K, P, p], the prompt positions of the tokens in its pages; empty unless `locate`.
    """

    def __init__(
        self,
        model: CausalLM,
        prompt: Sequence[int],
        plan: Plan,
        table: Int[np.ndarray, "1 X"] | Int[Array, "1 X"] | None,
        *,
        sampling: Sampling,
        draw: tuple[int, int],
        sizes: UnitSizes | None = None,
        locate: bool = False,
    ) -> None:
        """Prepares the units; nothing runs yet.

        Args:
            prompt: token ids.
            plan: the plan of a batch of one row.
            table: the row's extents in the pool; None without a pool.
            sampling: the row's sampling options.
            draw: seed and index of the row's random key.
            sizes: sizes of the units of every layer, which divide the padded length; None: by the layer's work.
            locate: whether to make `positions`, which packs each layer a second time.
        """
        self._model, self._prompt, self._plan, self._sizes = model, prompt, plan, sizes
        self._table = None if table is None else jnp.array(table)  # a copy, which `first_state` donates
        self._sampling, self._draw = sampling, draw
        self._padded, self._lengths = padded_prompts([prompt], plan.spec), lengths_of([prompt])
        self._locate, self.positions = locate, dict[int, np.ndarray]()
        self._states: list[Any] = []
        self._x = self._pool = None
        self.done, self.layers_done = False, 0
        self._units = self._run()
        next(self._units)  # stops before the first unit

    def advance(self, pool: Pool | None) -> Pool | None:
        """Runs the next unit to its end and returns the pool, which a unit that writes pages donates."""
        self._pool = pool
        results = next(self._units, None)
        self.done = results is None
        pool, self._pool = self._pool, None
        jax.block_until_ready((results, self._x, pool))  # what still runs would delay the next step
        return pool

    @property
    def hidden(self) -> Float[Array, "1 T D"]:
        """The last layer's output over the padded prompt, on a mesh cut as by `layers.embed`; there after the last unit."""
        return self._x

    def result(self) -> tuple[DecodeState, Step]:
        """Returns the state to decode from and the first step, as `prefill` does; called after the last unit."""
        options = dict(sampling=(self._sampling,), draws=[self._draw])
        states = tuple(self._states)
        return first_state(self._model, [self._prompt], self._plan, self._x, states, self._table, **options)

    def _run(self) -> Iterator[Any]:
        """Runs the units: a `yield` comes before every unit and gives the results of the one before."""
        model, plan, lengths = self._model, self._plan, self._lengths
        results, x, shared = (), None, None
        for number, layer in enumerate(model.model.layers):
            spec = plan.spec_of(number)
            sizes = self._sizes or unit_sizes(model.config, layer.config, spec, self._padded.shape[1], plan.platform)
            for first in range(0, len(self._prompt), sizes.tokens):
                yield results
                if first == 0:
                    LOG.debug("layer %d: units of %d tokens and %d queries", number, sizes.tokens, sizes.queries)
                    x = embed(model, jnp.asarray(self._padded)) if x is None else x
                    loaded = with_experts_on_device(layer)
                    if sizes.queries < self._padded.shape[1] and plan.mesh is None:
                        loaded = with_dense_matrices(loaded)  # several units multiply by its matrices
                    keys, queries = programs.empty_buffers(loaded, x)
                results = keys = programs.write_keys(loaded, x, keys, lengths, np.int32(first), count=sizes.tokens)
            for first in range(0, len(self._prompt), sizes.queries):
                yield results
                results = x, queries = programs.run_block(
                    loaded, x, queries, keys, lengths, np.int32(first), count=sizes.queries
                )
            if layer.offloaded is not None:
                layer.experts.update_resident(loaded.experts, queries.uses)
            results = outcome = yield from self._pack(number, (loaded, keys, queries), shared, results, spec)
            if self._locate and number in plan.pooled:
                # Positions need a value plane (no `latent`) in fp32, as 16 bits cannot hold them.
                spec = replace(spec, latent=False, dtype="float32")
                located = (loaded, *programs.with_positions(keys, queries))
                results = located = yield from self._pack(number, located, shared, results, spec)
                self.positions[number] = positions_in(located)
                del located
            del keys, queries, loaded
            if outcome.pages is not None:
                yield results
                results = ()
                layer_number = plan.pooled.index(number)
                self._pool = write_layer(self._pool, outcome.pages, self._table, layer_number, mesh=plan.mesh)
            self._states.append(outcome.state)
            shared = outcome.shared or shared
            del outcome
            self.layers_done = number + 1
        self._x = x

    def _pack(
        self, number: int, layer_arrays: tuple, shared: Shared | None, results: Any, spec: CacheSpec
    ) -> Generator[Any, None, Outcome]:
        """Runs the units that build the cache of a layer: one for each KV head where the policy allows it, else one.

        Args:
            results: those of the unit before.
        """
        layer, keys, queries = layer_arrays
        policy = self._plan.policies[number]
        arrays, sizes = (layer, keys, queries, self._lengths, shared), dict(policy=policy, spec=spec)
        if not policy.packs_by_head or spec.num_kv_heads == 1:
            yield results
            return programs.pack(*arrays, **sizes)
        outcome = None
        for head in range(spec.num_kv_heads):
            yield results if outcome is None else outcome
            if outcome is None:
                outcome = programs.empty_outcome(*arrays, **sizes)
            outcome = programs.pack_head(outcome, *arrays, np.int32(head), **sizes)
        return outcome
