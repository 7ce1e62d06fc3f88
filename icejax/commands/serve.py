"""The command ``icejax serve``: one model over HTTP, as OpenAI's API has it, until a signal ends it."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import os
from pathlib import Path
from typing import Any

from icejax.checks.errors import InputError, quoted
from icejax.checks.numbers import integer, number
from icejax.commands import options
from icejax.commands.group import in_group
from icejax.commands.options import Parser
from icejax.commands.terminal.process import draining, ending, write
from icejax.commands.terminal.stderr import stderr_console

NEEDED = ("starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance")
KEY_VARIABLE = "ICEJAX_API_KEY"
MAX_NEW_TOKENS, WARMUP = 4096, 2048


def main(argv: list[str] | None = None, *, name: str = "icejax serve") -> int:
    """Runs the command line and returns the exit status of `process.ending`."""
    return ending(name, lambda: _parse_and_run(argv, name))


def parser(name: str) -> Parser:
    """Returns the parser of `serve`."""
    parser = Parser(prog=name, description="Answer over HTTP, as OpenAI's API does, many requests at once.")
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", metavar="NAME", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="0: any that is free (default: %(default)s)")
    key_help = f"key that requests must bring; repeatable; also ${KEY_VARIABLE}, which other users of the machine cannot see"
    group.add_argument("--api-key", action="append", default=[], metavar="KEY", help=key_help)
    group.add_argument("--no-auth", action="store_true", help="ask for no key, on another host than this machine too")
    served_help = "name of the model in requests; repeatable (default: the last part of --model)"
    group.add_argument("--served-model-name", action="append", default=[], metavar="NAME", help=served_help)
    drain_help = "most seconds that answers may take after Ctrl-C or SIGTERM (default: %(default)s)"
    group.add_argument("--drain-seconds", type=float, default=60.0, metavar="S", help=drain_help)
    options.add_quiet(group)
    options.add_model(parser)
    group = parser.add_argument_group("engine")
    group.add_argument("--slots", type=int, default=4, metavar="N", help="answers that decode at once (default: %(default)s)")
    limit_help = "most tokens of an answer (default: %(default)s, or what the context has room for)"
    group.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS, metavar="N", help=limit_help)
    group.add_argument("--max-queue", type=int, default=256, metavar="N", help="answers that may wait (default: %(default)s)")
    prefix_help = "host memory for the caches of earlier prompts (default: %(default)s; 0: none)"
    group.add_argument("--prefix-memory", type=float, default=1.0, metavar="GIB", help=prefix_help)
    dir_help = "folder where caches that several prompts share outlive the server (default: none)"
    group.add_argument("--prefix-dir", type=Path, metavar="FOLDER", help=dir_help)
    disk_help = "most that all files in --prefix-dir take (default: %(default)s)"
    group.add_argument("--prefix-disk", type=float, default=64.0, metavar="GIB", help=disk_help)
    share_help = "most of the time that prompts may take from answers that run (default: %(default)s)"
    group.add_argument("--prefill-share", type=float, default=0.7, metavar="X", help=share_help)
    warm_help = "compile at the start for prompts of up to N tokens (default: %(default)s; 0: for none)"
    group.add_argument("--warmup", type=int, default=WARMUP, metavar="N", help=warm_help)
    model_help = "sampling of requests that name none, from generation_config.json (default: OpenAI's, temperature 1)"
    group.add_argument("--sampling", choices=["model"], help=model_help)
    options.add_cache(parser)
    options.add_processes(parser, "0 answers requests")
    return parser


def _parse_and_run(argv: list[str] | None, name: str) -> int:
    arguments = parser(name).parse_args(argv)
    check(arguments)
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise InputError(f"icejax serve needs {', '.join(missing)}: pip install 'icejax[serve]'")
    from icejax.commands.serving import run  # imports what the extra has

    with in_group(arguments, name, alone=("prefix_dir",)):
        return run(arguments, stderr_console(), tell=write, draining=draining)


def check(arguments: argparse.Namespace) -> None:
    """Raises InputError for an option that is out of range, before anything is loaded."""
    integer("--port", arguments.port, least=0, most=65535)
    integer("--slots", arguments.slots, most=2**16)
    integer("--max-new-tokens", arguments.max_new_tokens)
    integer("--max-queue", arguments.max_queue, least=0, most=2**20)
    integer("--warmup", arguments.warmup, least=0)
    number("--prefix-memory", arguments.prefix_memory, least=0, most=2**20)
    number("--prefix-disk", arguments.prefix_disk, least=0, most=2**20)
    number("--prefill-share", arguments.prefill_share, least=0, most=1, above=True)
    number("--drain-seconds", arguments.drain_seconds, least=0, most=1e6)
    options.policy(arguments)
    options.template_arguments(arguments)
    options.memory_limits(arguments)
    if arguments.prefix_dir is not None and not arguments.prefix_memory:
        raise InputError("--prefix-dir stores what --prefix-memory holds, which is 0: give both, or leave --prefix-dir out")
    for name in arguments.served_model_name:
        if not name.strip() or not name.isprintable():
            raise InputError(f"--served-model-name must be printable text, got {quoted(name)}")
    for key in keys(arguments):
        if not (key.isascii() and key.isprintable() and " " not in key and key):
            raise InputError("an API key must be ASCII text without spaces, because it travels in an HTTP header")
    if not (is_loopback(arguments.host) or keys(arguments) or arguments.no_auth):
        raise InputError(
            f"--host {arguments.host} lets other machines in: give --api-key KEY (or ${KEY_VARIABLE}), "
            "or --no-auth if all of them may ask"
        )


def keys(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Returns the keys of the command line and the environment."""
    if arguments.no_auth and arguments.api_key:
        raise InputError("--no-auth asks for no key: leave --api-key out, or --no-auth")
    variable = os.environ.get(KEY_VARIABLE)
    return () if arguments.no_auth else (*arguments.api_key, *([variable] if variable else []))


def is_loopback(host: str) -> bool:
    """Says whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def model_names(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Returns the names that requests know the model by."""
    own = "bundled" if arguments.model is None else Path(str(arguments.model)).expanduser().name or str(arguments.model)
    return tuple(dict.fromkeys(arguments.served_model_name)) or (own,)


def url(host: str, port: int) -> str:
    """Returns the address that clients use."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the sizes of an `Engine`, and the folder of its prefixes."""
    return dict(
        batch_size=arguments.slots,
        context_length=arguments.context_length,
        max_new_tokens=arguments.max_new_tokens,
        prefill_share=arguments.prefill_share,
        prefix_memory=int(arguments.prefix_memory * 2**30),
        prefix_dir=arguments.prefix_dir,
        prefix_disk=int(arguments.prefix_disk * 2**30),
        max_queue=2**31 - 1,  # the server counts what waits
    )
