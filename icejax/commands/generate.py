"""The command line of ``python -m icejax.generate``: answers on stdout, progress and cost on stderr."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from icejax.cache import CachePolicy
from icejax.commands import options
from icejax.commands.loading import go_on_or_begin, load
from icejax.commands.memory import out_of_memory_told
from icejax.commands.requests import read_prompts
from icejax.commands.show import answers, progress, table
from icejax.errors import InputError
from icejax.explain import Explanation, check
from icejax.folder import Claim, claim
from icejax.generation import stream_generate
from icejax.launch import ending
from icejax.models import CausalLM
from icejax.prompts import chat, encode
from icejax.ranges import whole
from icejax.sampling import Sampling
from icejax.saved import ABOUT


def main(argv: list[str] | None = None, *, name: str = "icejax.generate") -> int:
    """Runs the command line and returns its exit status, as `launch.ending` has it."""
    return ending(name, lambda: _parse_and_run(argv, name))


def _parse_and_run(argv: list[str] | None, name: str) -> None:
    arguments = options.parser(name).parse_args(argv)
    with out_of_memory_told("use a shorter prompt, a smaller --batch-size, or a 16-bit --dtype", arguments.session):
        run(arguments, Console(stderr=True))


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Answers the prompts of the command line; raises InputError for bad input."""
    sampling, policy = options.sampling(arguments), options.policy(arguments)
    if arguments.system is not None and not arguments.chat:
        raise InputError("--system needs --chat: it is a message of the chat template")
    whole("--batch-size", arguments.batch_size, most=2**63)
    options.memory_limit(arguments)
    if arguments.explain is not None:
        check(arguments.explain)
        if arguments.session is not None:
            raise InputError("--explain shows one answer to one prompt: leave --session out")
    prompts = read_prompts(arguments)
    if arguments.session is not None:
        with claim(arguments.session, mark=ABOUT) as held:
            _run_session(arguments, console, held, sampling, prompts)
        return
    model, tokenizer = load(arguments, console)
    if arguments.chat:
        prompts = [chat(tokenizer, prompt, system=arguments.system) for prompt in prompts]
    encode(
        model, tokenizer, prompts, special_tokens=not arguments.chat, context_length=arguments.context_length
    )  # all, before any
    explanation = _explanation(arguments, model, tokenizer, policy, prompts) if arguments.explain is not None else None
    responses = []
    for start in range(0, len(prompts), arguments.batch_size):
        with progress(console) as bars:
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
                first_index=start,
                special_tokens=not arguments.chat,
                context_length=arguments.context_length,
                host_memory_limit=options.memory_limit(arguments),
                progress=lambda done, layers=layers, bars=bars: bars.update(layers, completed=done),
                watch=explanation.watch if explanation is not None else None,
            )
            responses += answers(stream, arguments, bars, alone=len(prompts) == 1)
    if explanation is not None:
        explanation.save(arguments.explain)
    if console.is_terminal or _is_example(arguments):
        console.print(table(responses))


def _explanation(
    arguments: argparse.Namespace, model: CausalLM, tokenizer: Any, policy: CachePolicy, prompts: list[str]
) -> Explanation:
    if len(prompts) != 1:
        raise InputError(f"--explain needs one prompt, got {len(prompts)}")
    limits = dict(special_tokens=not arguments.chat, context_length=arguments.context_length)
    (ids,) = encode(model, tokenizer, prompts, **limits)
    context_length = arguments.context_length or model.config.context_length
    return Explanation(model, ids, policy, new_tokens=min(arguments.max_new_tokens, context_length - len(ids)))


def _run_session(arguments: argparse.Namespace, console: Console, held: Claim, sampling: Sampling, prompts: list[str]) -> None:
    """Puts the prompts behind one another to the session of the command line, and keeps it after each answer."""
    model, tokenizer = load(arguments, console)
    session = go_on_or_begin(arguments, model, tokenizer)
    respond = session.stream_chat if arguments.chat else session.stream
    responses = []
    for prompt in prompts:
        most = dict(max_new_tokens=arguments.max_new_tokens)
        held.check_room(session.size_with(prompt, chat=arguments.chat, **most))
        with progress(console) as bars:
            stream = respond(prompt, sampling=sampling, stop=arguments.stop, seed=arguments.seed, **most)
            responses += answers(stream, arguments, bars, alone=len(prompts) == 1)
        session.save(held)
    if console.is_terminal:
        console.print(table(responses))


def _is_example(arguments: argparse.Namespace) -> bool:
    return arguments.model is None and not arguments.prompt and arguments.prompt_file is None and not arguments.json
