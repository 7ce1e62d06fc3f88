"""The command line of ``python -m icejax.generate``: answers on stdout, progress and cost on stderr."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from icejax.cache import POLICIES, CachePolicy
from icejax.errors import InputError
from icejax.generation import ASSETS, MAX_NEW_TOKENS, GenerationResponse, join, load, stream_generate
from icejax.models import CausalLM
from icejax.prompts import chat, encode
from icejax.sampling import Sampling
from icejax.session import Session

DEFAULT_CACHE = "clustered"
BUNDLED_PROMPT = ASSETS / "prompt.txt"
INTERRUPTED, BROKEN_PIPE = 130, 141  # as a shell reports the signals


class Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _options_by_cache() -> str:
    named = {name: ", ".join(field.name for field in dataclasses.fields(policy)) for name, policy in POLICIES.items()}
    return "; ".join(f"{name}: {options or 'none'}" for name, options in named.items())


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser; defaults are those of the dataclasses."""
    parser = Parser(
        prog="icejax.generate", description="Generate text from a long prompt. Without arguments: the bundled example."
    )
    parser.add_argument("--model", help="Hugging Face folder, icejax folder or hub id (default: the bundled checkpoint)")
    parser.add_argument("--prompt", action="append", default=[], help="text; repeatable; - reads stdin")
    parser.add_argument("--prompt-file", type=Path, help="text file, or .jsonl with one object with 'prompt' per line")
    parser.add_argument("--chat", action="store_true", help="put each prompt into the tokenizer's chat template")
    parser.add_argument("--system", help="system message, with --chat")
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS, metavar="N", help="default: %(default)s")
    parser.add_argument("--context-length", type=int, metavar="N", help="tokens of prompt and answer (default: the model's)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="prompts run together (default: %(default)s)")
    for field in dataclasses.fields(Sampling):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default, metavar="X", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this string; repeatable")
    parser.add_argument(
        "--cache", metavar="NAME", help=f"one of {', '.join(POLICIES)} (default: {DEFAULT_CACHE}, or the session's)"
    )
    parser.add_argument("--budget", type=int, metavar="N", help="tokens attended exactly per KV head and layer (default: 256)")
    parser.add_argument("--page-size", type=int, metavar="N", help="tokens of a page (default: 16)")
    parser.add_argument(
        "--cache-option", action="append", default=[], metavar="KEY=VALUE", help=f"repeatable; {_options_by_cache()}"
    )
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: the checkpoint's; float32 on CPU)")
    parser.add_argument(
        "--session",
        type=Path,
        metavar="DIR",
        help="put the prompts one after another to the session kept there, or to a new one",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt")
    parser.add_argument("--no-stream", action="store_true", help="print an answer when it is whole")
    parser.add_argument("--compile-cache", metavar="DIR", help="where compiled programs are kept; 'none' keeps none")
    return parser


def make_policy(name: str, options: dict[str, str | int]) -> CachePolicy:
    """Returns the policy `name` with `options`, text or numbers; InputError that lists the valid names or options."""
    if name not in POLICIES:
        raise InputError(f"unknown cache {name!r}: expected one of {', '.join(POLICIES)}")
    kinds = typing.get_type_hints(POLICIES[name])
    valid = [field.name for field in dataclasses.fields(POLICIES[name])]
    values = {}
    for key, value in options.items():
        if key not in valid:
            expected = f"expected one of {', '.join(valid)}" if valid else "it has none"
            raise InputError(f"cache {name!r} has no option {key!r}: {expected}")
        values[key] = _parse(key, value, kinds[key])
    return POLICIES[name](**values)


def cache_options(texts: Sequence[str], **named: int | None) -> dict[str, str | int]:
    """Returns the options of KEY=VALUE texts, and those named ones that are given."""
    options: dict[str, str | int] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign:
            raise InputError(f"--cache-option must be KEY=VALUE, got {text!r}")
        options[key] = value
    return options | {key: value for key, value in named.items() if value is not None}


def _parse(key: str, value: str | int, kind: Any) -> Any:
    if typing.get_origin(kind) is typing.Literal:
        return value  # the policy knows which there are
    choices = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if type(None) in choices and value == "none":
        return None
    for choice in choices:
        if choice is bool and value in ("true", "false"):
            return value == "true"
        if choice in (int, float, str):
            try:
                return choice(value)
            except ValueError:
                continue
    expected = " or ".join(c.__name__ for c in choices if c is not type(None))
    raise InputError(f"cache option {key} must be {expected}, got {value!r}")


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """Returns the prompts of the command line; InputError if there is none or a file cannot be read."""
    prompts = [_decode("stdin", sys.stdin.buffer.read()) if prompt == "-" else prompt for prompt in arguments.prompt]
    path = arguments.prompt_file
    if path is None and not prompts:
        if arguments.model is not None:
            raise InputError("no prompt: give --prompt TEXT, --prompt - or --prompt-file FILE")
        path = BUNDLED_PROMPT
    if path is None:
        return prompts
    try:
        text = _decode(str(path), path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    if path.suffix != ".jsonl":
        return [*prompts, text]
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would cut at characters JSON leaves as they are
        if line.strip():
            prompts.append(_jsonl_prompt(path, number, line))
    if not prompts:
        raise InputError(f"{path} holds no prompt: expected one JSON object with 'prompt' per line")
    return prompts


def _decode(source: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{source} is not UTF-8 text (byte {error.start}): convert it first") from None


def _jsonl_prompt(path: Path, number: int, line: str) -> str:
    try:
        found = json.loads(line)["prompt"]
    except (json.JSONDecodeError, KeyError, TypeError):
        found = None
    if not isinstance(found, str):
        raise InputError(f"{path}, line {number}: expected a JSON object with a text 'prompt'")
    return found


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status: 2 for bad input, 130 for Ctrl-C."""
    arguments = build_parser().parse_args(argv)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would warn that there is no PyTorch
    console = Console(stderr=True)
    try:
        run(arguments, console)
        sys.stdout.flush()
    except InputError as error:
        print(f"icejax.generate: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        console.print("\ninterrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # What Python would flush at exit goes nowhere, or it complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return 0


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Answers the prompts of the command line; raises InputError for bad input."""
    sampling = Sampling(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Sampling)})
    options = cache_options(arguments.cache_option, budget=arguments.budget, page_size=arguments.page_size)
    policy = make_policy(arguments.cache or DEFAULT_CACHE, options)
    if arguments.system is not None and not arguments.chat:
        raise InputError("--system needs --chat: it is a message of the chat template")
    if arguments.batch_size < 1:
        raise InputError(f"--batch-size must be at least 1, got {arguments.batch_size}")
    prompts = read_prompts(arguments)
    _use_compile_cache(arguments.compile_cache)
    with _progress(console) as bars:
        bar = bars.add_task("load", total=None)
        model, tokenizer = load(
            arguments.model or ASSETS,
            dtype=arguments.dtype,
            progress=lambda _, done, total: bars.update(bar, completed=done, total=total),
        )
    if arguments.chat:
        prompts = [chat(tokenizer, prompt, system=arguments.system) for prompt in prompts]
    if arguments.session is not None:
        _run_session(arguments, console, model, tokenizer, policy if _cache_named(arguments) else None, sampling, prompts)
        return
    encode(
        model, tokenizer, prompts, special_tokens=not arguments.chat, context_length=arguments.context_length
    )  # all, before any
    responses = []
    for start in range(0, len(prompts), arguments.batch_size):
        with _progress(console) as bars:
            layers = bars.add_task("prefill layers", total=model.config.num_hidden_layers)
            stream = stream_generate(
                model,
                tokenizer,
                prompts[start : start + arguments.batch_size],
                cache=policy,
                sampling=sampling,
                max_new_tokens=arguments.max_new_tokens,
                stop=arguments.stop,
                seed=arguments.seed,
                special_tokens=not arguments.chat,
                context_length=arguments.context_length,
                progress=lambda done, layers=layers, bars=bars: bars.update(layers, completed=done),
            )
            responses += _show(stream, arguments, bars, alone=len(prompts) == 1)
    if console.is_terminal or _is_example(arguments):
        console.print(_table(responses))


def _run_session(
    arguments: argparse.Namespace,
    console: Console,
    model: CausalLM,
    tokenizer: Any,
    policy: CachePolicy | None,
    sampling: Sampling,
    prompts: list[str],
) -> None:
    """Puts the prompts behind one another to the session of the command line, and keeps it after each answer."""
    if arguments.session.exists():
        session = Session.load(arguments.session, model, tokenizer, cache=policy)
    else:
        session = Session(model, tokenizer, cache=policy, context_length=arguments.context_length)
    responses = []
    for prompt in prompts:
        with _progress(console) as bars:
            stream = session.stream(
                prompt,
                sampling=sampling,
                max_new_tokens=arguments.max_new_tokens,
                stop=arguments.stop,
                seed=arguments.seed,
                special_tokens=not arguments.chat,
            )
            responses += _show(stream, arguments, bars, alone=len(prompts) == 1)
        session.save(arguments.session)
    if console.is_terminal:
        console.print(_table(responses))


def _cache_named(arguments: argparse.Namespace) -> bool:
    """Says whether the command line asks for a cache of its own choice, which a session's must then be."""
    options = (arguments.budget, arguments.page_size)
    return arguments.cache is not None or bool(arguments.cache_option) or any(x is not None for x in options)


def _show(stream, arguments: argparse.Namespace, bars: Progress, *, alone: bool) -> list[GenerationResponse]:
    """Prints the answers of one batch, a single one as it comes, and returns them whole."""
    streaming = alone and not arguments.json and not arguments.no_stream
    pieces: dict[int, list[GenerationResponse]] = {}
    tokens = None
    for piece in stream:
        if streaming:
            bars.stop()  # the text is progress enough, and shares the terminal
            print(piece.text, end="", flush=True)
        elif tokens is None:
            tokens = bars.add_task("tokens", total=arguments.max_new_tokens)
        else:
            bars.update(tokens, completed=piece.new_tokens)
        pieces.setdefault(piece.row, []).append(piece)
    bars.stop()
    whole = [join(pieces[row]) for row in sorted(pieces)]
    if streaming:
        print(flush=True)
    else:
        for response in whole:
            print(_json(response) if arguments.json else response.text, flush=True)
    return whole


def _json(response: GenerationResponse) -> str:
    fields = dataclasses.asdict(response)
    del fields["row"]  # the order of the lines
    return json.dumps(fields, ensure_ascii=False)


def _use_compile_cache(folder: str | None) -> None:
    """Turns JAX's persistent compilation cache on: compiling takes longer than a short answer."""
    if folder == "none":
        return
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    jax.config.update("jax_compilation_cache_dir", folder or str(Path(home) / "icejax" / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _is_example(arguments: argparse.Namespace) -> bool:
    return arguments.model is None and not arguments.prompt and arguments.prompt_file is None and not arguments.json


def _progress(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _table(responses: list[GenerationResponse]) -> Table:
    """The cost of every answer."""
    first = responses[0]
    budget = f", budget {first.budget}" if first.budget is not None else ""
    table = Table(title=f"{first.cache} cache{budget}, {first.dtype}, {first.device}", box=SIMPLE, pad_edge=False)
    for name in ("prompt", "new", "ended by", "first token", "per token", "KV device", "KV host", "full KV"):
        table.add_column(name, justify="right")
    for r in responses:
        tpot = f"{r.tpot_s * 1e3:.1f} ms" if r.tpot_s is not None else "-"
        sizes = (r.device_kv_bytes + r.digest_bytes, r.host_kv_bytes, r.full_kv_bytes)
        shown = [f"{size / 2**20:.1f} MiB" for size in sizes]
        table.add_row(str(r.prompt_tokens), str(r.new_tokens), r.finish_reason, f"{r.ttft_s:.2f} s", tpot, *shown)
    return table
