"""Text in, text out: generate, stream_generate and what they answer with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from icejax.cache import Clustered, name_of
from icejax.cache.host import raise_pinned_limit
from icejax.cache.policy import CachePolicy
from icejax.checkpoint.folder import resolve
from icejax.checkpoint.load import Progress, load_model, read_config
from icejax.detokenize import Detokenizer, stop_strings
from icejax.diagnose import not_finite
from icejax.errors import InputError
from icejax.inference import NOT_FINITE, DecodeState, Decoding, Step, prefill
from icejax.models import CausalLM
from icejax.plan import Plan, make_plan
from icejax.prompts import check_context, encode
from icejax.ranges import whole
from icejax.sampling import Sampling
from icejax.tokenizer import load_tokenizer

ASSETS = Path(__file__).parent / "assets"
MAX_NEW_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class GenerationResponse:
    """A piece of one row's text while it streams, or, from `generate`, all of it. Bytes and pages are this row's share.

    Attributes:
        row: which prompt it answers.
        text, token_ids: the new text and its tokens; a final eos is among the tokens and not in the text.
        prompt_tokens, new_tokens: tokens so far.
        finish_reason: `stop` (an eos or a stop string), `length`, or None while the row goes on.
        ttft_s: seconds from the call to the first token.
        tpot_s: median seconds per token after it; None until the row has ended.
        prefill_tps, decode_tps: tokens per second of this row in the two phases.
        cache, budget: the policy's name, and tokens attended exactly per KV head and layer (None: all).
        device_kv_bytes, digest_bytes: keys and values, and digests, on the device.
        host_kv_bytes: the pool.
        full_kv_bytes: what the keys and values of all tokens so far take.
        pages_selected, pages_fetched: pages attended to exactly, and brought from the host, over steps, layers, KV heads.
        hit_rate: share of the pages needed that were on the device already (`Clustered.resident`); None without pages.
    """

    row: int
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    finish_reason: str | None
    ttft_s: float
    tpot_s: float | None
    prefill_tps: float
    decode_tps: float | None
    cache: str
    budget: int | None
    device_kv_bytes: int
    digest_bytes: int
    host_kv_bytes: int
    full_kv_bytes: int
    pages_selected: int
    pages_fetched: int
    hit_rate: float | None
    fetch_backend: str | None
    device: str
    dtype: str


def load(path: str | Path = ASSETS, *, dtype: str | None = None, progress: Progress | None = None) -> tuple[CausalLM, Any]:
    """Returns the model and the tokenizer of a Hugging Face folder, an icejax folder or a hub id; the bundled ones without.

    Raises:
        InputError: something about the folder is not as it should be; the message says what.
    """
    raise_pinned_limit()
    folder = resolve(path)
    read_config(folder)
    tokenizer = load_tokenizer(folder)
    return load_model(folder, dtype=dtype, progress=progress), tokenizer


def stream_generate(
    model: CausalLM,
    tokenizer: Any,
    prompts: str | Sequence[str],
    *,
    cache: CachePolicy | None = None,
    sampling: Sampling | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    stop: str | Sequence[str] = (),
    seed: int = 0,
    first_index: int = 0,
    special_tokens: bool = True,
    context_length: int | None = None,
    host_memory_limit: int | None = None,
    progress: Callable[[int], None] | None = None,
    watch: Callable[[DecodeState], None] | None = None,
) -> Iterator[GenerationResponse]:
    """Yields each row's text piece by piece; a row's last piece has a `finish_reason`.

    Args:
        prompts: one or several, run as one batch; they may differ in length.
        cache: the cache policy; None: `Clustered()`.
        sampling: None: greedy.
        stop: a string, or several, that end a text and are not part of it.
        first_index: index of the first prompt over a whole run of several batches; a prompt draws alike in all of them.
        special_tokens: whether the tokenizer adds its own (False for text that has them, as from `chat`).
        context_length: tokens of prompt and answer together; None: the model's own.
        host_memory_limit: bytes of host memory that the cache may take; None: what is free.
        progress: called with the number of layers done while the prompt runs.
        watch: called with the state after every step; it must not keep the arrays, which the next step takes.

    Raises:
        InputError: a prompt is empty or too long, an option is out of range, or the host has too little memory; before
            anything runs. Or the logits are not finite, as soon as they are; the message says where it began.
    """
    cache, sampling = Clustered() if cache is None else cache, sampling or Sampling()
    if not isinstance(cache, CachePolicy):
        raise TypeError(f"cache must be a policy such as icejax.Clustered(budget=256), got {cache!r}")
    stop = check(stop, max_new_tokens, seed)
    whole("first_index", first_index, least=0)
    context_length = check_context(model, context_length)
    prompts = [prompts] if isinstance(prompts, str) else prompts
    ids = encode(model, tokenizer, prompts, special_tokens=special_tokens, context_length=context_length)
    longest = max(map(len, ids))
    limits = [min(max_new_tokens, context_length - len(row)) for row in ids]
    started = time.perf_counter()
    plan = make_plan(model, cache, sampling, batch_size=len(ids), prompt_tokens=longest, new_tokens=max(limits))
    begun = prefill(
        model, ids, plan, seed=seed, first_index=first_index, progress=progress, host_memory_limit=host_memory_limit
    )
    run = Run(Decoding(model, plan), *begun, watch, first_index)
    eos = model.config.eos_token_ids
    rows = [Row(tokenizer, stop, eos, row, limit) for row, limit in zip(ids, limits, strict=True)]
    yield from stream(rows, still(model, cache, plan, run), run, started)


def check(stop: str | Sequence[str], max_new_tokens: int, seed: int) -> tuple[str, ...]:
    """Returns the stop strings; InputError for options of an answer that are out of range."""
    whole("max_new_tokens", max_new_tokens, most=2**63)
    whole("seed", seed, least=0, most=2**32 - 1)
    return stop_strings(stop)


@dataclass
class Run:
    """A generation on its way: its programs, what changes from step to step, and which prompt of all its first row is."""

    decoding: Decoding
    state: DecodeState
    step: Step
    pool: jax.Array | None
    watch: Callable[[DecodeState], None] | None = None
    first_index: int = 0

    def advance(self) -> None:
        """Takes a decode step."""
        self.state, self.step, self.pool = self.decoding.step(self.state, self.pool)
        if self.watch is not None:
            self.watch(self.state)


def stream(rows: Sequence[Row], still: dict[str, Any], run: Run, started: float) -> Iterator[GenerationResponse]:
    """Decodes until every row has ended, and yields what comes; `run` is up to date whenever the caller has control."""
    run.step.tokens_and_pages.block_until_ready()
    read_at, ttft = [], time.perf_counter() - started
    while any(row.finish_reason is None for row in rows):
        pending = run.step
        # The next step runs while this one's tokens are read; the first token does not wait for a program to compile.
        if read_at and not all(row.ends_with_next() for row in rows):
            run.advance()
        counts = np.asarray(pending.tokens_and_pages)
        tokens, pages = counts[0], counts[1:]
        first = not read_at
        read_at.append(time.perf_counter())
        for i, row in enumerate(rows):
            if row.finish_reason is not None:
                continue
            if tokens[i] == NOT_FINITE:
                reason = not_finite(run.decoding.model, [*row.prompt, *row.tokens])
                raise InputError(f"prompt {run.first_index + i + 1}: the model's logits are not finite: {reason}")
            text = row.take(int(tokens[i]), pages[:, i])
            count, ended = len(row.tokens), row.finish_reason is not None
            tpot = float(np.median(np.diff(read_at))) if ended and count > 1 else None
            yield GenerationResponse(
                row=i,
                text=text,
                token_ids=(row.tokens[-1],),
                prompt_tokens=len(row.prompt),
                new_tokens=count,
                finish_reason=row.finish_reason,
                ttft_s=ttft,
                tpot_s=tpot,
                prefill_tps=len(row.prompt) / ttft,
                decode_tps=1 / tpot if tpot is not None else None,
                full_kv_bytes=still["token_bytes"] * (len(row.prompt) + count),
                pages_selected=int(row.pages[0]),
                pages_fetched=int(row.pages[1]),
                hit_rate=float(1 - row.pages[1] / row.pages[2]) if row.pages[2] else None,
                **still["fields"],
            )
        if first and any(row.finish_reason is None for row in rows):
            run.advance()


def generate(model: CausalLM, tokenizer: Any, prompts: str | Sequence[str], **options: Any) -> list[GenerationResponse]:
    """Returns one whole response per prompt; the arguments are those of `stream_generate`."""
    pieces: dict[int, list[GenerationResponse]] = {}
    for piece in stream_generate(model, tokenizer, prompts, **options):
        pieces.setdefault(piece.row, []).append(piece)
    return [join(pieces[row]) for row in sorted(pieces)]


def join(pieces: Sequence[GenerationResponse]) -> GenerationResponse:
    """Returns the pieces of one row as one response."""
    return replace(
        pieces[-1], text="".join(p.text for p in pieces), token_ids=tuple(token for p in pieces for token in p.token_ids)
    )


class Row:
    """What is known on the host of one row: its tokens, its text, and why it ended."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], eos: tuple[int, ...], prompt: Sequence[int], limit: int) -> None:
        self.prompt = tuple(prompt)
        self.tokens: list[int] = []
        self.pages = np.zeros(3, np.int64)  # attended to exactly, brought from the host, needed
        self.finish_reason: str | None = None
        self._text = Detokenizer(tokenizer, stop)
        self._eos, self._limit = eos, limit

    def ends_with_next(self) -> bool:
        """Whether the row has ended, or does with its next token at the latest."""
        return self.finish_reason is not None or len(self.tokens) + 1 >= self._limit

    def take(self, token: int, pages: np.ndarray) -> str:
        """Adds a token and the pages of its step; returns the text that it completes."""
        self.tokens.append(token)
        self.pages += pages
        text = self._text.add(token)
        if token in self._eos or self._text.stopped:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self._limit:
            self.finish_reason = "length"
        return text + self._text.rest() if self.finish_reason is not None else text


def still(model: CausalLM, cache: CachePolicy, plan: Plan, run: Run) -> dict[str, Any]:
    """What does not change from token to token: the figures of the pytree, per row, and names."""
    config, batch = model.config, plan.spec.batch_size
    state, pool = run.state, run.pool
    digest_bytes = sum(policy.digest_bytes(s) for policy, s in zip(plan.policies, state.cache.layers, strict=True))
    device_bytes = sum(x.nbytes for x in jax.tree.leaves(state.cache.layers))
    item = np.dtype(jax.numpy.dtype(model.dtype)).itemsize
    device = jax.devices()[0]
    fields = dict(
        cache=name_of(cache) or type(cache).__name__.lower(),
        budget=cache.budget,
        device_kv_bytes=(device_bytes - digest_bytes) // batch,
        digest_bytes=digest_bytes // batch,
        host_kv_bytes=pool.nbytes // batch if pool is not None else 0,
        fetch_backend=plan.fetch_backend if pool is not None else None,
        device=f"{device.platform}: {device.device_kind}",
        dtype=model.dtype,
    )
    return dict(fields=fields, token_bytes=2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * item)
