"""The device's name and versions, and the rates of its memory and link: ``python -m bench.device.machine [MEBIBYTES]``."""

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
    """Returns the fields `ASKED` of nvidia-smi for the first GPU; None without one."""
    try:
        command = ["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader"]
        process = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if process.returncode or not process.stdout.strip():
        return None
    return dict(zip(ASKED, (text.strip() for text in process.stdout.splitlines()[0].split(",")), strict=False))


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages of `PACKAGES`."""
    by_package = dict(python=platform.python_version())
    for name in PACKAGES:
        try:
            by_package[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return by_package


def rates(mebibytes: int) -> dict[str, float]:
    """Returns GB/s of one large array: from pinned memory to the device, back, and read and written on the device."""
    device = jax.device_put(jnp.zeros(mebibytes * 2**18, jnp.float32), memory.device())
    pinned = jax.block_until_ready(jax.device_put(device, memory.HOST))
    size = device.nbytes / 1e9
    add = jax.jit(lambda x: x + 1)
    to_device = _seconds(lambda: jax.device_put(pinned, memory.DEVICE))
    to_host = _seconds(lambda: jax.device_put(device, memory.HOST))
    on_device = _seconds(lambda: add(device))
    measured = dict(
        to_device_gb_per_s=size / to_device, to_host_gb_per_s=size / to_host, device_memory_gb_per_s=2 * size / on_device
    )
    return {name: round(rate, 2) for name, rate in measured.items()}


def _seconds(run) -> float:
    jax.block_until_ready(run())
    durations = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(run())
        durations.append(time.perf_counter() - started)
    return float(np.median(durations))


def main(argv: list[str]) -> int:
    memory.set_limits()
    devices, host = memory.devices(), dict(cores=os.cpu_count(), memory_bytes=psutil.virtual_memory().total)
    measured = rates(int(argv[0]) if argv else 2048)
    # nvidia-smi comes last: it reports an idle link as narrower and slower than it is.
    date = datetime.date.today().isoformat()
    print(
        json.dumps(dict(date=date, versions=versions(), devices=devices, host=host) | measured | dict(nvidia=nvidia())),
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
