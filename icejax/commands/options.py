"""The options of the command lines."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import NoReturn

from icejax.cache import POLICIES, CachePolicy
from icejax.cache.options import cache_options, make_policy
from icejax.generation import MAX_NEW_TOKENS
from icejax.ranges import number
from icejax.sampling import Sampling

DEFAULT_CACHE = "clustered"


class Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _options_by_cache() -> str:
    named = {name: ", ".join(field.name for field in dataclasses.fields(policy)) for name, policy in POLICIES.items()}
    return "; ".join(f"{name}: {options or 'none'}" for name, options in named.items())


def parser(name: str) -> argparse.ArgumentParser:
    """Returns the parser of `generate`; defaults are those of the dataclasses."""
    parser = Parser(prog=name, description="Generate text from a long prompt. Without arguments: the bundled example.")
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


def sampling(arguments: argparse.Namespace) -> Sampling:
    """Returns how tokens are chosen; InputError for an option that is out of range."""
    return Sampling(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Sampling)})


def policy(arguments: argparse.Namespace) -> CachePolicy:
    """Returns the cache policy; InputError for an unknown one or an option that is out of range."""
    named = cache_options(arguments.cache_option, budget=arguments.budget, page_size=arguments.page_size)
    return make_policy(arguments.cache or DEFAULT_CACHE, named)


def cache_named(arguments: argparse.Namespace) -> bool:
    """Says whether the command line asks for a cache of its own choice, which a session's must then be."""
    named = (arguments.budget, arguments.page_size)
    return arguments.cache is not None or bool(arguments.cache_option) or any(x is not None for x in named)


def memory_limit(arguments: argparse.Namespace) -> int | None:
    """Returns the bytes of host memory that the cache may take; InputError for what is no such number."""
    if arguments.host_memory_limit is None:
        return None
    return int(number("--host-memory-limit", arguments.host_memory_limit, least=0, most=1e9, above=True) * 2**30)
