"""Tries a fetch backend in a child process, which a fault in a kernel may end, and saves the result; `choose` calls it.

A saved result is valid for these GPUs, their driver, these versions of JAX and its plugins, and this code.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import jax

from icejax.files.cache_home import cache_home
from icejax.runtime import devices
from icejax.runtime.host_reads.selftest import selftest

LOG = logging.getLogger(__name__)
SECONDS = 45  # for the child process; JAX and CUDA start in ten
FAULTS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)  # signals of a faulty kernel
DRIVER = Path("/proc/driver/nvidia")
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
SOURCES = ("../devices.py", "backends.py", "selftest.py")
ANSWER = "found: "  # prefix of the child's line of results; CUDA may print other lines


def probe_early(names: Sequence[str]) -> None:
    """Tries backends if there is a CUDA device and JAX has not started: once it has, it may hold all GPU memory."""
    platforms = jax.config.jax_platforms or "cuda"
    wanted = "cuda" in platforms or "gpu" in platforms
    if wanted and _driver_text() and _plugins() and not devices.started():
        for name in names:
            probe_error(name)


@functools.cache  # so that a backend that hangs is waited for once
def probe_error(name: str) -> str | None:
    """Returns the error of a backend on this machine's GPU, None if it works; tries it unless a result is saved."""
    file, key = cache_home() / "fetch.json", f"{name} {_machine_key()}"
    results = _saved_results(file)
    if key in results:
        return results[key]
    LOG.info("fetch backend %s is tried in a process of its own, once on this machine", name)
    try:
        error, is_lasting = _try_in_child(name)
    except subprocess.TimeoutExpired:
        return f"is not ready in {SECONDS} s"
    if is_lasting:
        with contextlib.suppress(OSError):  # unsaved, it is tried again by the next process
            _save(file, results | {key: error})
    return error


def _try_in_child(name: str) -> tuple[str | None, bool]:
    """Returns the error of a backend, and whether it would recur: it may not if the GPU or its memory was in use."""
    package_root = str(Path(__file__).parents[3])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH")))),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the GPU memory is for the parent process
    }
    child = subprocess.run(
        [sys.executable, "-P", "-m", "icejax.runtime.host_reads.probe", name],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=SECONDS,
    )
    answers = [line.removeprefix(ANSWER) for line in child.stdout.splitlines() if line.startswith(ANSWER)]
    if child.returncode != 0 or not answers:
        return f"fails: the process that tries it ended with status {child.returncode}", -child.returncode in FAULTS
    platform, error = json.loads(answers[-1])
    return error, platform == "gpu" and "RESOURCE_EXHAUSTED" not in (error or "")


def _driver_text() -> str:
    """Returns the NVIDIA driver's version and the models of its GPUs, a line each; empty without a driver."""
    files = [DRIVER / "version", *sorted(DRIVER.glob("gpus/*/information"))]
    lines = [line for file in files if file.exists() for line in file.read_text(errors="replace").splitlines()]
    return "\n".join(line for line in lines if line.startswith(("NVRM", "Model")))


def _machine_key() -> str:
    sources = b"".join((Path(__file__).parent / name).read_bytes() for name in SOURCES)
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", *_plugins()))
    return f"{versions} {zlib.crc32(_driver_text().encode()):08x} {zlib.crc32(sources):08x}"


def _plugins() -> list[str]:
    return [name for name in PLUGINS if importlib.util.find_spec(name) is not None]


def _saved_results(file: Path) -> dict[str, str | None]:
    """Returns the saved results, error or None by key; no results from a missing or malformed file."""
    try:
        results = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    results = results if isinstance(results, dict) else {}
    return {key: error for key, error in results.items() if error is None or isinstance(error, str)}


def _save(file: Path, results: dict[str, str | None]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as temporary:
        json.dump(results, temporary)
    os.replace(temporary.name, file)


def main() -> None:
    """Prints as JSON the platform, and the error of the backend that the command line names."""
    print(ANSWER + json.dumps([devices.platform(), selftest(sys.argv[1])]), flush=True)


if __name__ == "__main__":
    main()
