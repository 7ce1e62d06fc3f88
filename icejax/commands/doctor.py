"""What this machine has, which ways of reading host memory work on it and how fast they are, and where caches cross."""

from __future__ import annotations

import io
import json
import math
import sys
import time
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from icejax.api.choice import crossing
from icejax.api.generate import ASSETS
from icejax.cache.pool import allocation, host_pool
from icejax.checkpoint.folder import resolve
from icejax.checkpoint.load import open_checkpoint
from icejax.commands.options import Parser
from icejax.commands.terminal.process import ending, write
from icejax.models.registry import family
from icejax.runtime import devices
from icejax.runtime.host_reads import choose
from icejax.runtime.host_reads.backends import BACKENDS

PAGES, FETCHED = 8192, 512
PAGE = (2, 16, 128)  # 2 planes (keys, values), 16 slots, 128 channels of 16 bits: 8 KiB
REPEATS = 20
LLAMA = dict(
    model_type="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, rms_norm_eps=1e-5, hidden_act="silu", max_position_embeddings=131072,
    rope_theta=5e5, tie_word_embeddings=False,
)  # fmt: skip


def measure(name: str) -> dict[str, Any]:
    """Returns whether a backend reads exact bits on this machine, and its median time for 512 pages of 8 KiB."""
    fault = choose.backend_error(name)
    if fault is not None:
        return dict(backend=name, exact=False, fault=fault)
    pool = allocation.allocate((PAGES // host_pool.EXTENT, 1, host_pool.EXTENT, 1, *PAGE), "bfloat16").reshape(PAGES, *PAGE)
    pool = jax.device_put(pool, devices.host_sharding())
    rows = jnp.asarray(np.random.default_rng(0).permutation(PAGES)[:FETCHED], jnp.int32)
    read, seconds = jax.jit(BACKENDS[name]), []
    jax.block_until_ready(read(pool, rows))
    for _ in range(REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(read(pool, rows))
        seconds.append(time.perf_counter() - started)
    median = float(np.median(seconds))
    rate = FETCHED * math.prod(PAGE) * 2 / median / 1e9
    return dict(backend=name, exact=True, microseconds=round(1e6 * median, 1), gb_per_s=round(rate, 2))


def crossings(model: str | None) -> dict[str, int | None]:
    """Returns for models the number of tokens up to which a step is estimated to be no slower with the full cache.

    Args:
        model: a folder, a file or a hub id; None: the bundled model, and the shape of Llama-3.1-8B.
    """
    named = {} if model is None else {model: open_checkpoint(resolve(model)).config}
    configs = named or {"the bundled model": open_checkpoint(ASSETS).config, "Llama-3.1-8B": family(LLAMA).read_config(LLAMA)}
    dtype = "float32" if devices.platform() == "cpu" else "bfloat16"
    device = dict(platform=devices.platform(), kind=devices.device().device_kind)
    return {name: crossing(config, dtype, **device) for name, config in configs.items()}


def examine(model: str | None = None) -> dict[str, Any]:
    """Returns the report that the command prints; `model` as in `crossings`."""
    ram = psutil.virtual_memory()
    names = choose.candidates()
    ordered = sorted(names, key=choose.PROBED_BACKENDS.__contains__)  # kernels last: a fault in one ends the process
    measured = sorted(map(measure, ordered), key=lambda row: names.index(row["backend"]))
    return dict(
        versions=dict(python=sys.version.split()[0], jax=jax.__version__, flax=flax.__version__),
        devices=devices.devices(),
        host_memory=dict(total=ram.total, free=ram.available),
        pinned_limit_gib=devices.pinned_limit() // 2**30 if devices.platform() == "gpu" else None,
        fetch=measured,
        fetch_backend=next((row["backend"] for row in measured if row["exact"]), None),
        full_no_slower_up_to=crossings(model),
    )


def _show(report: dict[str, Any], console: Console) -> None:
    console.print("  ".join(f"{name} {version}" for name, version in report["versions"].items()))
    for device in report["devices"]:
        size = f", {device['bytes_limit'] / 2**30:.1f} GiB for JAX" if device["bytes_limit"] else ""
        console.print(f"device {device['device']}{size}; memory kinds: {', '.join(device['memory_kinds'])}")
    ram = {name: f"{size / 2**30:.1f} GiB" for name, size in report["host_memory"].items()}
    pinned = f", {report['pinned_limit_gib']} GiB may be pinned" if report["pinned_limit_gib"] is not None else ""
    console.print(f"host memory {ram['total']}, {ram['free']} free{pinned}")
    table = Table(box=None, header_style="bold", padding=(0, 2))
    for name in ("fetch backend", "exact bits", "512 pages of 8 KiB", "GB/s"):
        table.add_column(name, justify="left" if name == "fetch backend" else "right")
    for row in report["fetch"]:
        speed = (f"{row['microseconds']} us", str(row["gb_per_s"])) if row["exact"] else (row["fault"], "")
        table.add_row(row["backend"], "yes" if row["exact"] else "no", *speed)
    console.print(table)
    console.print(f"used: {report['fetch_backend'] or 'none, only --cache full works'} (another: {choose.CHOICE}=NAME)")
    for name, tokens in report["full_no_slower_up_to"].items():
        where = "full at every length" if tokens is None else f"full up to {tokens:,} tokens, then clustered"
        console.print(f"--cache auto: {where} ({name})", markup=False, highlight=False, soft_wrap=True)


def main(argv: list[str] | None = None, *, name: str = "icejax.doctor") -> int:
    """Prints the report; exit status 2 if no backend can fetch pages on this machine."""
    return ending(name, lambda: _run(argv, name))


def _run(argv: list[str] | None, name: str) -> int:
    parser = Parser(prog=name, description=__doc__.splitlines()[0])
    parser.add_argument(
        "-m", "--model", help="the model whose caches are compared (default: the bundled one, and Llama-3.1-8B)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    devices.set_limits()
    choose.try_ahead()
    devices.check_device()
    report = examine(arguments.model)
    if arguments.json:
        write(json.dumps(report) + "\n")
    else:
        console = Console(file=io.StringIO(), force_terminal=sys.stdout.isatty(), width=Console().width)
        _show(report, console)
        write(console.file.getvalue())
    return 0 if report["fetch_backend"] is not None else 2
