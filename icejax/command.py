"""The command line of ``python -m icejax.generate``: answers on stdout, progress and cost on stderr."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from icejax.cache import CachePolicy
from icejax.errors import InputError
from icejax.explain import Explanation, check
from icejax.folder import Claim, claim
from icejax.generation import ASSETS, GenerationResponse, join, load, stream_generate
from icejax.launch import ending, is_unicode, write
from icejax.models import CausalLM
from icejax.options import DEFAULT_CACHE, build_parser, cache_options, make_policy, read_prompts
from icejax.prompts import chat, encode
from icejax.ranges import number, whole
from icejax.sampling import Sampling
from icejax.saved import ABOUT
from icejax.session import Session


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status, as `launch.ending` has it."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would warn that there is no PyTorch
    return ending("icejax.generate", lambda: _parse_and_run(argv))


def _parse_and_run(argv: list[str] | None) -> None:
    arguments = build_parser().parse_args(argv)
    try:
        run(arguments, Console(stderr=True))
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        there = arguments.session is not None and arguments.session.exists()
        kept = f"; {arguments.session} holds the session up to its last whole answer" if there else ""
        raise InputError(
            f"out of memory on {_side(error)}: use a shorter prompt, a smaller --batch-size, or a 16-bit --dtype{kept}"
        ) from None


def _side(error: Exception) -> str:
    """Says which memory an error is about."""
    on_host = isinstance(error, MemoryError) or "host" in str(error).splitlines()[0].lower()
    return "the host" if on_host else f"the device ({jax.devices()[0].device_kind})"


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Answers the prompts of the command line; raises InputError for bad input."""
    sampling = Sampling(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Sampling)})
    options = cache_options(arguments.cache_option, budget=arguments.budget, page_size=arguments.page_size)
    policy = make_policy(arguments.cache or DEFAULT_CACHE, options)
    if arguments.system is not None and not arguments.chat:
        raise InputError("--system needs --chat: it is a message of the chat template")
    whole("--batch-size", arguments.batch_size, most=2**63)
    if arguments.host_memory_limit is not None:
        number("--host-memory-limit", arguments.host_memory_limit, least=0, most=1e9, above=True)
    if arguments.explain is not None:
        check(arguments.explain)
        if arguments.session is not None:
            raise InputError("--explain shows one answer to one prompt: leave --session out")
    prompts = read_prompts(arguments)
    _use_compile_cache(arguments.compile_cache)
    if arguments.session is not None:
        with claim(arguments.session, mark=ABOUT) as held:
            _run_session(arguments, console, held, policy if _cache_named(arguments) else None, sampling, prompts)
        return
    model, tokenizer = _load(arguments, console)
    if arguments.chat:
        prompts = [chat(tokenizer, prompt, system=arguments.system) for prompt in prompts]
    encode(
        model, tokenizer, prompts, special_tokens=not arguments.chat, context_length=arguments.context_length
    )  # all, before any
    explanation = _explanation(arguments, model, tokenizer, policy, prompts) if arguments.explain is not None else None
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
                first_index=start,
                special_tokens=not arguments.chat,
                context_length=arguments.context_length,
                host_memory_limit=_memory_limit(arguments),
                progress=lambda done, layers=layers, bars=bars: bars.update(layers, completed=done),
                watch=explanation.watch if explanation is not None else None,
            )
            responses += _show(stream, arguments, bars, alone=len(prompts) == 1)
    if explanation is not None:
        explanation.save(arguments.explain)
    if console.is_terminal or _is_example(arguments):
        console.print(_table(responses))


def _explanation(
    arguments: argparse.Namespace, model: CausalLM, tokenizer: Any, policy: CachePolicy, prompts: list[str]
) -> Explanation:
    if len(prompts) != 1:
        raise InputError(f"--explain needs one prompt, got {len(prompts)}")
    limits = dict(special_tokens=not arguments.chat, context_length=arguments.context_length)
    (ids,) = encode(model, tokenizer, prompts, **limits)
    context_length = arguments.context_length or model.config.context_length
    return Explanation(model, ids, policy, new_tokens=min(arguments.max_new_tokens, context_length - len(ids)))


def _load(arguments: argparse.Namespace, console: Console) -> tuple[CausalLM, Any]:
    with _progress(console) as bars:
        bar = bars.add_task("load", total=None)
        return load(
            arguments.model or ASSETS,
            dtype=arguments.dtype,
            progress=lambda _, done, total: bars.update(bar, completed=done, total=total),
        )


def _run_session(
    arguments: argparse.Namespace,
    console: Console,
    held: Claim,
    policy: CachePolicy | None,
    sampling: Sampling,
    prompts: list[str],
) -> None:
    """Puts the prompts behind one another to the session of the command line, and keeps it after each answer."""
    model, tokenizer = _load(arguments, console)
    if arguments.session.exists():
        if arguments.context_length is not None:
            raise InputError("a session's context length is set when it begins: leave --context-length out")
        if arguments.system is not None:
            raise InputError("a session's system message is set when it begins: leave --system out")
        session = Session.load(arguments.session, model, tokenizer, cache=policy, host_memory_limit=_memory_limit(arguments))
    else:
        limits = dict(context_length=arguments.context_length, host_memory_limit=_memory_limit(arguments))
        session = Session(model, tokenizer, cache=policy, system=arguments.system, **limits)
    respond = session.stream_chat if arguments.chat else session.stream
    responses = []
    for prompt in prompts:
        limit = dict(max_new_tokens=arguments.max_new_tokens)
        held.check_room(session.size_with(prompt, chat=arguments.chat, **limit))
        with _progress(console) as bars:
            stream = respond(prompt, sampling=sampling, stop=arguments.stop, seed=arguments.seed, **limit)
            responses += _show(stream, arguments, bars, alone=len(prompts) == 1)
        session.save(held)
    if console.is_terminal:
        console.print(_table(responses))


def _memory_limit(arguments: argparse.Namespace) -> int | None:
    """Returns the bytes of host memory that the cache may take."""
    return None if arguments.host_memory_limit is None else int(arguments.host_memory_limit * 2**30)


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
            write(piece.text)
        elif tokens is None:
            tokens = bars.add_task("tokens", total=arguments.max_new_tokens)
        else:
            bars.update(tokens, completed=piece.new_tokens)
        pieces.setdefault(piece.row, []).append(piece)
    bars.stop()
    whole = [join(pieces[row]) for row in sorted(pieces)]
    if streaming:
        write("\n")
    else:
        for response in whole:
            write((_json(response) if arguments.json else response.text) + "\n")
    return whole


def _json(response: GenerationResponse) -> str:
    fields = dataclasses.asdict(response)
    del fields["row"]  # the order of the lines
    return json.dumps(fields, ensure_ascii=not is_unicode())


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
