"""Text in, text out: `load`, `generate` and `stream_generate`, which Python callers, commands and benchmarks call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from icejax.api.choice import batch_choice
from icejax.api.jobs import jobs_of
from icejax.api.prompts import check_context
from icejax.cache.protocol import CachePolicy
from icejax.cache.registry import checked_policy
from icejax.checkpoint.folder import resolve
from icejax.checkpoint.load import load_model, open_checkpoint
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer
from icejax.engine.decode.state import DecodeState
from icejax.engine.request import Prompt, Request, answer_options, requests
from icejax.engine.response import GenerationResponse, joined
from icejax.engine.serving.core import Core
from icejax.engine.serving.job import CoreSizes
from icejax.models.decoder import CausalLM
from icejax.runtime import devices, processes
from icejax.runtime.host_reads.choose import try_ahead
from icejax.runtime.mesh import processes_of
from icejax.runtime.progress import LOADING, Progress, prefilling
from icejax.text.tokenizer import load_tokenizer
from icejax.text.turn_end import end_ids

ASSETS = Path(__file__).parents[1] / "assets"


def load(
    path: str | Path = ASSETS,
    *,
    revision: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    experts_on_host: int | bool | None = None,
    mesh: str | int | None = None,
    progress: Progress | None = None,
) -> tuple[CausalLM, Any]:
    """Returns the model and the tokenizer of a checkpoint.

    Args:
        path: a Hugging Face folder, an icejax folder, a GGUF file or a hub id; by default the bundled model.
        revision: branch, tag or commit of a hub id; None: its main branch.
        dtype, quantize, experts_on_host, mesh: as in `checkpoint.load.load_model`.
        progress: called with "loading", the number of parameters loaded, and the number in all: first with 0 and 0.

    Raises:
        InputError: the checkpoint cannot be loaded; the message says why.
    """
    if progress is not None:
        progress(LOADING, 0, 0)
    devices.set_limits()
    try_ahead()
    devices.check_device()
    checkpoint = open_checkpoint(resolve(path, revision=revision))
    tokenizer = load_tokenizer(checkpoint.folder)
    checkpoint = checkpoint.with_ends(end_ids(tokenizer))
    tell = None if progress is None else lambda _, done, total: progress(LOADING, done, total)
    options = dict(dtype=dtype, quantize=quantize, experts_on_host=experts_on_host, mesh=mesh, progress=tell)
    return load_model(checkpoint, **options), tokenizer


def stream_generate(
    model: CausalLM,
    tokenizer: Any,
    prompts: Prompt | Request | Sequence[Prompt | Request],
    *,
    n: int = 1,
    cache: CachePolicy | None = None,
    batch_size: int | None = None,
    context_length: int | None = None,
    device_memory: int | None = None,
    host_memory_limit: int | None = None,
    tell: Callable[[str], None] | None = None,
    progress: Progress | None = None,
    watch: Callable[[DecodeState], None] | None = None,
    **options: Any,
) -> Iterator[GenerationResponse]:
    """Yields each row's text piece by piece; a row's last piece has a `finish_reason`.

    Args:
        prompts: one or several prompts, whose lengths may differ. Each is text, token ids, or a `Request` with its own options.
        n: number of answers to each prompt, which share its pages; they differ only where tokens are drawn.
        cache: the cache policy; None: `Full()` where it fits the device and is no slower, else `Clustered()` (`api.choice`).
        batch_size: rows that decode at once; the next answer takes the place of one that has ended. None: all of them.
        context_length: maximum number of tokens of a prompt and its answer together; None: the model's own.
        device_memory: bytes of the device's memory, for the choice of a cache; None: what the device reports, on a CPU all that
            is free.
        host_memory_limit: bytes of host memory that the cache may take; None: all free memory.
        tell: called with a line that says which cache was chosen and why; not where the caller names one.
        progress: called with "prefill", the number of layers done, and the number in all; and with "compiling", the number of
            programs that this call has compiled or begins to compile, and 0, before each of them.
        watch: called with the state after every step; it must not keep the arrays, because the next step donates them.
        options: options of `AnswerOptions`: sampling, max_new_tokens, stop, seed, special_tokens, parse_special, logprobs.

    Raises:
        InputError: before anything runs, if a prompt is empty or too long, an option is out of range, or the host has too
            little memory; or if another process that shares the model gives other arguments. Later, as soon as logits are not
            finite; the message names the weight or the layer.
    """
    cache, answer, context_length = checked_policy(cache), answer_options(options), check_context(model, context_length)
    devices.check_limit(host_memory_limit)
    places = None if batch_size is None else integer("batch_size", batch_size, most=2**63)
    asked = requests(prompts)
    jobs = jobs_of(model, tokenizer, asked, answer, n=n, context_length=context_length)
    lengths = sorted((len(job.tokens) if job.sample == 0 else 1 for job in jobs), reverse=True)
    places = min(places or len(jobs), len(jobs))
    sizes = CoreSizes(
        places=places,
        prompt_tokens=lengths[0],
        new_tokens=max(job.limit for job in jobs),
        prompts=tuple(lengths[:places]),
        joins=places < len(jobs),
        samples=n > 1,
    )
    if cache is None:
        need = dict(batch_size=places, prompt_tokens=sizes.prompt_tokens, new_tokens=sizes.new_tokens, joins=sizes.joins)
        choice = batch_choice(model, device_memory=device_memory, host_memory_limit=host_memory_limit, **need)
        cache = choice.policy
        if tell is not None:
            tell(choice.reason)
    if processes_of(model.mesh) > 1:
        texts = [job.tokens.tolist() for job in jobs]
        processes.check_alike("prompts, options or cache", (texts, asked, answer, cache, sizes, model.mesh))
    with prefilling(progress, places * model.config.num_hidden_layers) as layer_done, processes.watched():
        options = dict(host_memory_limit=host_memory_limit, progress=layer_done, watch=watch)
        core = Core(model, tokenizer, cache, sizes, **options)
        for job in jobs:
            core.submit(job)
        while core.busy:
            for _, outcome in core.step():
                if isinstance(outcome, InputError):
                    raise outcome
                yield outcome


def generate(
    model: CausalLM, tokenizer: Any, prompts: Prompt | Request | Sequence[Prompt | Request], **options: Any
) -> list[GenerationResponse]:
    """Returns the whole answers, `n` per prompt; arguments and errors are those of `stream_generate`."""
    return joined(stream_generate(model, tokenizer, prompts, **options))
