"""Devices, their memory spaces and the limit of pinned host memory; no other module names a device itself."""

from __future__ import annotations

import os
import re
from typing import Any

import jax
from jax._src import xla_bridge  # nothing public says whether a backend has started
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from icejax.checks.errors import InputError, input_error_from
from icejax.checks.numbers import integer
from icejax.runtime import host_memory

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
PINNED = "pinned_host"  # memory kind of the host memory that programs read
# Environment variables that XLA reads when its backend starts.
PINNED_LIMIT, CPU_THREADS = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "PJRT_NPROC"


def started() -> bool:
    """Says whether JAX has started its backend."""
    return xla_bridge.backends_are_initialized()


def check_device() -> None:
    """Starts JAX's backend; raises InputError if it finds no device, for example without a driver."""
    with input_error_from(
        f"JAX finds no device, with JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r}: check JAX_PLATFORMS and the driver"
    ):
        jax.devices()


def platform() -> str:
    """Returns the platform that programs run on: cpu, gpu or tpu."""
    return jax.default_backend()


def device(platform: str | None = None) -> jax.Device:
    """Returns the device of this process that programs run on, or the first of another platform."""
    return jax.local_devices(backend=platform)[0]


def device_name(named: jax.Device | None = None) -> str:
    """Returns the platform and kind of a device, `device()` by default."""
    named = named or device()
    return f"{named.platform}: {named.device_kind}"


def devices() -> list[dict[str, Any]]:
    """Returns for every device its name, the kinds of memory that it reads, and the bytes of its memory that JAX may take."""
    return [
        dict(
            device=device_name(device_),
            memory_kinds=[kind.kind for kind in device_.addressable_memories()],
            bytes_limit=(device_.memory_stats() or {}).get("bytes_limit"),
        )
        for device_ in jax.devices()
    ]


def device_sharding(named: jax.Device | None = None) -> SingleDeviceSharding:
    """Returns the sharding of arrays in the memory of a device, `device()` by default."""
    return SingleDeviceSharding(named or device())


def host_sharding() -> SingleDeviceSharding:
    """Returns the sharding of arrays in host memory that programs read."""
    return SingleDeviceSharding(device(), memory_kind=PINNED)


def first(count: int | None = None) -> list[jax.Device]:
    """Returns the first `count` devices, of which every process has as many, one process after another; None: all."""
    every, processes = jax.devices(), jax.process_count()
    if count is None:
        return every
    return [device for i in range(processes) for device in [x for x in every if x.process_index == i][: count // processes]]


def cut_sharding(over: Mesh, array_cut: PartitionSpec, *, on_host: bool = False) -> NamedSharding:
    """Returns the sharding of arrays that are cut for several devices, in their memory or in host memory that programs read."""
    return NamedSharding(over, array_cut, memory_kind=PINNED if on_host else None)


def set_limits() -> None:
    """Sets the limits that XLA reads from the environment when its backend starts, if the user has not and JAX has not started.

    XLA:GPU may pin three quarters of the machine's memory instead of 64 GiB. XLA rounds a request up to a power of two, if the
    limit allows: with all memory as the limit, a pool of 68 GiB takes 128.

    XLA:CPU gets four threads for each of several devices instead of one. A sum blocks a thread of every device. With one thread
    each, such a sum has waited for its last thread until XLA ended the process.
    """
    if started():
        return
    os.environ.setdefault(PINNED_LIMIT, str(host_memory.total() * 3 // 4 // 2**30))
    if several := re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")):
        os.environ.setdefault(CPU_THREADS, str(4 * int(several[1])))


def pinned_limit() -> int:
    """Returns how many bytes XLA:GPU may pin.

    Raises:
        InputError: the environment's value is not a whole number.
    """
    text = os.environ.get(PINNED_LIMIT, "64")
    try:
        return int(text) * 2**30
    except ValueError:
        raise InputError(f"{PINNED_LIMIT} must be a whole number of GiB, got {text!r}") from None


def host_free() -> int:
    """Returns the bytes of host memory that are free for this process."""
    return host_memory.free()


def pinnable() -> int:
    """Returns the bytes of host memory that pages may take: on a GPU at most what XLA may still pin."""
    if platform() != "gpu":
        return host_free()
    return min(host_free(), pinned_limit() - _pinned())


def _pinned() -> int:
    return sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == PINNED)


def device_free(weights: Any, size: int | None = None, *, count: int = 1) -> int:
    """Returns the bytes of the memory of `count` devices that are free besides a model's weights, which are loaded.

    Args:
        size: bytes of a device's memory; None: what the device reports, on a CPU the machine's free memory, which all share.
    """
    if size is not None:
        return count * size - sum(x.nbytes for x in jax.tree.leaves(weights) if x.sharding.memory_kind != PINNED)
    stats = device().memory_stats() or {}
    return count * (stats["bytes_limit"] - stats["bytes_in_use"]) if "bytes_limit" in stats else host_free()


def check_room(what: str, need: int, *, advice: str, limit: int | None = None) -> None:
    """Raises InputError, which begins with `what` and ends with `advice`, if `need` bytes of host memory cannot be pinned.

    Args:
        limit: bytes that may be used; None: all free bytes.
    """
    free = host_free()
    if need > (free if limit is None else min(free, limit)):
        room = f"{free / 2**30:.1f} GiB is free" if limit is None or free < limit else f"the limit is {limit / 2**30:.3g} GiB"
        needed = f"{need / 2**30:.1f}" if need > 2**27 else f"{need / 2**30:.3g}"
        raise InputError(f"{what} {needed} GiB of host memory and {room}: {advice}")
    if platform() != "gpu":
        return
    limit_bytes, pinned = pinned_limit(), _pinned()
    if need + pinned > limit_bytes:  # a model's experts may be pinned besides a cache
        beside = f" with {pinned / 2**30:.1f} GiB already pinned" if pinned else ""
        raise InputError(
            f"{what} {need / 2**30:.1f} GiB of pinned memory{beside}, but XLA may pin at most {limit_bytes / 2**30:.0f} GiB: "
            f"set {PINNED_LIMIT}={(need + pinned) // 2**30 + 8} before JAX starts"
        )


def check_limit(limit: int | None, *, name: str = "host_memory_limit") -> int | None:
    """Returns `limit`, the bytes of memory that may be used (None: no limit); InputError if it is out of range."""
    return None if limit is None else integer(name, limit, most=2**63)
