"""Decodes on one device and in a group of processes that have one each, and writes a model that commands can run.

``python -m tests.helpers.in_processes HOST:PORT N I CASE...`` is process I of N. For each case of `tests.helpers.on_devices` the
first one prints a JSON line that says how the runs compare. The case `engine` is an engine's answers.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

import icejax
from icejax.checkpoint.load import load_model
from icejax.runtime import processes
from tests.helpers import small_tokenizers
from tests.helpers.letters import Letters
from tests.helpers.on_devices import LLAMA, checkpoint, compared, prompts_of


def coordinator() -> str:
    """Returns an address of this machine with a port that is free."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{server.getsockname()[1]}"


def start(*commands: list[str], variables: Callable[[int], dict[str, str]] = lambda _: {}) -> list[subprocess.Popen]:
    """Starts a Python process with each list of arguments, and with environment variables by its number."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started = enumerate(commands)
    return [subprocess.Popen([sys.executable, *command], env=os.environ | variables(i), **pipes) for i, command in started]


def generate(folder: Path, count: int, *arguments: str, command: str = "generate") -> list[list[str]]:
    """Returns the arguments of `icejax generate`, or of another command, for every process of a group."""
    common = ["-m", "icejax", command, "-m", str(folder), "--mesh", f"heads={count}", *arguments]
    group = ["--coordinator", coordinator(), "--processes", str(count)]
    return [[*common, *group, "--process", str(i)] for i in range(count)]


def generate_in_cluster(folder: Path, *arguments: str) -> list[list[str]]:
    """Returns the arguments for two processes that read a cluster's variables."""
    return [["-m", "icejax", "generate", "-m", str(folder), "--mesh", "heads=2", "--coordinator", "auto", *arguments]] * 2


def leader_worker_set() -> Callable[[int], dict[str, str]]:
    """Returns the variables that Kubernetes sets in the pods of a LeaderWorkerSet of two."""
    host, port = coordinator().split(":")
    common = dict(LWS_LEADER_ADDRESS=host, LWS_GROUP_SIZE="2", JAX_COORDINATOR_PORT=port)
    return lambda number: common | dict(LWS_WORKER_INDEX=str(number))


def slurm() -> Callable[[int], dict[str, str]]:
    """Returns the variables that SLURM sets in the two tasks of a job."""
    address = coordinator()
    host, port = address.split(":")
    common = dict(SLURM_JOB_ID="1", SLURM_STEP_NODELIST=host, SLURM_NTASKS="2", SLURM_LOCALID="0", SLURM_STEP_NUM_NODES="2")
    common |= dict(JAX_COORDINATOR_PORT=port, JAX_COORDINATOR_BIND_ADDRESS=address)
    return lambda number: common | dict(SLURM_PROCID=str(number))


def model_folder(folder: Path) -> Path:
    """Writes a small random model with a tokenizer of bytes."""
    file = small_tokenizers.byte_level()
    small_tokenizers.write(folder, file)
    return checkpoint(LLAMA | dict(vocab_size=len(file["model"]["vocab"]), num_hidden_layers=1), folder)


def engine_answers(count: int) -> Iterator[dict]:
    """Yields how an engine over the group compares with one on one device, for a cache on the device and one with pages."""
    document = prompts_of((600,))[0]
    prompts = [*prompts_of((40, 90, 20, 70)), *([*document, 7 * i] for i in range(3))]
    warm = icejax.Sampling(temperature=1.0, logit_bias={5: 2.0})
    with tempfile.TemporaryDirectory() as folder:
        one, several = (load_model(checkpoint(LLAMA, Path(folder)), mesh=mesh) for mesh in (None, count))
    for cache in (icejax.Full(), icejax.Clustered(budget=2048, page_size=8, compact_every=32)):
        texts = []
        for model in (one, several):
            sizes = dict(batch_size=2, context_length=1024, max_new_tokens=16, prefix_memory=2**24)
            with icejax.Engine(model, Letters(), cache=cache, **sizes) as engine:
                if model is several and not processes.is_first():
                    engine.follow()
                    continue
                handles = [engine.submit(prompt, max_new_tokens=4 + 2 * i) for i, prompt in enumerate(prompts)]
                handles.append(engine.submit(prompts[0], n=2, sampling=warm, seed=3, max_new_tokens=9))
                engine.submit(prompts[1], max_new_tokens=16).cancel()
                answers = [answer for handle in handles for answer in handle.results()]
                engine.compile_for(engine.step_sizes[-1])
                answers += engine.submit(prompts[3], max_new_tokens=16).results()
                texts.append([(answer.token_ids, answer.finish_reason, answer.cached_tokens) for answer in answers])
        yield dict(cache=type(cache).__name__, same=texts[0] == texts[-1], cached=[cached for *_, cached in texts[-1]])


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    address, count, number, *names = sys.argv[1:]
    processes.join(address, processes=int(count), process=int(number))
    for result in engine_answers(int(count)) if names == ["engine"] else ():
        if processes.is_first():
            print(json.dumps(result), flush=True)
    for name in names if names != ["engine"] else ():
        result = dict(case=name, devices=len(jax.devices())) | compared(name, int(count))
        if processes.is_first():
            print(json.dumps(result), flush=True)
    processes.leave()
