"""What is told of a program: a row, and tables of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from rich.table import Table

from bench.program import estimate, hlo, thunks, work
from bench.program.compile import Step, compile_for, on_host
from bench.program.targets import Target
from bench.scopes import scope_of
from bench.sizes import nbytes
from icejax.runtime import compiler_options

_MODE = "xla_gpu_command_buffer_scheduling_mode"


def row(target: Target, step: Step, flags: dict[str, str | bool]) -> dict[str, Any]:
    """Returns what is counted and estimated of a step; `left_out` and the reason if it does not fit or does not compile."""
    weights, state, pool = step.arguments
    hosted = [x for x in weights if on_host(x)]
    sizes = dict(weight_bytes=nbytes(weights) - nbytes(hosted), state_bytes=nbytes(state), pool_bytes=nbytes(pool))
    sizes |= dict(expert_host_bytes=nbytes(hosted)) if hosted else {}
    if (need := sizes["weight_bytes"] + sizes["state_bytes"]) > target.memory:
        have = f"the {target.name} has {target.memory / 2**30:.1f}"
        return sizes | dict(left_out=f"weights and cache take {need / 2**30:.1f} GiB on the device, {have}")
    options = compiler_options.OPTIONS.get(target.platform, {}) | flags
    try:
        made = compile_for(target, step.program, step.arguments, options)
    except jax.errors.JaxRuntimeError as error:
        return sizes | dict(left_out=f"does not compile, or cannot be read back: {(str(error).splitlines() or [''])[0][:300]}")
    module, scopes = hlo.parse(made.hlo), scope_of(made.hlo, list(step.leaves))
    listed = thunks.parse(made.thunks, made.thunk_names)
    some = work.of_gpu(module, listed, scopes) if target.platform == "gpu" else work.of_tpu(module, scopes)
    found, concurrent = work.counts(some), str(options.get(_MODE)).upper() == "CONCURRENT"
    loops = [(x.times, times) for x, times in work.flat(some) if x.kind == "loop" and any(y.kind == "start" for y in x.inner)]
    memory, kept = made.memory, {x.shape: x for x in [*hosted, pool] if x is not None}.values()
    return sizes | dict(
        kernels=found.get("kernel", 0),
        launches=work.launches(some) if target.platform == "gpu" else 1,
        graph_launches=found.get("graph", 0),
        host_copies=found.get("start", 0),
        serial_waits=work.serial_waits(some),
        dma_loops=sum(times for _, times in loops),
        dma_rounds=sorted({x or 0 for x, _ in loops}),
        device_copies=found.get("copy", 0),
        sorts=sum(x.opcode == "sort" for x in module.all()),
        selections=found.get("select", 0),
        blocking=found.get("blocking", 0),
        device_bytes=sum(times * x.traffic.device for x, times in work.flat(some)),
        bus_bytes=sum(times * (x.traffic.bus_in + x.traffic.bus_out) for x, times in work.flat(some)),
        scopes=work.by_scope(some),
        temp_bytes=memory.temp_size_in_bytes,
        host_temp_bytes=memory.host_temp_size_in_bytes,
        pool_copies=[x for y in kept for x in hlo.pool_copies(module, y.shape, y.dtype.itemsize)],
        concurrent=concurrent,
        ms={
            level: round(estimate.milliseconds(some, rates, concurrent=concurrent), 2)
            for level, rates in zip(estimate.LEVELS, estimate.RATES[target.name], strict=True)
        },
        floor=estimate.floor(target, step),
    )


def tables(found: list[dict[str, Any]]) -> Iterator[Table]:
    """Yields the table of all rows, and that of bytes by scope."""
    names = ("target", "context", "batch", "cache", "weights")
    counted = ("kernels", "launches", "graph_launches", "host_copies", "serial_waits", "sorts", "selections", "blocking")
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for name in (*names, "kernels", "launches", "graphs", "host copies", "serial", "sorts", "RAFT", "blocking"):
        table.add_column(name, justify="left" if name in ("target", "cache", "weights") else "right")
    for name in ("GB device", "MB bus", "MiB temp", "pool copies", "ms low", "mid", "high", "floor"):
        table.add_column(name, justify="right")
    scopes = Table(box=None, header_style="bold", padding=(0, 1), title="MB on the device and the bus, by scope")
    for name in names:
        scopes.add_column(name)
    every = list(dict.fromkeys(scope for row in found for scope in row.get("scopes", ())))
    for scope in every:
        scopes.add_column(scope, justify="right")
    for row in found:
        head = [str(row[name]) for name in names]
        if "left_out" in row:
            table.add_row(*head, row["left_out"])
            continue
        moved = [f"{row['device_bytes'] / 1e9:.2f}", f"{row['bus_bytes'] / 1e6:.0f}", f"{row['temp_bytes'] / 2**20:.0f}"]
        times = [f"{row['ms'][level]:.1f}" for level in estimate.LEVELS]
        counts = [str(row[name]) for name in counted]
        table.add_row(*head, *counts, *moved, str(len(row["pool_copies"])), *times, f"{row['floor']['ms']:.1f}")
        cells = (row["scopes"].get(scope, dict(device_bytes=0, bus_bytes=0)) for scope in every)
        scopes.add_row(*head, *(f"{(x['device_bytes'] + x['bus_bytes']) / 1e6:.0f}" for x in cells))
    yield table
    yield scopes
