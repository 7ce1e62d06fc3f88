"""Text in, text out: load, generate and stream_generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from icejax.api.prompts import check_context, encode
from icejax.cache.protocol import CachePolicy
from icejax.cache.registry import checked as checked_policy
from icejax.checkpoint.folder import resolve
from icejax.checkpoint.load import Progress, load_model, read_config
from icejax.engine.decode_loop import Row, Run, check, run_constants, stream
from icejax.engine.decode_step import DecodeState, Decoding
from icejax.engine.logprobs import check as check_logprobs
from icejax.engine.plan import make_plan
from icejax.engine.prefill import prefill
from icejax.engine.request import Prompt, Request, requests
from icejax.engine.response import GenerationResponse, join
from icejax.engine.sampling import Sampling, checked
from icejax.models.decoder import CausalLM
from icejax.runtime import devices
from icejax.runtime.compile_clock import Mark
from icejax.runtime.host_reads.choose import try_ahead
from icejax.text.tokenizer import load_tokenizer

ASSETS = Path(__file__).parents[1] / "assets"
MAX_NEW_TOKENS = 256


def load(
    path: str | Path = ASSETS,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    experts_on_host: int | bool | None = None,
    progress: Progress | None = None,
) -> tuple[CausalLM, Any]:
    """Returns the model and the tokenizer of a Hugging Face folder, an icejax folder or a hub id; the bundled ones without.

    The options are those of `checkpoint.load_model`.

    Raises:
        InputError: something about the folder is not as it should be; the message says what.
    """
    devices.raise_pinned_limit()
    try_ahead()
    devices.check()
    folder = resolve(path)
    read_config(folder)
    tokenizer = load_tokenizer(folder)
    options = dict(dtype=dtype, quantize=quantize, experts_on_host=experts_on_host, progress=progress)
    return load_model(folder, **options), tokenizer


def stream_generate(
    model: CausalLM,
    tokenizer: Any,
    prompts: Prompt | Request | Sequence[Prompt | Request],
    *,
    cache: CachePolicy | None = None,
    sampling: Sampling | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    stop: str | Sequence[str] = (),
    seed: int = 0,
    special_tokens: bool = True,
    context_length: int | None = None,
    host_memory_limit: int | None = None,
    logprobs: int | None = None,
    progress: Callable[[int], None] | None = None,
    watch: Callable[[DecodeState], None] | None = None,
) -> Iterator[GenerationResponse]:
    """Yields each row's text piece by piece; a row's last piece has a `finish_reason`.

    Args:
        prompts: one or several, run as one batch; they may differ in length. Each is text, token ids, or a `Request` that has
            wishes of its own.
        cache: the cache policy; None: `Clustered()`.
        sampling: of the prompts that have none of their own; None: greedy.
        stop: a string, or several, that end a text and are not part of it.
        seed: of the draws; by their index equal prompts draw apart.
        special_tokens: whether the tokenizer adds its own (False for text that has them, as from `chat`).
        context_length: tokens of prompt and answer together; None: the model's own.
        host_memory_limit: bytes of host memory that the cache may take; None: what is free.
        logprobs: how many of the most likely tokens are told with each token's own log-probability; None: no log-probabilities.
        progress: called with the number of layers done while the prompt runs.
        watch: called with the state after every step; it must not keep the arrays, which the next step takes.

    Raises:
        InputError: a prompt is empty or too long, an option is out of range, or the host has too little memory; before
            anything runs. Or the logits are not finite, as soon as they are; the message says where it began.
    """
    cache, sampling = checked_policy(cache), checked(sampling)
    devices.check_limit(host_memory_limit)
    asked = [
        replace(
            each,
            sampling=_first(each.sampling, sampling),
            max_new_tokens=_first(each.max_new_tokens, max_new_tokens),
            stop=check(_first(each.stop, stop), _first(each.max_new_tokens, max_new_tokens), _first(each.seed, seed)),
            special_tokens=_first(each.special_tokens, special_tokens),
        )
        for each in requests(prompts)
    ]
    context_length, logprobs = check_context(model, context_length), check_logprobs(logprobs)
    started = Mark.now()
    ids = encode(model, tokenizer, asked, context_length=context_length)
    limits = [min(each.max_new_tokens, context_length - len(row)) for each, row in zip(asked, ids, strict=True)]
    own = [each.sampling for each in asked]
    sizes = dict(batch_size=len(ids), prompt_tokens=max(map(len, ids)), new_tokens=max(limits))
    model = model.for_capacity(sizes["prompt_tokens"] + sizes["new_tokens"])
    plan = make_plan(model, cache, **sizes)
    draws = [(seed, each.index) if each.seed is None else (each.seed, 0) for each in asked]
    options = dict(sampling=own, draws=draws, progress=progress, host_memory_limit=host_memory_limit)
    eos = model.config.eos_token_ids
    rows = [
        Row(tokenizer, each.stop, eos, row, limit, number=each.index + 1)
        for each, row, limit in zip(asked, ids, limits, strict=True)
    ]
    begun = prefill(model, ids, plan, **options)
    run = Run(Decoding(model, plan), *begun, watch)
    yield from stream(rows, run_constants(model, cache, plan, run), run, started, logprobs=logprobs)


def _first(own: Any, others: Any) -> Any:
    """Returns what a request wishes, or what all do."""
    return others if own is None else own


def generate(
    model: CausalLM, tokenizer: Any, prompts: Prompt | Request | Sequence[Prompt | Request], **options: Any
) -> list[GenerationResponse]:
    """Returns one whole response per prompt; the arguments are those of `stream_generate`."""
    pieces: dict[int, list[GenerationResponse]] = {}
    for piece in stream_generate(model, tokenizer, prompts, **options):
        pieces.setdefault(piece.row, []).append(piece)
    return [join(pieces[row]) for row in sorted(pieces)]
