"""The options of ``python -m icejax.generate``, and what their texts mean."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from icejax import jsontext
from icejax.cache import POLICIES, CachePolicy
from icejax.errors import InputError, quoted
from icejax.generation import ASSETS, MAX_NEW_TOKENS
from icejax.sampling import Sampling

DEFAULT_CACHE = "clustered"
BUNDLED_PROMPT = ASSETS / "prompt.txt"


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
    parser.add_argument(
        "--host-memory-limit", type=float, metavar="GIB", help="host memory the cache may take (default: what is free)"
    )
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
    parser.add_argument(
        "--explain", type=Path, metavar="FILE.png", help="draw which positions of the prompt each layer looked at; also as JSON"
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
    raise InputError(f"cache option {key} must be {expected}, got {quoted(value)}")


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
        return content.decode().removeprefix("\ufeff")  # a byte-order mark
    except UnicodeDecodeError as error:
        raise InputError(f"{source} is not UTF-8 text (byte {error.start}): convert it first") from None


def _jsonl_prompt(path: Path, number: int, line: str) -> str:
    found = jsontext.parse(line, source=f"{path}, line {number}").get("prompt")
    if not isinstance(found, str):
        raise InputError(f"{path}, line {number}: expected a text 'prompt' in the JSON object, got {quoted(found)}")
    return found
