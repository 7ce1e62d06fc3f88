"""One layer of a decode step, as a program that is traced once for all layers of its kind; `step` calls it.

On a CPU the programs run one after another, so that each is also compiled once. On other platforms, and in a model of few
layers, they are parts of one program, which XLA compiles whole. Through a layer goes the newest token of each row, [B, 1, D].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from icejax.cache.pool.host_pool import BY_HEAD, PoolLayer
from icejax.cache.pool.page_format import NoPages, PagesWithCodes
from icejax.cache.protocol import CachePolicy, Heads, Lengths, Shared, View
from icejax.cache.shares import state_cuts
from icejax.cache.sizes import CacheSpec
from icejax.engine.plan import Plan
from icejax.models.decoder import DecoderLayer
from icejax.models.sharding import module_cuts
from icejax.ops.experts.offloaded_experts import with_live_tokens
from icejax.runtime import compiler_options
from icejax.runtime.mesh import WHOLE, Mesh, on_mesh


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerInputs:
    """The inputs of a layer of a step, besides its weights and its cache.

    Attributes:
        x: the layer's input.
        before: the input of the layer before; None in the first layer, and for a policy that guesses no queries from it.
        shared: what earlier layers pass on; None for a policy that follows none.
        lengths: token counts before the step.
        done: rows that have ended.
        pool, table: the pool, and each row's extents in it; None in a layer without pages.
        number: the layer's index in the pool.
    """

    x: jax.Array  # dtype[B, 1, D]
    before: jax.Array | None  # dtype[B, 1, D]
    shared: Shared | None
    lengths: Lengths
    done: jax.Array  # bool[B]
    pool: jax.Array | PagesWithCodes | NoPages | None
    table: jax.Array | None  # i32[B, X]
    number: jax.Array | None  # i32[]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCounts:
    """The counters of a layer of a step.

    Attributes:
        pages, estimates: fields of the policy's `Report` on the step; None in a layer without pages.
        experts: experts that live rows take, and experts fetched from the host for them; None: no experts are there.
    """

    pages: jax.Array | None  # i32[3, B]
    estimates: jax.Array | None  # f32[2, B]
    experts: jax.Array | None  # i32[2, B]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerResults:
    """The results of a layer of a step, besides its state.

    Attributes:
        x: the layer's output.
        shared: what later layers follow; None where no layer follows another.
        counts: the layer's counters.
    """

    x: jax.Array  # dtype[B, 1, D]
    shared: Shared | None
    counts: LayerCounts


INPUTS = LayerInputs(WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, pool=BY_HEAD, table=WHOLE, number=WHOLE)  # how they are cut for a mesh
LayerProgram = Callable[[list[jax.Array], Any, LayerInputs], tuple[Any, LayerResults]]


def view_of(
    layer: DecoderLayer, lengths: Lengths, seen: Int[Array, " B"], pages: PoolLayer | None, shared: Shared | None, guess=None
) -> View:
    """Returns the view that a layer's policy gets.

    Args:
        lengths: token counts before the new tokens.
        seen: tokens of each row, the new ones included.
        pages: the layer's pages in the pool; None for a layer without pages.
        shared: what earlier layers pass on.
        guess: returns this layer's queries as projected from the previous layer's input; None: no guess.
    """
    return View(lengths, pages, shared, guess, lambda heads, by: layer.rerotate(heads, by, seen), layer.project)


def by_layer_options(plan: Plan) -> dict[str, str | bool] | None:
    """Returns the compiler options of a layer's program; None where it is a part of the step's program, which has them."""
    return compiler_options.OPTIONS.get(plan.platform) if plan.by_layers else None


def own_mesh(plan: Plan) -> Mesh | None:
    """Returns the mesh over which a part of a step runs as a program of its own; None: the step's program runs over it."""
    return plan.mesh if plan.by_layers else None


@functools.lru_cache(maxsize=64)
def layer_program(tree: jax.tree_util.PyTreeDef, policy: CachePolicy, spec: CacheSpec, plan: Plan) -> LayerProgram:
    """Returns the program of the layers whose weights form `tree` and whose cache follows `policy` with the sizes of `spec`.

    It takes a layer's weights flat, because walking a module takes longer than a layer, its cache, which it donates, and the
    other inputs; it returns the new cache and the results.
    """

    def run(module: DecoderLayer, cache: Any, inputs: LayerInputs) -> tuple[Any, LayerResults]:
        lengths, x = inputs.lengths, inputs.x
        # A single row always counts as live: a session continues after its end, whose eos token still enters the cache.
        ended = inputs.done if len(inputs.done) > 1 else None
        live = jnp.ones_like(inputs.done) if ended is None else ~ended
        module = with_live_tokens(module, live)
        pages = None
        if inputs.pool is not None:
            pages = PoolLayer(inputs.pool, inputs.table, ended, inputs.number, plan.fetch_backend, plan.spec.dtype)
        positions = lengths.seen[:, None], lengths.seen + 1
        guess = None if inputs.before is None else lambda: module.enter(inputs.before, *positions).q
        heads = Heads(*module.enter(x, *positions)[:3], jnp.ones_like(lengths.origin), module.scoring)
        outcome = policy.decode(cache, heads, view_of(module, lengths, positions[1], pages, inputs.shared, guess))
        x, expert_ids = module.leave(x, outcome.attended)
        counts = LayerCounts(None, None, _expert_counts(module, expert_ids, live))
        if pages is not None:
            report = policy.report(outcome.state, replace(lengths, clock=lengths.clock + 1))
            counts = replace(counts, pages=report.pages, estimates=report.estimates)
        shared = outcome.shared if any(other.follows for other in plan.policies) else None
        return outcome.state, LayerResults(x, shared, counts)

    def layer(leaves: list[jax.Array], cache: Any, inputs: LayerInputs) -> tuple[Any, LayerResults]:
        module, mesh = jax.tree.unflatten(tree, leaves), own_mesh(plan)
        cuts = state_cuts(policy, spec, mesh)
        return on_mesh(mesh, run, (module, cache, inputs), (module_cuts(module), cuts, INPUTS), (cuts, WHOLE))

    layer.__name__ = f"{type(policy).__name__.lower()}_layer"  # profiles tell the kinds apart by it
    return jax.jit(layer, donate_argnums=1, keep_unused=True, compiler_options=by_layer_options(plan))


def _expert_counts(layer: DecoderLayer, expert_ids: jax.Array | None, live: jax.Array) -> Int[Array, "2 B"] | None:
    """Returns the number of experts that live rows take, and the number fetched from the host for them; None without.

    Args:
        expert_ids: i32[B, 1, k], the experts of each row's token.
    """
    if layer.offloaded is None:
        return None
    missing = layer.offloaded.missing(expert_ids[:, 0]).sum(1, dtype=jnp.int32)
    return jnp.stack([jnp.where(live, expert_ids.shape[-1], 0), missing])
