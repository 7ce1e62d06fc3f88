"""The command line of ``python -m icejax.generate``: answers on stdout, progress and cost on stderr."""

from __future__ import annotations

import argparse
import dataclasses
import logging

from rich.console import Console

from icejax.api.generate import stream_generate
from icejax.api.prompts import encode_prompts
from icejax.cache.protocol import CachePolicy
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer
from icejax.commands import options
from icejax.commands.loading import go_on_or_begin, load
from icejax.commands.memory import out_of_memory_told
from icejax.commands.process import ending
from icejax.commands.requests import PromptLine, read_prompts
from icejax.commands.show import answer, answers, progress, table
from icejax.engine.request import AnswerOptions, Request
from icejax.engine.response import GenerationResponse
from icejax.evaluation.attention_map import Explanation, check_picture
from icejax.files.atomic_folder import Claim, claim
from icejax.models.decoder import CausalLM
from icejax.session.storage import ABOUT


def main(argv: list[str] | None = None, *, name: str = "icejax.generate") -> int:
    """Runs the command line and returns its exit status, as `launch.ending` has it."""
    return ending(name, lambda: _parse_and_run(argv, name))


def _parse_and_run(argv: list[str] | None, name: str) -> None:
    arguments = options.parser(name).parse_args(argv)
    if arguments.verbose:
        logging.getLogger("icejax").setLevel(logging.INFO)
    with out_of_memory_told("use a shorter prompt, a smaller --batch-size, or a 16-bit --dtype", arguments.session):
        run(arguments, Console(stderr=True))


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Answers the prompts of the command line; raises InputError for bad input."""
    answer_options, policy = options.answer(arguments), options.policy(arguments)
    if arguments.system is not None and not arguments.chat:
        raise InputError("--system needs --chat: it is a message of the chat template")
    if arguments.logprobs is not None and not arguments.json:
        raise InputError("--logprobs needs --json: a text has no place for them")
    integer("--batch-size", arguments.batch_size, most=2**63)
    options.memory_limit(arguments)
    if arguments.explain is not None:
        check_picture(arguments.explain)
        if arguments.session is not None:
            raise InputError("--explain shows one answer to one prompt: leave --session out")
    prompts = read_prompts(arguments)
    options.tell_greedy(arguments, [line.options(answer_options).sampling for line in prompts])
    if arguments.session is not None:
        if any(line.messages is not None for line in prompts):
            raise InputError("'messages' are a whole chat: leave --session out, or give a 'prompt' per turn with --chat")
        with claim(arguments.session, mark=ABOUT) as held:
            _run_session(arguments, console, held, answer_options, prompts)
        return
    model, tokenizer = load(arguments, console)
    template = dict(in_template=arguments.chat, system=arguments.system)
    requests = [line.request(tokenizer, i, answer_options, **template) for i, line in enumerate(prompts)]
    ids = encode_prompts(model, tokenizer, requests, context_length=arguments.context_length)  # all, before any is run
    requests = [dataclasses.replace(each, prompt=tokens) for each, tokens in zip(requests, ids, strict=True)]
    explanation = _explanation(arguments, model, policy, requests) if arguments.explain is not None else None
    responses: dict[int, GenerationResponse] = {}
    told, streaming = 0, len(prompts) == 1 and not arguments.json and not arguments.no_stream
    for rows in batches(ids, arguments.batch_size):
        with progress(console) as bars:
            layers = bars.add_task("prefill layers", total=model.config.num_hidden_layers)
            stream = stream_generate(
                model,
                tokenizer,
                [requests[row] for row in rows],
                cache=policy,
                context_length=arguments.context_length,
                host_memory_limit=options.memory_limit(arguments),
                progress=lambda done, layers=layers, bars=bars: bars.update(layers, completed=done),
                watch=explanation.watch if explanation is not None else None,
                **vars(answer_options),
            )
            answered = answers(stream, bars, rows=len(rows), limit=arguments.max_new_tokens, streaming=streaming)
        responses |= zip(rows, answered, strict=True)
        while told in responses and not streaming:  # in the order asked
            answer(responses[told], arguments, prompts[told].id)
            told += 1
    if explanation is not None:
        explanation.save(arguments.explain)
    if console.is_terminal or _is_example(arguments):
        console.print(table([responses[row] for row in sorted(responses)], console))


def batches(ids: list[list[int]], size: int) -> list[list[int]]:
    """Returns which prompts run together: those of like lengths, so that little is padded."""
    rows = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _explanation(arguments: argparse.Namespace, model: CausalLM, policy: CachePolicy, requests: list[Request]) -> Explanation:
    if len(requests) != 1:
        raise InputError(f"--explain needs one prompt, got {len(requests)}")
    tokens, context_length = requests[0].prompt, arguments.context_length or model.config.context_length
    return Explanation(model, tokens, policy, new_tokens=min(requests[0].max_new_tokens, context_length - len(tokens)))


def _run_session(
    arguments: argparse.Namespace, console: Console, held: Claim, answer_options: AnswerOptions, prompts: list[PromptLine]
) -> None:
    """Puts the prompts behind one another to the session of the command line, and keeps it after each answer."""
    model, tokenizer = load(arguments, console)
    session = go_on_or_begin(arguments, model, tokenizer)
    respond = session.stream_chat if arguments.chat else session.stream
    responses, streaming = [], len(prompts) == 1 and not arguments.json and not arguments.no_stream
    for line in prompts:
        own = line.options(answer_options)
        with progress(console) as bars:
            stream = respond(line.prompt, kept_in=held, **vars(own))
            answered = answers(stream, bars, rows=1, limit=own.max_new_tokens, streaming=streaming)
        if not streaming:
            answer(answered[0], arguments, line.id)
        responses += answered
        session.save(held)
    if console.is_terminal:
        console.print(table(responses, console))


def _is_example(arguments: argparse.Namespace) -> bool:
    return arguments.model is None and not arguments.prompt and arguments.prompt_file is None and not arguments.json
