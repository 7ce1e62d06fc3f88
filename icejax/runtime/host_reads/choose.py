"""Chooses the backend that reads host memory inside a program: the first that reads exact bits here; planning calls it."""

from __future__ import annotations

import functools
import logging
import os

from icejax.checks.errors import InputError
from icejax.runtime import devices
from icejax.runtime.host_reads import probe
from icejax.runtime.host_reads.selftest import selftest

LOG = logging.getLogger(__name__)
CHOICE = "ICEJAX_FETCH_BACKEND"  # environment variable that names the backend
# On TPU XLA refuses a gather from host memory and would copy the table to flatten its rows; it copies one-dimensional slices
# directly. On CUDA a kernel crosses the bus once and stays in the step's graph; XLA's gather crosses the bus three times.
ORDER = {
    "tpu": ("slices", "host_compute"),
    "gpu": ("triton", "gather", "host_compute", "slices"),
    "cpu": ("gather_flat", "host_compute", "slices"),
}
PROBED_BACKENDS = ("triton",)  # backends that a child process tries, because a fault in a kernel ends the process


def try_ahead() -> None:
    """Tries the backends of `PROBED_BACKENDS` before JAX starts, unless the environment names another backend."""
    probe.probe_early([name for name in PROBED_BACKENDS if os.environ.get(CHOICE, name) == name])


def backend_error(name: str) -> str | None:
    """Returns the error of a backend on this platform, from the self-test; None if it reads exact bits."""
    return probe.probe_error(name) if name in PROBED_BACKENDS else selftest(name)


def candidates() -> tuple[str, ...]:
    """Returns the backends that may be used on this platform, best first.

    Raises:
        InputError: the environment names a backend that this platform does not have.
    """
    platform = devices.platform()
    order = ORDER.get(platform, ("gather", "host_compute", "slices"))
    name = os.environ.get(CHOICE)
    if name is None:
        return order
    if name not in order:
        raise InputError(f"{CHOICE} must be one of {', '.join(order)} on {platform}, got {name!r}")
    return (name,)


@functools.cache
def fetch_backend() -> str:
    """Returns the first backend that reads exact bits on this platform, and logs it.

    Raises:
        InputError: no backend does.
    """
    platform = devices.platform()
    for name in candidates():
        reason = backend_error(name)
        if reason is None:
            LOG.info("fetch backend on %s: %s", platform, name)
            return name
        LOG.warning("fetch backend %s on %s %s", name, platform, reason)
    if CHOICE in os.environ:
        raise InputError(f"{CHOICE}={os.environ[CHOICE]} does not work on {platform}: unset it, or use --cache full")
    raise InputError(f"host memory cannot be read inside a program on {platform}: use --cache full")
