"""The command ``icejax generate``: answers on stdout, progress and cost on stderr."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from rich.console import Console

from icejax.api.generate import stream_generate
from icejax.api.prompts import encode_prompts
from icejax.cache.protocol import CachePolicy
from icejax.cache.registry import IN_PAGES
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer
from icejax.commands import options
from icejax.commands.group import in_group, is_first, read_in_group
from icejax.commands.loading import load, resume_or_start, tell_cache, with_model_sampling
from icejax.commands.many import run as many
from icejax.commands.requests import PromptLine, check_template_use
from icejax.commands.terminal.phases import Phases
from icejax.commands.terminal.process import ending
from icejax.commands.terminal.show import answer, answers, table
from icejax.commands.terminal.stderr import stderr_console
from icejax.engine.request import AnswerOptions, Request
from icejax.engine.sampling import check_bias
from icejax.evaluation.attention_map import Explanation, check_picture
from icejax.files.atomic_folder import Claim, claim
from icejax.models.decoder import CausalLM
from icejax.runtime.out_of_memory import report_out_of_memory
from icejax.session.storage import ABOUT


def main(argv: list[str] | None = None, *, name: str = "icejax.generate") -> int:
    """Runs the command line and returns the exit status of `process.ending`."""
    return ending(name, lambda: _parse_and_run(argv, name))


def _parse_and_run(argv: list[str] | None, name: str) -> None:
    arguments = options.parser(name).parse_args(argv)
    if arguments.verbose:
        logging.getLogger("icejax").setLevel(logging.INFO)
    advice = "use a shorter prompt, a smaller --batch-size, or a 16-bit --dtype"
    with in_group(arguments, name, alone=("session", "explain", "output")), report_out_of_memory(advice, arguments.session):
        run(arguments, stderr_console())


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Answers the prompts of the command line; raises InputError for bad input."""
    answer_options, policy = options.answer(arguments), options.policy(arguments)
    if arguments.system is not None and not arguments.chat:
        raise InputError("--system needs --chat: it is a message of the chat template")
    integer("--batch-size", arguments.batch_size, most=2**63)
    if arguments.output is not None:
        return many.run(arguments, console)
    for flag in ("shard", "ray", "ray_workers"):
        if getattr(arguments, flag) is not None:
            raise InputError(f"--{flag.replace('_', '-')} needs --output: the answers go into a file, a line each")
    if arguments.logprobs is not None and not arguments.json:
        raise InputError("--logprobs needs --json: a text has no place for them")
    limits = options.memory_limits(arguments)
    if arguments.explain is not None:
        check_picture(arguments.explain)
        if arguments.session is not None:
            raise InputError("--explain shows one answer to one prompt: leave --session out")
    prompts = read_in_group(arguments)
    if any(line.logprobs is not None for line in prompts) and not arguments.json:
        raise InputError("'logprobs' of a .jsonl file need --json: a text has no place for them")
    template_arguments = options.template_arguments(arguments)
    check_template_use(prompts, arguments)
    answer_options = with_model_sampling(arguments, answer_options, console)
    options.tell_greedy(arguments, [line.options(answer_options).sampling for line in prompts])
    if arguments.session is not None:
        if any(line.messages is not None for line in prompts):
            raise InputError("'messages' are a whole chat: leave --session out, or give a 'prompt' per turn with --chat")
        with claim(arguments.session, mark=ABOUT) as session_claim:
            _run_session(arguments, console, session_claim, answer_options, prompts)
        return
    model, tokenizer = load(arguments, console)
    template = dict(in_template=arguments.chat, system=arguments.system, arguments=template_arguments)
    requests = [line.request(tokenizer, i, answer_options, **template) for i, line in enumerate(prompts)]
    explanation = None
    if arguments.explain is not None:
        policy = IN_PAGES if policy is None else policy  # it shows what pages bring
        texts = dict(context_length=arguments.context_length, parse_special=answer_options.parse_special)
        explanation = _explanation(model, tokenizer, policy, requests, **texts)
    prints = is_first(arguments)
    responses, streaming = [], prints and len(prompts) == 1 and not arguments.json and not arguments.no_stream
    with Phases(console, quiet=arguments.quiet) as phases:
        stream = stream_generate(
            model,
            tokenizer,
            requests,
            cache=policy,
            batch_size=arguments.batch_size,
            context_length=arguments.context_length,
            tell=lambda reason: tell_cache(arguments, reason, console),
            **limits,
            progress=phases,
            watch=explanation.watch if explanation is not None else None,
            **vars(answer_options),
        )
        sizes = dict(rows=len(prompts), total=sum(request.max_new_tokens for request in requests))
        for line, response in zip(prompts, answers(stream, phases, streaming=streaming, **sizes), strict=True):
            if prints and not streaming:
                answer(response, arguments, console, line.id)
            responses.append(response)
    if explanation is not None:
        explanation.save(arguments.explain, tokenizer)
    if (console.is_terminal or _is_example(arguments)) and not arguments.quiet:
        console.print(table(responses, console))


def _check_biases(model: CausalLM, prompts: list[PromptLine], answer_options: AnswerOptions) -> None:
    for number, line in enumerate(prompts, start=1):
        check_bias(line.options(answer_options).sampling, model.config.vocab_size, place=f"prompt {number}: ")


def _explanation(
    model: CausalLM, tokenizer: Any, policy: CachePolicy, requests: list[Request], *, context_length: int | None, **texts: bool
) -> Explanation:
    if len(requests) != 1:
        raise InputError(f"--explain needs one prompt, got {len(requests)}")
    [tokens] = encode_prompts(model, tokenizer, requests, context_length=context_length, **texts)
    context_length = context_length or model.config.context_length
    return Explanation(model, tokens, policy, new_tokens=min(requests[0].max_new_tokens, context_length - len(tokens)))


def _run_session(
    arguments: argparse.Namespace,
    console: Console,
    session_claim: Claim,
    answer_options: AnswerOptions,
    prompts: list[PromptLine],
) -> None:
    """Answers the prompts one after another in the session of the command line, and saves it after each answer."""
    model, tokenizer = load(arguments, console)
    _check_biases(model, prompts, answer_options)
    session = resume_or_start(arguments, model, tokenizer, console)
    respond = session.stream_chat if arguments.chat else session.stream
    responses, streaming = [], len(prompts) == 1 and not arguments.json and not arguments.no_stream
    for line in prompts:
        line_options = line.options(answer_options)
        with Phases(console, quiet=arguments.quiet) as phases:
            stream = respond(line.prompt, progress=phases, save_to=session_claim, **vars(line_options))
            [response] = answers(stream, phases, rows=1, total=line_options.max_new_tokens, streaming=streaming)
        if not streaming:
            answer(response, arguments, console, line.id)
        responses.append(response)
        session.save(session_claim)
    if console.is_terminal and not arguments.quiet:
        console.print(table(responses, console))


def _is_example(arguments: argparse.Namespace) -> bool:
    has_prompt = arguments.text or arguments.prompt or arguments.prompt_file is not None
    return arguments.model is None and not has_prompt and not arguments.json
