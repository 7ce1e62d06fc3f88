"""Memory of a chat: ``python -m bench.memory --model DIR --caches full,clustered``.

Every row runs `icejax chat` in a process of its own: it loads the model and answers two messages of `--words` words. The output
is one JSON line per row with the resident bytes of the process (Linux alone tells them): after the imports, after loading, and
after each answer; and the bytes of its weights and of its cache, reserved room included. `excess` is the memory of the
process after the second answer, without its imports, over weights and cache: 1.3 means 30% more than them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from flax import nnx

from bench.flags import listed
from bench.steps.sizes import nbytes
from icejax.cache.registry import names
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer
from icejax.commands import options
from icejax.commands.chat import Chat
from icejax.runtime import devices
from icejax.session.usage import session_usage

ROLLUP = Path("/proc/self/smaps_rollup")


def resident() -> int:
    """Returns the bytes of this process in memory; InputError where the system does not tell them."""
    if not ROLLUP.exists():
        raise InputError(f"the memory of a process is read from {ROLLUP}, which only Linux has")
    (line,) = (line for line in ROLLUP.read_text().splitlines() if line.startswith("Rss:"))
    return int(line.split()[1]) * 2**10


def measure(cache: str, words: int, chat_options: list[str]) -> dict:
    """Returns one row; the caller runs it in a process of its own."""
    sys.modules.setdefault("torch", None)  # as the command does
    importlib.import_module("transformers").AutoTokenizer  # noqa: B018 (transformers imports a module when a name is used)
    imports = resident()
    arguments = options.chat_parser("bench.memory").parse_args(["--cache", cache, "--quiet", *chat_options])
    with contextlib.redirect_stdout(sys.stderr):  # the answers
        chat = Chat(arguments, options.answer(arguments), None, name="bench.memory")
        loaded, answered = resident(), []
        for word in ("one", "two"):
            chat.take(" ".join([word] * words))
            answered.append(resident())
    usage, weights = session_usage(chat._session), nbytes(nnx.state(chat._model))
    if usage is None:
        raise InputError("the chat has no answer: the line above says why")
    held = weights + usage.device + usage.host
    return dict(
        cache=cache, words=words, context_length=chat.context_length, imports=imports, weights=weights,
        cache_bytes=usage.device + usage.host, loaded=loaded, answer_1=answered[0], answer_2=answered[1],
        excess=round((answered[1] - imports) / held, 3), device=devices.device_name(),
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, metavar="DIR", help="Hugging Face folder with a chat template")
    parser.add_argument("--caches", default="full,clustered", help="comma-separated (default: %(default)s)")
    parser.add_argument("--words", type=int, default=500, help="of a message (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=32, help="of an answer (default: %(default)s)")
    parser.add_argument("--context-length", type=int, help="default: the model's")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16")
    parser.add_argument("--compile-cache", default="none", help="default: %(default)s, so that every program is compiled")
    arguments = parser.parse_args(argv)
    try:
        caches = listed("--caches", arguments.caches, names())
        integer("--words", arguments.words)
        chat_options = ["--model", arguments.model, "--max-new-tokens", str(integer("--new-tokens", arguments.new_tokens))]
        chat_options += ["--compile-cache", arguments.compile_cache]
        for name in ("context_length", "dtype"):
            if getattr(arguments, name) is not None:
                chat_options += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
        spawn = multiprocessing.get_context("spawn")
        for cache in caches:
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                print(json.dumps(process.submit(measure, cache, arguments.words, chat_options).result()), flush=True)
    except InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
