"""Loads the needs of a command before it answers: the compile cache, a model and its tokenizer, a session, a context length.

`icejax.commands.generate` and `icejax.commands.chat` call it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from icejax.api import generate
from icejax.api.model_sampling import sampling_over
from icejax.api.prompts import first_messages
from icejax.checkpoint.folder import resolve
from icejax.checkpoint.generation_config import NAME, proposed_sampling
from icejax.checkpoint.load import open_checkpoint
from icejax.checks.errors import InputError
from icejax.checks.numbers import POSITIONS, integer
from icejax.commands import options
from icejax.commands.terminal.phases import Phases
from icejax.commands.texts import read_template
from icejax.engine.request import AnswerOptions
from icejax.files.atomic_folder import current_folder
from icejax.models.decoder import CausalLM
from icejax.runtime.compile_cache import keep_programs
from icejax.runtime.progress import LOADING
from icejax.session.session import Session
from icejax.session.storage import read_session


def context_length(arguments: argparse.Namespace) -> int:
    """Returns the context length for which prompts are read, before the model is loaded; for a hub id the longest one.

    Raises:
        InputError: --context-length is out of range, or the model's config or the session cannot be read.
    """
    if arguments.context_length is not None:
        return integer("context_length", arguments.context_length, most=POSITIONS)
    if arguments.session is not None and arguments.session.exists():
        return read_session(arguments.session).about.context_length
    folder = current_folder(Path(generate.ASSETS if arguments.model is None else arguments.model).expanduser())
    return open_checkpoint(folder).config.context_length if folder.exists() else POSITIONS


def load(arguments: argparse.Namespace, console: Console) -> tuple[CausalLM, Any]:
    """Returns the model of the command line and its tokenizer; keeps the programs that are compiled from now on."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # transformers warns if PyTorch is missing
    template = None if arguments.chat_template is None else read_template(arguments.chat_template)
    keep_programs(arguments.compile_cache)
    with Phases(console, quiet=arguments.quiet) as phases:
        model, tokenizer = generate.load(
            generate.ASSETS if arguments.model is None else arguments.model,
            revision=arguments.revision,
            dtype=arguments.dtype,
            quantize=arguments.quantize,
            experts_on_host=arguments.experts_on_host,
            mesh=arguments.mesh,
            progress=phases,
        )
    if template is not None:
        tokenizer.chat_template = template
    return model, tokenizer


def model_name(model: str | None) -> str:
    """Returns the name of the model of the command line: the last part of its path."""
    return "bundled" if model is None else Path(model).expanduser().name


def with_model_sampling(arguments: argparse.Namespace, answer: AnswerOptions, console: Console) -> AnswerOptions:
    """Returns the options of the answers; with --sampling model over those of the model, and prints them."""
    if arguments.sampling is None:
        return answer
    with Phases(console, quiet=arguments.quiet) as phases:
        phases(LOADING, 0, 0)  # a hub id may be downloaded
        folder = resolve(generate.ASSETS if arguments.model is None else arguments.model, revision=arguments.revision)
    proposed, overriding = proposed_sampling(folder), options.sampling(arguments)
    sampling = sampling_over(proposed, overriding)
    values = [f"{name} {getattr(sampling, name):g}" for name in proposed if name not in overriding]
    if values and not arguments.quiet:
        line = f"sampling of {NAME}: {', '.join(values)}{'' if sampling.samples else '; answers are greedy'}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return dataclasses.replace(answer, sampling=sampling)


def resume(
    arguments: argparse.Namespace, folder: Path, model: CausalLM, tokenizer: Any, *, context_length: int | None = None
) -> Session:
    """Returns the session saved in `folder`; InputError if its cache is not the one that the command line names.

    Args:
        context_length: as in `Session.load`.
    """
    limits = dict(context_length=context_length, **options.memory_limits(arguments))
    return Session.load(folder, model, tokenizer, cache=options.policy(arguments), **limits)


def tell_cache(arguments: argparse.Namespace, reason: str, console: Console) -> None:
    """Prints which cache was chosen and why."""
    if not arguments.quiet:
        console.print(f"cache {reason}", markup=False, highlight=False, soft_wrap=True)


def resume_or_start(arguments: argparse.Namespace, model: CausalLM, tokenizer: Any, console: Console) -> Session:
    """Returns the session saved in the folder of --session, or a new one; prints its cache if that was chosen."""
    length, system, variables = arguments.context_length, arguments.system, options.template_arguments(arguments)
    if arguments.session is None or not arguments.session.exists():
        chat = dict(system=system, chat_template_kwargs=variables)
        limits = dict(context_length=length, **options.memory_limits(arguments))
        session = Session(model, tokenizer, cache=options.policy(arguments), **limits, **chat)
        if session.cache_choice is not None:
            tell_cache(arguments, session.cache_choice, console)
        return session
    session = resume(arguments, arguments.session, model, tokenizer, context_length=length)
    if system is not None and session.messages[:1] != first_messages(system):
        raise InputError("a session's system message is set when it begins: leave --system out")
    if variables not in ({}, session.template_variables):
        raise InputError("a session's template arguments are set when it begins: leave --template-arg out")
    return session
