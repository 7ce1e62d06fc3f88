"""What the device is, and what its memory and the link to the host give: ``python -m bench.device.machine [MEBIBYTES]``."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from icejax.runtime import devices as memory

ASKED = (
    "name", "driver_version", "pcie.link.gen.current", "pcie.link.width.current", "memory.total", "clocks.max.sm",
    "power.limit",
)  # fmt: skip
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
REPEATS = 5


def nvidia() -> dict[str, str] | None:
    """Returns what nvidia-smi tells of the first GPU; None without one."""
    try:
        asked = ["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode or not done.stdout.strip():
        return None
    return dict(zip(ASKED, (text.strip() for text in done.stdout.splitlines()[0].split(",")), strict=False))


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that are there."""
    found = dict(python=platform.python_version())
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def rates(mebibytes: int) -> dict[str, float]:
    """Returns GB/s of one large array: from pinned memory to the device, back, and read and written on the device."""
    device = jax.device_put(jnp.zeros(mebibytes * 2**18, jnp.float32), memory.device())
    pinned = jax.block_until_ready(jax.device_put(device, memory.HOST))
    size = device.nbytes / 1e9
    add = jax.jit(lambda x: x + 1)
    there = _seconds(lambda: jax.device_put(pinned, memory.DEVICE))
    back = _seconds(lambda: jax.device_put(device, memory.HOST))
    both = _seconds(lambda: add(device))
    found = dict(to_device_gb_per_s=size / there, to_host_gb_per_s=size / back, device_memory_gb_per_s=2 * size / both)
    return {name: round(rate, 2) for name, rate in found.items()}


def _seconds(run) -> float:
    jax.block_until_ready(run())
    found = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - started)
    return float(np.median(found))


def main(argv: list[str]) -> int:
    memory.raise_pinned_limit()
    devices, host = memory.devices(), dict(cores=os.cpu_count(), memory_bytes=psutil.virtual_memory().total)
    measured = rates(int(argv[0]) if argv else 2048)
    # Asked last: a link that nobody uses is told narrower and slower than it is.
    date = datetime.date.today().isoformat()
    print(
        json.dumps(dict(date=date, versions=versions(), devices=devices, host=host) | measured | dict(nvidia=nvidia())),
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
