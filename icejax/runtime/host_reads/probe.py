"""Tries a fetch backend in a process of its own, which a fault in a kernel takes along; what it found is kept.

A result holds for the GPUs, their driver, the version of JAX and the code.
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
SECONDS = 45  # JAX and CUDA start in ten
FAULTS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)  # a process's own doing
DRIVER = Path("/proc/driver/nvidia")
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
SOURCES = ("../devices.py", "backends.py", "selftest.py")
ANSWER = "found: "  # the line of the child that counts; CUDA may print others


def ahead(names: Sequence[str]) -> None:
    """Tries backends where there is a CUDA device and JAX has not started yet: later the memory may be taken."""
    platforms = jax.config.jax_platforms or "cuda"
    wanted = "cuda" in platforms or "gpu" in platforms
    if wanted and _driver() and _plugins() and not devices.started():
        for name in names:
            probe_error(name)


@functools.cache  # one that hangs is not to be waited for twice
def probe_error(name: str) -> str | None:
    """Returns what is wrong with a backend on this machine's GPU, None if nothing; tried if no result is kept."""
    file, key = cache_home() / "fetch.json", f"{name} {_key()}"
    kept = _kept(file)
    if key in kept:
        return kept[key]
    LOG.info("fetch backend %s is tried in a process of its own, once on this machine", name)
    try:
        fault, lasting = _tried(name)
    except subprocess.TimeoutExpired:
        return f"is not ready in {SECONDS} s"
    if lasting:
        with contextlib.suppress(OSError):  # it is then tried again the next time
            _keep(file, kept | {key: fault})
    return fault


def _tried(name: str) -> tuple[str | None, bool]:
    """Returns what is wrong, and whether it will be the next time: not if the GPU or its memory was taken."""
    folder = str(Path(__file__).parents[3])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH")))),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the memory is for the process that asks
    }
    done = subprocess.run(
        [sys.executable, "-P", "-m", "icejax.runtime.host_reads.probe", name],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=SECONDS,
    )
    answers = [line.removeprefix(ANSWER) for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if done.returncode != 0 or not answers:
        return f"fails: the process that tries it ended with status {done.returncode}", -done.returncode in FAULTS
    platform, fault = json.loads(answers[-1])
    return fault, platform == "gpu" and "RESOURCE_EXHAUSTED" not in (fault or "")


def _driver() -> str:
    """Returns what the NVIDIA driver says of itself and of its GPUs; empty without one."""
    files = [DRIVER / "version", *sorted(DRIVER.glob("gpus/*/information"))]
    lines = [line for file in files if file.exists() for line in file.read_text(errors="replace").splitlines()]
    return "\n".join(line for line in lines if line.startswith(("NVRM", "Model")))


def _key() -> str:
    sources = b"".join((Path(__file__).parent / name).read_bytes() for name in SOURCES)
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", *_plugins()))
    return f"{versions} {zlib.crc32(_driver().encode()):08x} {zlib.crc32(sources):08x}"


def _plugins() -> list[str]:
    return [name for name in PLUGINS if importlib.util.find_spec(name) is not None]


def _kept(file: Path) -> dict[str, str | None]:
    """Returns the results that are kept; a file that is no such thing holds none."""
    try:
        kept = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    kept = kept if isinstance(kept, dict) else {}
    return {key: fault for key, fault in kept.items() if fault is None or isinstance(fault, str)}


def _keep(file: Path, kept: dict[str, str | None]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
        json.dump(kept, new)
    os.replace(new.name, file)


def main() -> None:
    """Prints the platform and what is wrong with the backend that the command line names, as JSON."""
    print(ANSWER + json.dumps([devices.platform(), selftest(sys.argv[1])]), flush=True)


if __name__ == "__main__":
    main()
