"""Runs the server of ``icejax serve``; imported when the packages of the extra `serve` are known to be there."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console

from icejax.api import generate
from icejax.api.engine import Engine
from icejax.checkpoint.folder import resolve
from icejax.checkpoint.generation_config import proposed_sampling
from icejax.commands import options, serve
from icejax.commands.group import abandon, is_first
from icejax.commands.loading import load, tell_cache
from icejax.commands.terminal.phases import Phases
from icejax.engine.sampling import Sampling
from icejax.models.decoder import CausalLM
from icejax.runtime.out_of_memory import report_out_of_memory
from icejax.runtime.progress import WARM_UP
from icejax.serving.lifecycle import EngineFailed, Server, Start
from icejax.serving.service import Service
from icejax.serving.warm import warm_up


def prepared(arguments: argparse.Namespace, console: Console) -> tuple[Service, Start]:
    """Returns the service of the command line, and what loads its model."""
    names, keys, host = serve.model_names(arguments), serve.keys(arguments), arguments.host
    is_private = serve.is_loopback(host) and not keys and not arguments.no_auth
    service = Service(
        names=names,
        root=str(arguments.model or names[0]),
        keys=keys,
        places=arguments.slots,
        max_queue=arguments.max_queue,
        template_arguments=options.template_arguments(arguments),
        parse_special=arguments.parse_special,
        hosts=tuple(dict.fromkeys(("localhost", "127.0.0.1", "::1", host))) if is_private else (),
    )

    def start() -> tuple[CausalLM, Any, Engine]:
        model, tokenizer = load(arguments, console)
        if arguments.sampling is not None:
            folder = resolve(generate.ASSETS if arguments.model is None else arguments.model, revision=arguments.revision)
            service.sampling = proposed_sampling(folder)
            Sampling(**service.sampling)
        engine = _engine(arguments, model, tokenizer)
        if engine.cache_choice is not None:
            tell_cache(arguments, engine.cache_choice, console)
        with Phases(console, quiet=arguments.quiet) as phases:
            warm_up(engine, tokens=arguments.warmup, tell=lambda done, total: phases(WARM_UP, done, total))
        service.metrics.started(page_size=engine.context_length, blocks=arguments.slots, dtype=model.dtype)
        return model, tokenizer, engine

    return service, start


def _engine(arguments: argparse.Namespace, model: CausalLM, tokenizer: Any) -> Engine:
    cache, limits = options.policy(arguments), options.memory_limits(arguments)
    return Engine(model, tokenizer, cache=cache, **limits, **serve.engine_options(arguments))


def run(
    arguments: argparse.Namespace,
    console: Console,
    *,
    tell: Callable[[str], None],
    draining: Callable[[Callable[[], None]], AbstractContextManager],
) -> int:
    """Serves until a signal; returns the exit status, 1 if the engine has failed.

    In another process than the first of a group it runs what that one runs, until it ends; a signal waits for this.

    Args:
        tell: writes a line for the user.
        draining: has a signal call what it is given, as `process.draining`.

    Raises:
        InputError: the address, the model or an option cannot be used.
    """
    advice = "use fewer --slots, a shorter --context-length, or a 16-bit --dtype"
    if not is_first(arguments):
        with report_out_of_memory(advice, None), draining(lambda: None):
            with _engine(arguments, *load(arguments, console)) as engine:
                engine.follow()
        return 0
    service, start = prepared(arguments, console)
    server = Server(service, host=arguments.host, port=arguments.port, drain_s=arguments.drain_seconds)

    def ready() -> None:
        tell(f"{service.names[0]} is served at {serve.url(arguments.host, server.port)}/v1\n")

    status = 0
    with report_out_of_memory(advice, None), draining(server.drain):
        try:
            server.run(start, ready)
        except EngineFailed:  # the log has told of it
            status = 1
    if arguments.coordinator is not None and (status or service.engine is None):
        abandon(status)  # the others wait for this process
    return status
