"""Devices, the memory they read, and how much of the host's may be pinned: no other module names them."""

from __future__ import annotations

import os
from typing import Any

import jax
import psutil
from jax._src import xla_bridge  # nothing public says whether a backend has started
from jax.sharding import SingleDeviceSharding

from icejax.checks.errors import InputError, input_error_from
from icejax.checks.numbers import integer

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
PINNED = "pinned_host"  # the kind of the host's memory that programs read
PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # XLA reads it when its backend starts


def started() -> bool:
    """Says whether JAX has taken its devices already."""
    return xla_bridge.backends_are_initialized()


def check_device() -> None:
    """Raises InputError where JAX has no device, as without a driver; its backend starts here."""
    with input_error_from(
        f"JAX finds no device, with JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r}: look at it and at the drivers"
    ):
        jax.devices()


def platform() -> str:
    """Returns what programs are compiled for and run on: cpu, gpu or tpu."""
    return jax.default_backend()


def device(platform: str | None = None) -> jax.Device:
    """Returns the device that programs run on, or the first of another platform."""
    return jax.devices(platform)[0]


def device_name(named: jax.Device | None = None) -> str:
    """Returns platform and kind of a device; of `device()`, if none is given."""
    named = named or device()
    return f"{named.platform}: {named.device_kind}"


def devices() -> list[dict[str, Any]]:
    """Returns of every device its name, the kinds of memory that it reads, and the bytes of its own that JAX may take."""
    return [
        dict(
            device=device_name(each),
            memory_kinds=[kind.kind for kind in each.addressable_memories()],
            bytes_limit=(each.memory_stats() or {}).get("bytes_limit"),
        )
        for each in jax.devices()
    ]


def device_sharding(named: jax.Device | None = None) -> SingleDeviceSharding:
    """Returns the sharding of arrays in the memory of a device; of `device()`, if none is given."""
    return SingleDeviceSharding(named or device())


def host_sharding() -> SingleDeviceSharding:
    """Returns the sharding of arrays in host memory that programs read."""
    return SingleDeviceSharding(device(), memory_kind=PINNED)


def raise_pinned_limit() -> None:
    """Lets XLA:GPU pin three quarters of the machine's memory, where it would stop at 64 GiB, if JAX has not started yet.

    It pins in powers of two, up to the limit: with all of the memory for a limit a pool of 68 GiB would take 128.
    """
    if not started():
        os.environ.setdefault(PINNED_LIMIT, str(psutil.virtual_memory().total * 3 // 4 // 2**30))


def pinned_limit() -> int:
    """Returns how many bytes XLA:GPU may pin; InputError if the environment says something else than a number."""
    text = os.environ.get(PINNED_LIMIT, "64")
    try:
        return int(text) * 2**30
    except ValueError:
        raise InputError(f"{PINNED_LIMIT} must be a whole number of GiB, got {text!r}") from None


def check_room(what: str, need: int, *, advice: str, limit: int | None = None) -> None:
    """Raises InputError, which begins with `what` and ends with `advice`, if host memory has no `need` bytes to pin.

    Args:
        limit: bytes that may be taken; None: what is free.
    """
    free = psutil.virtual_memory().available
    if need > (free if limit is None else min(free, limit)):
        there = f"{free / 2**30:.1f} GiB is free" if limit is None or free < limit else f"the limit is {limit / 2**30:.3g} GiB"
        needed = f"{need / 2**30:.1f}" if need > 2**27 else f"{need / 2**30:.3g}"
        raise InputError(f"{what} {needed} GiB of host memory and {there}: {advice}")
    if platform() != "gpu":
        return
    most, held = pinned_limit(), sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == PINNED)
    if need + held > most:  # experts may be there beside a cache
        beside = f" beside {held / 2**30:.1f} that are taken" if held else ""
        raise InputError(
            f"{what} {need / 2**30:.1f} GiB of pinned memory{beside} and XLA takes at most {most / 2**30:.0f}: "
            f"set {PINNED_LIMIT}={(need + held) // 2**30 + 8} before JAX starts"
        )


def check_limit(limit: int | None) -> int | None:
    """Returns the bytes of host memory that a cache may take, None for what is free; InputError for what is no such number."""
    return None if limit is None else integer("host_memory_limit", limit, most=2**63)
