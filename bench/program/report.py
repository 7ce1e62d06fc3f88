"""The row of a program, and the tables of rows, of `bench.program`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from rich.table import Table

from bench.program import estimate, hlo, thunks, work
from bench.program.compile import Step, compile_for, on_host
from bench.program.targets import Target
from bench.steps.scopes import scope_of
from bench.steps.sizes import nbytes
from icejax.runtime import compiler_options

_MODE = "xla_gpu_command_buffer_scheduling_mode"


def row(target: Target, step: Step, flags: dict[str, str | bool]) -> dict[str, Any]:
    """Returns counts and estimates of a step; `left_out` has the reason if it does not fit the device or does not compile."""
    weights, state, pool = step.arguments
    host_weights = [x for x in weights if on_host(x)]
    sizes = dict(weight_bytes=nbytes(weights) - nbytes(host_weights), state_bytes=nbytes(state), pool_bytes=nbytes(pool))
    sizes |= dict(expert_host_bytes=nbytes(host_weights)) if host_weights else {}
    if (needed := sizes["weight_bytes"] + sizes["state_bytes"]) > target.memory:
        available = f"the {target.name} has {target.memory / 2**30:.1f}"
        return sizes | dict(left_out=f"weights and cache take {needed / 2**30:.1f} GiB on the device, {available}")
    options = compiler_options.OPTIONS.get(target.platform, {}) | flags
    try:
        compiled = compile_for(target, step.program, step.arguments, options)
    except jax.errors.JaxRuntimeError as error:
        return sizes | dict(left_out=f"does not compile, or cannot be read back: {(str(error).splitlines() or [''])[0][:300]}")
    module, scopes = hlo.parse(compiled.hlo), scope_of(compiled.hlo, list(step.leaves))
    thunk_list = thunks.parse(compiled.thunks, compiled.thunk_names)
    works = work.of_gpu(module, thunk_list, scopes) if target.platform == "gpu" else work.of_tpu(module, scopes)
    counts, concurrent = work.counts(works), str(options.get(_MODE)).upper() == "CONCURRENT"
    loops = [(x.times, times) for x, times in work.flat(works) if x.kind == "loop" and any(y.kind == "start" for y in x.inner)]
    memory, host_arrays = compiled.memory, {x.shape: x for x in [*host_weights, *jax.tree.leaves(pool)]}.values()
    return sizes | dict(
        kernels=counts.get("kernel", 0),
        launches=work.launches(works) if target.platform == "gpu" else 1,
        graph_launches=counts.get("graph", 0),
        host_copies=counts.get("start", 0),
        serial_waits=work.serial_waits(works),
        dma_loops=sum(times for _, times in loops),
        dma_rounds=sorted({x or 0 for x, _ in loops}),
        device_copies=counts.get("copy", 0),
        sorts=sum(x.opcode == "sort" for x in module.all()),
        selections=counts.get("select", 0),
        blocking=counts.get("blocking", 0),
        device_bytes=sum(times * x.traffic.device for x, times in work.flat(works)),
        bus_bytes=sum(times * (x.traffic.bus_in + x.traffic.bus_out) for x, times in work.flat(works)),
        scopes=work.by_scope(works),
        temp_bytes=memory.temp_size_in_bytes,
        host_temp_bytes=memory.host_temp_size_in_bytes,
        pool_copies=[x for y in host_arrays for x in hlo.pool_copies(module, y.shape, y.dtype.itemsize)],
        concurrent=concurrent,
        ms={
            level: round(estimate.milliseconds(works, rates, concurrent=concurrent), 2)
            for level, rates in zip(estimate.LEVELS, estimate.RATES[target.name], strict=True)
        },
        floor=estimate.floor(target, step),
    )


def tables(found: list[dict[str, Any]]) -> Iterator[Table]:
    """Yields a table of all rows, and a table of their bytes by scope."""
    names = ("target", "context", "batch", "cache", "weights")
    count_names = ("kernels", "launches", "graph_launches", "host_copies", "serial_waits", "sorts", "selections", "blocking")
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for name in (*names, "kernels", "launches", "graphs", "host copies", "serial", "sorts", "RAFT", "blocking"):
        table.add_column(name, justify="left" if name in ("target", "cache", "weights") else "right")
    for name in ("GB device", "MB bus", "MiB temp", "pool copies", "ms low", "mid", "high", "floor"):
        table.add_column(name, justify="right")
    scopes = Table(box=None, header_style="bold", padding=(0, 1), title="MB on the device and the bus, by scope")
    for name in names:
        scopes.add_column(name)
    scope_names = list(dict.fromkeys(scope for row in found for scope in row.get("scopes", ())))
    for scope in scope_names:
        scopes.add_column(scope, justify="right")
    for row in found:
        head = [str(row[name]) for name in names]
        if "left_out" in row:
            table.add_row(*head, row["left_out"])
            continue
        sizes = [f"{row['device_bytes'] / 1e9:.2f}", f"{row['bus_bytes'] / 1e6:.0f}", f"{row['temp_bytes'] / 2**20:.0f}"]
        times = [f"{row['ms'][level]:.1f}" for level in estimate.LEVELS]
        counts = [str(row[name]) for name in count_names]
        table.add_row(*head, *counts, *sizes, str(len(row["pool_copies"])), *times, f"{row['floor']['ms']:.1f}")
        cells = (row["scopes"].get(scope, dict(device_bytes=0, bus_bytes=0)) for scope in scope_names)
        scopes.add_row(*head, *(f"{(x['device_bytes'] + x['bus_bytes']) / 1e6:.0f}" for x in cells))
    yield table
    yield scopes
