"""The decode step: runs all layers, and chooses the next token of every row of a batch.

The decode loop calls `DecodePrograms.step`. Through the layers goes the newest token of each row, [B, 1, D]; out come tokens
i32[B], counters i32[8, B] and logits f32[B, V].

On a CPU the layers are a program each, with one more before the first layer and one after the last, so that each kind of
layer is compiled once. On other platforms, and in a model of few layers, they are one program, of which XLA:GPU makes one CUDA
graph. The choice of tokens is a program of its own: only this small one is compiled for each kind of sampling options.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from icejax.cache.pool import host_pool
from icejax.cache.pool.host_pool import Pool
from icejax.cache.protocol import CachePolicy
from icejax.engine.decode.between_steps import between_steps
from icejax.engine.decode.choice import chosen
from icejax.engine.decode.counters import MILLION, pack
from icejax.engine.decode.layer import LayerCounts, LayerInputs, LayerProgram, by_layer_options, layer_program, own_mesh
from icejax.engine.decode.state import DecodeState, Step, decode_cuts
from icejax.engine.plan import Plan
from icejax.models.decoder import CausalLM
from icejax.models.parts.vocabulary import Ends
from icejax.models.sharding import module_cuts
from icejax.runtime import compiler_options
from icejax.runtime.mesh import WHOLE, Mesh, on_mesh, placed, total


class DecodePrograms:
    """The decode programs of one model and plan.

    Attributes:
        model, plan: the model and the plan.
        programs: the programs of a step and the model's weights.
        clock: steps run with these programs; equal to `lengths.clock` of the state.
    """

    def __init__(self, model: CausalLM, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self._between = between_steps(plan)
        self.clock = 0
        self.take_weights()

    def take_weights(self) -> None:
        """Takes the model's weights as they are now: a prefill moves experts from the host to the device."""
        self.programs = (StepParts if self.plan.by_layers else WholeStep).of(self.model, self.plan)

    def step(self, state: DecodeState, pool: Pool | None) -> tuple[DecodeState, Step, Pool | None]:
        """Puts `last_tokens` into the cache and chooses the next tokens; returns the state, the step's results and the pool.

        Donates `state`, and also `pool` after steps that flush a window page to it.
        """
        flush, flushed, _ = self._between
        options = dict(sampling=state.sampling, penalties=state.penalties)
        state, results = self.programs.run(dataclasses.replace(state, **dict.fromkeys(options)), pool)
        state, results = chosen(dataclasses.replace(state, **options), results, self.plan)
        self.clock += 1
        if self.plan.page_size and self.clock % self.plan.page_size == 0:
            pages, updates, first = flush(state.cache)
            pool = host_pool.write_pages(pool, pages, state.cache.table, first, mesh=self.plan.mesh)
            state = dataclasses.replace(state, cache=flushed(state.cache, updates))
        if self.plan.compact_every and self.clock % self.plan.compact_every == 0:
            state, pool = self.compacted(state, pool)
        return state, results, pool

    def compacted(self, state: DecodeState, pool: Pool) -> tuple[DecodeState, Pool]:
        """Packs the newest pages of the rows again; donates the state and the pool."""
        cache, pages, first = self._between[2](state.cache, pool)
        pool = host_pool.write_pages(pool, pages, cache.table, first, mesh=self.plan.mesh)
        return dataclasses.replace(state, cache=cache), pool


class StepLayer(NamedTuple):
    """A layer of a step.

    Attributes:
        leaves: the layer's weights, flat, because walking a module takes longer than a layer.
        number: the layer's index in the pool; None without pages.
    """

    program: LayerProgram
    leaves: list[jax.Array]
    policy: CachePolicy
    number: jax.Array | None


class StepParts(NamedTuple):
    """A step before its choice, as a program per layer, one before the first layer and one after the last.

    Attributes:
        ends: the weights of `CausalLM.ends`.
        begin: program from `ends` and tokens to the first layer's input.
        finish: program from `ends`, the last layer's output, the state without layers and the layers' counts to the new state
            without layers, and the step's results before the choice.
    """

    layers: list[StepLayer]
    ends: list[jax.Array]
    begin: Callable
    finish: Callable

    @classmethod
    def of(cls, model: CausalLM, plan: Plan) -> StepParts:
        """Returns the parts of a model's step; layers of one kind have one program."""
        layers = []
        for i, (layer, policy) in enumerate(zip(model.model.layers, plan.policies, strict=True)):
            leaves, tree = jax.tree.flatten(layer)
            number = jnp.asarray(np.int32(plan.pooled.index(i))) if i in plan.pooled else None
            number = number if own_mesh(plan) is None else placed(plan.mesh, number)  # else every step would copy it
            layers.append(StepLayer(layer_program(tree, policy, plan.spec_of(i), plan), leaves, policy, number))
        ends, tree = jax.tree.flatten(model.ends)
        return cls(layers, ends, *end_programs(tree, plan))

    def run(self, state: DecodeState, pool: Pool | None) -> tuple[DecodeState, Step]:
        """Returns the state after a step, and its results with the last tokens in place of the next. Donates `state`."""
        cache, x = state.cache, self.begin(self.ends, state.last_tokens)
        before, shared, states, counts = None, None, [], []
        for layer, layer_state in zip(self.layers, cache.layers, strict=True):
            # Inputs that a layer does not read are None, so that layers of one kind have inputs of one structure.
            guessed_from, followed = before if layer.policy.prefetch else None, shared if layer.policy.follows else None
            pages = (None, None) if layer.number is None else (pool, cache.table)
            inputs = LayerInputs(x, guessed_from, followed, cache.lengths, state.done, *pages, layer.number)
            layer_state, results = layer.program(layer.leaves, layer_state, inputs)
            before, x, shared = x, results.x, results.shared or shared
            states.append(layer_state)
            counts.append(results.counts)
        rest = dataclasses.replace(state, cache=dataclasses.replace(cache, layers=()))
        rest, results = self.finish(self.ends, x, rest, counts)
        return dataclasses.replace(rest, cache=dataclasses.replace(rest.cache, layers=tuple(states))), results


@functools.lru_cache(maxsize=16)
def end_programs(tree: jax.tree_util.PyTreeDef, plan: Plan) -> tuple[Callable, Callable]:
    """Returns the programs `begin` and `finish` of `StepParts`; `tree` is the structure of `CausalLM.ends`."""

    def on_ends(run: Callable, leaves: list[jax.Array], *arrays: Any) -> Any:
        ends = jax.tree.unflatten(tree, leaves)
        return on_mesh(own_mesh(plan), run, (ends, *arrays), (module_cuts(ends), *(WHOLE,) * len(arrays)), WHOLE)

    @functools.partial(jax.jit, compiler_options=by_layer_options(plan))
    def begin(ends: list[jax.Array], tokens: jax.Array) -> jax.Array:
        return on_ends(lambda ends, tokens: ends.embed_tokens(tokens[:, None]), ends, tokens)

    @functools.partial(jax.jit, donate_argnums=2, keep_unused=True, compiler_options=by_layer_options(plan))
    def finish(ends: list[jax.Array], x: jax.Array, state: DecodeState, counts: list[LayerCounts]) -> tuple[DecodeState, Step]:
        return on_ends(after_layers, ends, x, state, counts)

    def after_layers(ends: Ends, x: jax.Array, state: DecodeState, counts: list[LayerCounts]) -> tuple[DecodeState, Step]:
        logits, lengths = ends.logits(x)[:, 0], state.cache.lengths
        cache = dataclasses.replace(state.cache, lengths=dataclasses.replace(lengths, clock=lengths.clock + 1))
        batch = len(state.last_tokens)
        pages = _sum([x.pages for x in counts if x.pages is not None], (3, batch), plan.mesh)
        experts = sum((x.experts for x in counts if x.experts is not None), jnp.zeros((2, batch), jnp.int32))
        estimates = _mean_estimates([x.estimates for x in counts if x.estimates is not None], batch)
        return dataclasses.replace(state, cache=cache), Step(pack(state.last_tokens, pages, experts, estimates), logits)

    return begin, finish


def _sum(counts: list[jax.Array], shape: tuple[int, int], mesh: Mesh | None) -> Int[Array, "n B"]:
    """Returns the sum of counts over layers and devices, whose KV heads count for themselves; 0 without counts."""
    return total(mesh, sum(counts)) if counts else jnp.zeros(shape, jnp.int32)


def _mean_estimates(estimates: list[jax.Array], batch: int) -> Int[Array, "2 B"]:
    """Returns the estimated error in millionths, and tokens attended exactly, means over layers; 0 without estimates."""
    if not estimates:
        return jnp.zeros((2, batch), jnp.int32)
    scale = jnp.asarray([MILLION, 1.0])[:, None]
    return jnp.clip(jnp.round(sum(estimates) / len(estimates) * scale), 0, 1e9).astype(jnp.int32)


class WholeStep(NamedTuple):
    """A step before its choice, as one program, of which XLA:GPU makes one CUDA graph.

    Attributes:
        leaves: the model's weights, flat.
    """

    program: Callable
    leaves: list[jax.Array]

    @classmethod
    def of(cls, model: CausalLM, plan: Plan) -> WholeStep:
        """Returns the program of a model's step."""
        graph, state = nnx.split(model)
        leaves, tree = jax.tree.flatten(state)
        return cls(step_program(graph, tree, plan), leaves)

    def run(self, state: DecodeState, pool: Pool | None) -> tuple[DecodeState, Step]:
        """Returns the state after a step, and its results with the last tokens in place of the next. Donates `state`."""
        return self.program(self.leaves, state, pool)


@functools.lru_cache(maxsize=16)
def step_program(graph: nnx.GraphDef, tree: jax.tree_util.PyTreeDef, plan: Plan) -> Callable:
    """Returns the program of a whole step, from weights, state and pool; each kind of layer is traced once."""

    # Unused arguments stay arguments: without them buffers move at every step, and a CUDA graph is updated kernel by kernel.
    @functools.partial(
        jax.jit, donate_argnums=1, keep_unused=True, compiler_options=compiler_options.OPTIONS.get(plan.platform)
    )
    def step(leaves: list[jax.Array], state: DecodeState, pool: Pool | None) -> tuple[DecodeState, Step]:
        def run(weights: Any, state: DecodeState, pool: Pool | None) -> tuple[DecodeState, Step]:
            return StepParts.of(nnx.merge(graph, weights), plan).run(state, pool)

        weights, cuts = jax.tree.unflatten(tree, leaves), decode_cuts(plan)
        arrays = weights, state, pool
        return on_mesh(plan.mesh, run, arrays, (module_cuts(weights), cuts, host_pool.BY_HEAD), (cuts, WHOLE))

    return step
