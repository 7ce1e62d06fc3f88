"""Several processes that run one model: how they join a group, the first one's decisions for all, and the end of a group.

All run the same calls in the same order; `mesh` counts the devices of all. What a process alone knows (a prompt from standard
input, how much memory is free) is the first one's, and goes to the others by `from_first`.

Trust: JAX's coordinator, gloo and NCCL neither authenticate nor encrypt. Whoever reaches their ports may join the group, read
what it sends or change what it computes, so they belong in a private network.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src.distributed import global_state  # nothing public says where the coordinator is
from jax.experimental import multihost_utils

from icejax.checks.errors import InputError, quoted
from icejax.checks.numbers import integer
from icejax.runtime import devices
from icejax.runtime.compile_clock import clock

AUTO = "auto"  # the coordinator that the cluster's variables name
ADDRESS = re.compile(r"(?:[\w.-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")
PORT = 8476  # of a coordinator whose port nobody names; JAX's own on TPUs
# Seconds without a sign of life of a process until JAX ends the others, and that a process waits for the others at the end.
HEARTBEAT_S, LEAVE_S = 20, 60
STUCK_S = 600.0  # seconds without progress, compiling aside, until a process of a group ends itself and so the group
LOST_LINE = "another process of the group has ended or cannot be reached: this one ends too"
LEADER, SIZE, INDEX = "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"  # set by Kubernetes' LeaderWorkerSet
SHARED_TUNING = "xla_gpu_shard_autotuning"
_moved = [0.0]  # when this process last made progress
_rests = [False]  # whether it waits for work


class GroupError(RuntimeError):
    """Raised when a group of processes cannot continue: one has ended, or they do not compute the same."""


def join(coordinator: str, *, processes: int | None = None, process: int | None = None) -> None:
    """Joins the group of processes that run one model, and waits for the others; before anything else that starts JAX.

    From then on the death of a process ends the others, within `HEARTBEAT_S` seconds.

    Args:
        coordinator: HOST:PORT, an address of the machine of process 0, which listens there alone (or at
            `JAX_COORDINATOR_BIND_ADDRESS`); or `auto`: the variables of a Kubernetes LeaderWorkerSet say all three, or what JAX
            finds itself: SLURM, Open MPI, a TPU pod, an indexed Kubernetes job.
        processes: number of processes.
        process: number of this one, from 0.

    Raises:
        InputError: the address or a number is invalid, JAX has started, or the first process cannot listen at the address.
            If the others are not there after five minutes, JAX aborts.
    """
    address, count, number = membership(coordinator, processes, process)
    if jax.distributed.is_initialized():
        raise InputError("this process has joined a group of processes already: join once")
    if devices.started():
        raise InputError("JAX has started its devices: join a group of processes before anything else")
    options = dict(heartbeat_timeout_seconds=HEARTBEAT_S, shutdown_timeout_seconds=LEAVE_S)
    if address is not None:
        bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", address)  # JAX itself would listen at all addresses
        options |= dict(cluster_detection_method="deactivate", coordinator_bind_address=bind)
    devices.set_limits()
    # XLA:GPU shares the work of tuning over processes that compile the same: one whose compile cache has the program would not.
    if SHARED_TUNING not in (flags := os.environ.get("XLA_FLAGS", "")):
        os.environ["XLA_FLAGS"] = f"{flags} --{SHARED_TUNING}=false".strip()
    os.environ.setdefault(devices.CPU_THREADS, str(max(4, os.cpu_count() or 1)))  # a sum blocks a thread, as in `set_limits`
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM
    try:
        jax.distributed.initialize(address, count, number, **options)
    except Exception as error:  # of several kinds, by what is wrong
        if address is None and "should be defined" in str(error):
            raise InputError(
                f"coordinator {AUTO} finds no SLURM, Open MPI, TPU pod, indexed Kubernetes job or LeaderWorkerSet: "
                "give the coordinator's HOST:PORT, the number of processes and the number of this one"
            ) from None
        if "start RPC server" in str(error):
            raise InputError(
                f"process {number} cannot listen at {address}: the port is in use, or HOST is no address of this machine"
            ) from None
        where = "the cluster's coordinator" if address is None else f"the coordinator {address}"
        raise InputError(f"process {number} cannot join its group at {where}: {str(error).splitlines()[0]}") from error


def membership(coordinator: str, processes: int | None, process: int | None) -> tuple[str | None, int | None, int | None]:
    """Returns the coordinator's address, the number of processes and this one's; all None where JAX finds them itself.

    Raises:
        InputError: the address or a number is invalid, or one is missing, in the arguments or in LeaderWorkerSet's variables.
    """
    if coordinator == AUTO:
        if processes is not None or process is not None:
            raise InputError(
                f"coordinator {AUTO} finds the number of processes and of this one: leave them out, or give HOST:PORT"
            )
        if LEADER not in os.environ:
            return None, None, None
        address, *numbers = (os.environ.get(name, "") for name in (LEADER, SIZE, INDEX))
        if not all(map(str.isdecimal, numbers)):
            raise InputError(
                f"{SIZE} and {INDEX} must be whole numbers beside {LEADER}, got {' and '.join(map(repr, numbers))}"
            )
        coordinator, processes, process = f"{address}:{os.environ.get('JAX_COORDINATOR_PORT', PORT)}", *map(int, numbers)
    match = ADDRESS.fullmatch(coordinator) if isinstance(coordinator, str) else None
    if match is None or not 0 < int(match[1]) < 2**16:
        raise InputError(f"coordinator must be HOST:PORT or {AUTO}, got {quoted(coordinator)}")
    if processes is None or process is None:
        raise InputError(f"coordinator {coordinator} needs the number of processes and of this one, from 0: give both")
    integer("processes", processes, most=2**16)
    return coordinator, processes, integer("process", process, least=0, most=processes - 1)


def leave() -> None:
    """Waits for the other processes, and leaves the group; the last call of a process."""
    jax.distributed.shutdown()


def count() -> int:
    """Returns the number of processes."""
    return jax.process_count()


def number() -> int:
    """Returns the number of this process, from 0."""
    return jax.process_index()


def is_first() -> bool:
    """Says whether this process decides for the others; a process alone does."""
    return jax.process_index() == 0


def coordinator_host(*, binds: bool = False) -> str:
    """Returns the name or address of process 0's machine, in a group.

    Args:
        binds: whether process 0 is to listen there.
    """
    address = global_state.coordinator_address
    if binds:
        address = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", address)
    return address.rpartition(":")[0].strip("[]")


def from_first(value: Any) -> Any:
    """Returns the first process's `value`, which JSON can hold; all processes call it. The others' own values do not count."""
    if count() == 1:
        return value
    text = np.frombuffer(json.dumps(value).encode() if is_first() else b"", np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    padded = np.zeros(1 << (size - 1).bit_length(), np.uint8)  # a program is compiled for every size
    padded[: len(text)] = text
    return json.loads(bytes(multihost_utils.broadcast_one_to_all(padded)[:size]))


def whole(x: Any) -> np.ndarray:
    """Returns an array's values; if several processes have parts of it, all of them call this."""
    shared = isinstance(x, jax.Array) and not x.is_fully_addressable
    return multihost_utils.process_allgather(x, tiled=True) if shared else np.asarray(x)


def check_alike(what: str, value: Any) -> None:
    """Raises InputError, which begins with `what`, if the `repr` of `value` is not that of the first process's."""
    own = hashlib.sha256(repr(value).encode()).hexdigest()
    if from_first(own) != own:
        raise InputError(f"{what} of process {jax.process_index()} are not those of process 0: give all processes the same")


def is_loss(error: BaseException) -> bool:
    """Says whether an error of JAX or of this package means that another process of the group is lost."""
    pattern = f"gloo|nccl|coordination|^{LOST_LINE}$"
    return bool(re.search(pattern, str(error), re.IGNORECASE)) and isinstance(error, (RuntimeError, ValueError))


def moved() -> None:
    """Notes progress of this process."""
    _moved[0] = time.monotonic()


@contextlib.contextmanager
def at_rest() -> Iterator[None]:
    """Tells the watchdog that the block waits for work of others."""
    _rests[0] = True
    try:
        yield
    finally:
        moved()
        _rests[0] = False


@contextlib.contextmanager
def watched(*, seconds: float = STUCK_S, end: Callable[[int], None] = os._exit) -> Iterator[None]:
    """Ends this process, and so its group, with a line and status 1 if nothing moves for `seconds` while the block runs.

    A process that waits for another one in a collective cannot be interrupted in any other way. Compiling is progress.
    """
    if count() == 1:
        yield
        return
    ended = threading.Event()
    clock()  # listens from now on
    moved()
    threading.Thread(target=functools.partial(_watch, ended, seconds, end), daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _watch(ended: threading.Event, seconds: float, end: Callable[[int], None]) -> None:
    while not ended.wait(min(1.0, seconds / 4)):
        if clock().busy or _rests[0]:
            moved()
        if time.monotonic() - _moved[0] > seconds:
            place = f"process {jax.process_index()} of {count()}"
            # Not by the log: a command holds its lines back while it writes an answer.
            print(
                f"icejax: error: {place} made no progress for {seconds:.0f} s: it ends, and its group",
                file=sys.stderr,
                flush=True,
            )
            return end(1)
