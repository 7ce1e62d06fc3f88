"""A GGUF file in icejax and in llama.cpp, on the same machine: ``python -m bench.llama_cpp > rows.jsonl``.

A subject is a program with a cache. Each reads the same token ids of real text and answers greedily, in a process of its own;
subjects of one length run one after another. The output is one JSON line per subject and length: seconds to the first token,
seconds per token after it (the median of an answer), both the median of `--repeats` runs, the peak memory of the process, and
the machine's load before the run. A run before them compiles icejax's programs, and reads llama.cpp's weights from the disk.

llama.cpp runs in Node.js: npm installs node-llama-cpp and its binary for the CPU in the user's cache directory, where they are
missing. `--chat FILE` asks with a message in the model's chat template instead. `--page rows.jsonl` prints the tables of such
rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import psutil

import icejax
from bench import published
from bench.flags import listed, numbers
from bench.markdown import table
from icejax.api.prompts import chat
from icejax.cache.options import make_policy
from icejax.checkpoint.folder import resolve
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer
from icejax.runtime import devices
from icejax.runtime.compile_cache import keep_programs
from icejax.text.encode import encode
from icejax.text.tokenizer import load_tokenizer

ROOT, SCRIPT = Path(__file__).parent.parent, Path(__file__).with_suffix(".mjs")
VERSION = "3.21.1"
PACKAGES = (f"node-llama-cpp@{VERSION}", f"@node-llama-cpp/linux-x64@{VERSION}")
THEIRS = {  # ggml's type of keys and values, and whether attention is flash attention, which a quantised cache needs
    "llama.cpp f16": ("F16", False),
    "llama.cpp f16, flash attention": ("F16", True),
    "llama.cpp q8_0, flash attention": ("Q8_0", True),
}
OURS = {f"icejax {name}": name for name in ("full", "clustered")}
SUBJECTS = (*OURS, *THEIRS)


def text_tokens(tokenizer: Any, count: int) -> list[int]:
    """Returns the first `count` token ids of icejax's source code."""
    text, ids = "", []
    for file in sorted((ROOT / "icejax").rglob("*.py")):
        text += file.read_text()
        if len(text) > 6 * count and len(ids := tokenizer(text).input_ids) >= count:
            return ids[:count]
    raise InputError(f"icejax's source code has {len(ids)} tokens: expected a smaller number than {count}")


def prompt_tokens(tokenizer: Any, asked: int | Path) -> list[int]:
    """Returns the token ids of a prompt: as many as asked of icejax's source code, or a file's text as a chat's one message."""
    if isinstance(asked, int):
        return text_tokens(tokenizer, asked)
    return encode(tokenizer, chat(tokenizer, asked.read_text()))


def ours(cache: str, model: str, asked: int | Path, new_tokens: int, repeats: int) -> dict[str, Any]:
    """Returns the measurements of icejax; the caller runs it in a process of its own."""
    keep_programs(None)
    loaded, tokenizer = icejax.load(model)
    prompt = prompt_tokens(tokenizer, asked)
    options = dict(cache=make_policy(cache, {}), max_new_tokens=new_tokens + 1)
    answers = [icejax.generate(loaded, tokenizer, [prompt], **options)[0] for _ in range(1 + repeats)][1:]
    return dict(
        prompt=prompt,
        answers=[answer.token_ids for answer in answers],
        ttft_s=[answer.ttft_s for answer in answers],
        tpot_s=[answer.tpot_s for answer in answers],
        peak_rss_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        version=f"jax {jax.__version__}, float32",
        device=devices.device_name(),
    )


def theirs(subject: str, folder: Path, model: str, prompt: Sequence[int], new_tokens: int, repeats: int) -> dict[str, Any]:
    """Returns the measurements of llama.cpp; InputError if it fails."""
    cache_type, flash = THEIRS[subject]
    job = dict(
        model=model, tokens=list(prompt), new_tokens=new_tokens, repeats=repeats, cache_type=cache_type, flash_attention=flash,
        threads=psutil.cpu_count(),
    )  # fmt: skip
    process = subprocess.run(["node", str(SCRIPT), str(folder)], input=json.dumps(job), capture_output=True, text=True)
    if process.returncode:
        raise InputError(f"llama.cpp fails: {' '.join(process.stderr.split())[-200:]}")
    found = json.loads(process.stdout)
    return dict(
        answers=[run["answer"] for run in found["runs"]],
        ttft_s=[run["seconds"][0] for run in found["runs"]],
        tpot_s=[statistics.median(run["seconds"][1:]) for run in found["runs"]],
        peak_rss_bytes=found["peak_rss_bytes"],
        version=f"node-llama-cpp {VERSION}",
        device="cpu",
    )


def install() -> Path:
    """Returns the folder with node-llama-cpp, installed by npm if it is not there."""
    folder = published.home().parent / f"node-llama-cpp-{VERSION}"
    if folder.exists():
        return folder
    if missing := [program for program in ("node", "npm") if shutil.which(program) is None]:
        raise InputError(f"llama.cpp runs in Node.js, and {missing[0]} is not installed: install it, or name other --subjects")
    print(f"installing {' and '.join(PACKAGES)}", file=sys.stderr, flush=True)
    unfinished = folder.with_suffix(".part")
    unfinished.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--prefix", str(unfinished), "--ignore-scripts", "--omit=optional", *PACKAGES]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise InputError(f"npm cannot install llama.cpp: {' '.join(process.stderr.split())[-200:]}")
    unfinished.replace(folder)
    return folder


def rows(
    model: str, file: Path, prompts: Sequence[int | Path], subjects: list[str], new_tokens: int, repeats: int
) -> Iterator[dict]:
    """Yields a row per prompt (`prompt_tokens`) and subject."""
    folder = install() if set(subjects) & THEIRS.keys() else None
    spawn, sizes = multiprocessing.get_context("spawn"), (new_tokens, repeats)
    for asked, subject in itertools.product(prompts, subjects):
        load = os.getloadavg()[0]
        if subject in OURS:
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                found = process.submit(ours, OURS[subject], str(file), asked, *sizes).result()
                prompt = found["prompt"]
        else:
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                prompt = process.submit(_prompt, str(file), asked).result()
            found = theirs(subject, folder, str(file), prompt, *sizes)
        times = {name: round(statistics.median(found[name]), 4) for name in ("ttft_s", "tpot_s")}
        yield dict(model=model, file=file.name, subject=subject, length=len(prompt), new_tokens=new_tokens) | times | dict(
            ttft_runs_s=[round(x, 4) for x in found["ttft_s"]], tpot_runs_s=[round(x, 4) for x in found["tpot_s"]],
            answer=found["answers"][0], peak_rss_bytes=found["peak_rss_bytes"], load=round(load, 2), cores=psutil.cpu_count(),
            repeats=repeats, version=found["version"],
        )  # fmt: skip


def _prompt(model: str, asked: int | Path) -> list[int]:
    return prompt_tokens(load_tokenizer(resolve(model)), asked)


def page(rows: list[dict]) -> Iterator[str]:
    """Yields the lines of a table for each model: a row per subject; seconds to the first token, ms per token, GB at most."""
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = {(row["subject"], row["length"]): row for row in rows if row["model"] == model}
        lengths = sorted({length for _, length in cells})
        yield from (f"### {model}", "")
        heads = [f"{length:,}: first token, s; ms per token; peak, GB" for length in lengths]
        subjects = dict.fromkeys(subject for subject, _ in cells)
        yield from table(["", *heads], ([name, *(_cell(cells.get((name, n))) for n in lengths)] for name in subjects))
        yield ""


def _cell(row: dict | None) -> str | None:
    if row is None:
        return None
    return f"{row['ttft_s']:.2f}; {1e3 * row['tpot_s']:.1f}; {row['peak_rss_bytes'] / 1e9:.2f}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.llama_cpp", description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="smollm2-135m,qwen2.5-coder-0.5b", help="of bench.published (default: %(default)s)")
    parser.add_argument("--lengths", default="512,4096,7900", help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--chat", type=Path, metavar="FILE", help="a message to ask in the chat template, instead of --lengths")
    parser.add_argument("--subjects", help=f"separated by semicolons, of {'; '.join(SUBJECTS)} (default: all)")
    parser.add_argument("--new-tokens", type=int, default=64, help="timed tokens after the first (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="timed runs of each row (default: %(default)s)")
    parser.add_argument("--page", type=Path, metavar="FILE.jsonl", help="only print the tables of these rows")
    arguments = parser.parse_args(argv)
    try:
        if arguments.page is not None:
            print(*page([json.loads(line) for line in arguments.page.read_text().splitlines()]), sep="\n")
            return 0
        models, lengths = listed("--models", arguments.models, published.MODELS), numbers("--lengths", arguments.lengths)
        subjects = (arguments.subjects or ";".join(SUBJECTS)).split(";")
        if unknown := [subject for subject in subjects if subject not in SUBJECTS]:
            raise InputError(f"--subjects must be of {'; '.join(SUBJECTS)}, got {'; '.join(unknown)!r}")
        sizes = [integer(f"--{name}", getattr(arguments, name.replace("-", "_"))) for name in ("new-tokens", "repeats")]
        prompts = lengths if arguments.chat is None else [arguments.chat]
        if arguments.chat is not None and not arguments.chat.is_file():
            raise InputError(f"--chat must be a text file, found none at {arguments.chat}")
        for model in models:
            file = published.gguf(model, say=lambda line: print(line, file=sys.stderr, flush=True))
            for row in rows(model, file, prompts, subjects, *sizes):
                print(json.dumps(row), flush=True)
    except (InputError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
