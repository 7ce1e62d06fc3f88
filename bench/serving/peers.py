"""Other servers of a published model, each run by the Python of an environment that has it.

- `llama.cpp`: llama.cpp's own server, of the package xllamacpp, whose wheel is compiled for AVX2
- `transformers`: `transformers serve`, of `transformers[serving]`. It answers one request at a time. Its 5.24.0 cannot serve a
  GGUF file from the disk, so it gets the folder with the file's weights, dequantised
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.serving.client import Http
from icejax.checks.errors import InputError

LLAMA_SERVER = Path(__file__).with_name("llama_server.py")
TRANSFORMERS = "from transformers.cli.transformers import app; app()"
NEVER = -100.0  # the bias of an end in transformers, which knows no `ignore_eos`
START_S = 600.0


@dataclass(frozen=True)
class Job:
    """The task of a peer: the GGUF file, or the folder made of it, that it serves; requests at once; most tokens of each."""

    file: Path
    folder: Path
    slots: int
    tokens: int
    eos: int


@dataclass(frozen=True)
class Peer:
    """A kind of server.

    Attributes:
        package: whose version a row has.
        command: what starts it, given the job, the Python and a port.
        model: the model's name in requests.
        endless: fields of a request whose answer does not end early.
    """

    package: str
    command: Callable[[Job, str, int], list[str]]
    model: Callable[[Job], str]
    endless: Callable[[Job], dict[str, Any]]


def _llama_cpp(job: Job, python: str, port: int) -> list[str]:
    sizes = dict(slots=job.slots, tokens=job.tokens, threads=psutil.cpu_count(), port=port)
    return [python, str(LLAMA_SERVER), json.dumps(dict(model=str(job.file)) | sizes)]


def _transformers(job: Job, python: str, port: int) -> list[str]:
    return [python, "-c", TRANSFORMERS, "serve", str(job.folder), "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]


PEERS = {
    "llama.cpp": Peer("xllamacpp", _llama_cpp, lambda job: str(job.file), lambda job: dict(ignore_eos=True)),
    "transformers": Peer(
        "transformers", _transformers, lambda job: str(job.folder), lambda job: dict(logit_bias={str(job.eos): NEVER})
    ),
}


def asked_peer(text: str) -> tuple[str, str]:
    """Returns the name and the Python of `NAME=PYTHON`; InputError for another name, or a Python that is not there."""
    name, _, python = text.partition("=")
    python = os.path.expanduser(python)
    if name not in PEERS or shutil.which(python) is None:
        raise InputError(f"--peer must be NAME=PYTHON, of {', '.join(PEERS)} and a Python that has its package, got {text!r}")
    return name, python


def version(name: str, python: str) -> str:
    """Returns the version of a peer's package; InputError if the Python does not have it."""
    package = PEERS[name].package
    command = [python, "-c", f"import importlib.metadata as m; print(m.version({package!r}))"]
    told = subprocess.run(command, capture_output=True, text=True)
    if told.returncode:
        raise InputError(f"{python} does not have {package}: expected the Python of an environment that has it")
    return f"{package} {told.stdout.strip()}"


@contextlib.asynccontextmanager
async def running(name: str, python: str, job: Job) -> AsyncIterator[Http]:
    """Runs a peer on a free port until the block ends; InputError if it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Http(f"http://127.0.0.1:{port}")
    environment = os.environ | dict(HF_HUB_OFFLINE="1")
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with subprocess.Popen(PEERS[name].command(job, python, port), env=environment, **pipes) as process:
        try:
            await _until_ready(server, name, process)
            yield server
        finally:
            process.kill()


async def _until_ready(server: Http, name: str, process: subprocess.Popen) -> None:
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(InputError):
            await server.get("/health")
            return
        await asyncio.sleep(0.5)
    raise InputError(f"the server of {name} did not start: {process.args[0]} ended, or took more than {START_S:.0f} s")
