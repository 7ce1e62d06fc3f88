"""Compiles a program for an accelerator not in this machine: ``python -m tests.aot.aot h100 step gather 1 int8``.

Prints a JSON line of byte counts and pool copies, which `test_aot` checks. Arguments: target, program, and optionally fetch
backend, batch size, and `int8` for int8 pages, `look` for pages with codes or `mesh` for eight devices, whose figures are those
of one. Programs: `step`, `flush`, `flushed` and `compact`; `prefill`, `extend` and `write` of one layer; `insert` of a row into
a batch; `write-pages`, 64 pages of all layers; `write-extent` and `read-extent`; of a prefill in units `unit-keys`, `unit-block`
and `unit-head`. For `mesh` arguments are cut of `step`, `write` and the units alone.

Needs the compilers: ``pip install -e '.[aot]'``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys

import jax
import numpy as np
from flax import nnx

import icejax
from bench.program import hlo
from bench.program.compile import abstract_model, abstract_pool, abstract_state, compile_for, placed, shares, without_devices
from bench.program.targets import TARGETS, Target
from bench.steps.sizes import nbytes
from icejax.cache.pool import host_pool
from icejax.cache.pool.page_format import BYTES, PagesWithCodes, without_codes
from icejax.engine import batch as rows
from icejax.engine import extend as extending
from icejax.engine import prefill as prefilling
from icejax.engine.decode.between_steps import between_steps
from icejax.engine.decode.step import step_program
from icejax.engine.plan import make_plan
from icejax.engine.units import programs as units
from icejax.runtime import compiler_options
from icejax.runtime.mesh import WHOLE, Mesh, size, stream_cut, stream_parts

CONTEXT = 32768
DEVICES = 8  # of a mesh


def programs(batch: int, kind: str | None, backend: str | None, target: Target):
    """Returns plan, indexes and pool of two bf16 layers (8 KV heads of 128), and each program with its arguments by name."""
    mesh = Mesh(DEVICES) if kind == "mesh" else None
    model = abstract_model("attention", dtype="bfloat16", layers=2, mesh=mesh)
    graph, weights = nnx.split(model)
    leaves, tree = jax.tree.flatten(weights)
    policy = icejax.Clustered(budget=256, **{None: {}, "mesh": {}, "int8": dict(page_dtype="int8"), "look": dict(look=4)}[kind])
    sizes = dict(batch_size=batch, prompt_tokens=CONTEXT, new_tokens=64)
    plan = make_plan(model, policy, platform=target.platform, **sizes)
    plan = dataclasses.replace(plan, fetch_backend=backend or plan.fetch_backend)
    state, pool = abstract_state(plan), abstract_pool(plan)
    step, (flush, flushed, compact) = step_program(graph, tree, plan), between_steps(plan)
    page = (batch, *without_codes(pool).shape[3:5], plan.page_size, without_codes(pool).shape[-1])
    layer, extent_pages = (
        placed(new_pages((*shape, *page), plan.pool.codes), host_pool.BY_HEAD, mesh) for shape in ((CONTEXT // 16, 1), (64, 2))
    )
    scalar, table = jax.ShapeDtypeStruct((), "int32"), state.cache.table
    write = jax.jit(functools.partial(host_pool.write_pages, together=host_pool.EXTENT, mesh=mesh), donate_argnums=0)
    extent = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), pool)
    single_row = dataclasses.replace(plan, spec=dataclasses.replace(plan.spec, batch_size=1))
    insert = jax.jit(functools.partial(rows._insert.__wrapped__, plan=plan), donate_argnums=0)
    policy, view = plan.policies[0], host_pool.PoolLayer(pool, table, None, np.int32(0), plan.fetch_backend, "bfloat16")
    prefill = jax.jit(functools.partial(prefilling._prefill_layer, policy=policy, spec=plan.spec))
    extend = jax.jit(functools.partial(extending._extend_layer, policy=policy, spec=plan.spec))
    x, extended_x = (jax.ShapeDtypeStruct((batch, tokens, model.config.hidden_size), "bfloat16") for tokens in (CONTEXT, 1024))
    first_layer, lengths = model.model.layers[0], state.cache.lengths
    return (plan, [x.index for x in state.cache.layers], pool), {
        "step": (
            step,
            ([jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)) for x in leaves], state, pool),
        ),
        "prefill": (prefill, (first_layer, x, lengths.origin, None)),
        "extend": (extend, (first_layer, extended_x, lengths, lengths.origin, state.cache.layers[0], view, None)),
        "write": (write, (pool, layer, table, scalar, scalar)),
        "flush": (flush, (state.cache,)),
        "flushed": (flushed, (state.cache, jax.eval_shape(flush, state.cache)[1])),
        "compact": (compact, (state.cache, pool)),
        "insert": (insert, (state, abstract_state(single_row), scalar)),
        "write-pages": (host_pool.write_pages, (pool, extent_pages, table, scalar)),
        "write-extent": (host_pool.write_extent, (pool, extent, scalar)),
        "read-extent": (host_pool.read_extent, (pool, scalar)),
        **unit_programs(first_layer, plan, hidden=model.config.hidden_size),
    }


def new_pages(shape: tuple[int, ...], codes: int):
    """Returns new pages [M, l, B, K, planes, p, W] for a pool, with `codes` bytes of codes each if there are any."""
    pages = jax.ShapeDtypeStruct(shape, "bfloat16")
    return PagesWithCodes(pages, jax.ShapeDtypeStruct((*shape[:4], 1, 1, codes), BYTES)) if codes else pages


def unit_programs(layer, plan, *, hidden: int):
    """Returns the programs of the units of a layer, with 1,024 tokens or one KV head each, and their arguments by name."""
    parts = stream_parts(plan.mesh)
    x = placed(jax.ShapeDtypeStruct((1, CONTEXT // parts, parts * hidden), "bfloat16"), stream_cut(plan.mesh), plan.mesh)
    lengths = placed(jax.ShapeDtypeStruct((1,), "int32"), WHOLE, plan.mesh)
    buffers = jax.eval_shape(units.empty_buffers, layer, x)
    keys, queries = placed(buffers, (units.KEYS, units.QUERIES), plan.mesh)
    sizes = dict(policy=plan.policies[0], spec=dataclasses.replace(plan.spec, batch_size=1))
    cached, first = (layer, keys, queries, lengths, None), jax.ShapeDtypeStruct((), "int32")
    outcome = jax.eval_shape(functools.partial(units.empty_outcome, **sizes), *cached)
    outcome = placed(outcome, units._outcome_cuts(*sizes.values(), plan.mesh), plan.mesh)

    def program(unit, *donated: int, **static):
        return jax.jit(functools.partial(unit.__wrapped__, **static), donate_argnums=donated)

    return {
        "unit-keys": (program(units.write_keys, 2, count=1024), (layer, x, keys, lengths, first)),
        "unit-block": (program(units.run_block, 1, 2, count=1024), (layer, x, queries, keys, lengths, first)),
        "unit-head": (program(units.pack_head, 0, **sizes), (outcome, *cached, first)),
    }


def main(name: str, program: str, backend: str = "", batch: str = "1", kind: str | None = None) -> None:
    without_devices(DEVICES if kind == "mesh" else 1)
    target = TARGETS[name]
    (plan, levels, pool), programs_by_name = programs(int(batch), kind, backend, target)
    options = compiler_options.OPTIONS.get(target.platform, {}) if program == "step" else {}
    compiled = compile_for(target, *programs_by_name[program], options, size(plan.mesh))
    module, memory, pool, levels = hlo.parse(compiled.hlo), compiled.memory, shares(pool), shares(levels)
    print(
        json.dumps(
            dict(
                pool_bytes=nbytes(pool),
                host_temp_bytes=memory.host_temp_size_in_bytes,
                temp_bytes=memory.temp_size_in_bytes,
                levels_bytes=nbytes(levels),
                output_bytes=memory.output_size_in_bytes,
                alias_bytes=memory.host_alias_size_in_bytes + memory.alias_size_in_bytes,
                pool_copies=[
                    name for x in jax.tree.leaves(pool) for name in hlo.pool_copies(module, x.shape, x.dtype.itemsize)
                ],
                collectives=[
                    dict(
                        opcode=opcode,
                        elements=sum(array.elements for array in x.arrays),
                        scope=x.attribute(r'op_name="([^"]*)"'),
                    )
                    for opcode, x in hlo.collectives(module)
                ],
                sorted_sizes=[max(max(array.shape) for array in x.arrays) for x in module.all() if x.opcode == "sort"],
            )
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
