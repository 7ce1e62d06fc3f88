"""Responses: the text of an answer with its measurements. The decode loop makes them, callers read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Logprob:
    """A token's natural log-probability under the model's own logits, before temperature, penalty and filters.

    Attributes:
        text: the text that the token adds, a leading space included; U+FFFD for a part of a character.
        bytes: the UTF-8 bytes of the text, or those of the part of a character.
    """

    token_id: int
    text: str
    logprob: float
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a chosen token, and of the most likely tokens at its position, best first."""

    chosen: Logprob
    top: tuple[Logprob, ...]


class Attention(NamedTuple):
    """The attention of a row to tokens in host memory, as a picture.

    Attributes:
        layers: numbers of the layers, the rows of the picture.
        tokens: number of tokens of the prompt, over which the columns are equal stretches: column i of n begins at position
            `int(i * tokens / n)`.
        steps: decode steps so far.
        weights: f32[L, n], attention weights summed over query heads and positions, mean over the steps.
    """

    layers: tuple[int, ...]
    tokens: int
    steps: int
    weights: np.ndarray


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The measurements that are the same for every token of a run. Bytes are reserved bytes divided by the number of
    rows that decode at once; those of the prefix store do not count.

    Attributes:
        cache: name of the policy.
        budget: tokens attended exactly per KV head and layer; None: all.
        device_kv_bytes: bytes of keys and values on the device.
        digest_bytes: bytes of digests on the device.
        host_kv_bytes: bytes of the pool in host memory.
        fetch_backend: backend that reads host memory; None without a pool.
        device: platform and kind of the device.
        dtype: dtype of the model's activations, by name.
    """

    cache: str
    budget: int | None
    device_kv_bytes: int
    digest_bytes: int
    host_kv_bytes: int
    fetch_backend: str | None
    device: str
    dtype: str


@dataclass(frozen=True, kw_only=True)
class GenerationResponse:
    """One row's answer: the newest piece while it streams, or the whole of it from `generate`.

    Attributes:
        row: index of the prompt, from 0.
        sample: index of the answer among the answers to the prompt, from 0.
        text, token_ids: the new text and its tokens. A final eos token is among the tokens but not in the text.
        reasoning: the new text of the model's thoughts (`<think>`, harmony's analysis), which `text` leaves out; None if there
            are none. It can be read as `reasoning_content` too.
        logprobs: one entry per token in `token_ids`; None unless requested.
        prompt_logprobs: one entry per prompt token but the first, in an answer's first piece; None unless requested.
        attention: what the row has attended to so far, in its first and last pieces and in every fourth; None unless requested.
        prompt_tokens, new_tokens: number of prompt tokens, and of answer tokens so far.
        cached_tokens: number of prompt tokens that were in a cache before the call, of a session or of the prefix store.
        finish_reason: `stop` (an eos token or a stop string), `length`, or None while the row continues.
        ttft_s: seconds from the call until the row's first token is computed. Tokenizing the call's prompts, waiting for a
            place and the work of other rows count.
        compile_s: the seconds of `ttft_s` spent on tracing and compiling; later calls with the same sizes skip them.
        tpot_s: median seconds per token after the first, the caller's work between tokens included; None until the row has
            ended.
        prefill_tps: prompt tokens without `cached_tokens` over the seconds of the row's own prefill, compiling included.
        decode_tps: the row's own tokens per second after the first, `1 / tpot_s`.
        full_kv_bytes: bytes that a full cache would take for the row's tokens so far.
        pages_selected, pages_fetched: pages attended to exactly, and pages fetched from host memory, summed over steps, layers
            and KV heads; single tokens if the policy fetches single tokens.
        hit_rate: share of the needed pages that were on the device already (`Clustered.resident`); None without pages.
        estimated_error: the policy's estimate of its attention's relative error, mean over steps, layers and heads; None if
            the policy has no estimate, and before the second token.
        budget_used: tokens attended exactly, mean over steps, layers and KV heads; None when `estimated_error` is None.
        expert_hit_rate: share of the experts used by tokens after the first that were on the device already, or were fetched
            for an earlier row; None unless experts are in host memory.
        expert_bytes_per_token: bytes of experts fetched from host memory per token after the first; None when
            `expert_hit_rate` is None.
        run: measurements of the whole run.
    """

    row: int
    sample: int
    text: str
    reasoning: str | None
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None
    attention: Attention | None = field(compare=False)  # arrays
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    finish_reason: str | None
    ttft_s: float
    compile_s: float
    tpot_s: float | None
    prefill_tps: float
    decode_tps: float | None
    full_kv_bytes: int
    pages_selected: int
    pages_fetched: int
    hit_rate: float | None
    estimated_error: float | None
    budget_used: float | None
    expert_hit_rate: float | None
    expert_bytes_per_token: float | None
    run: RunReport

    @property
    def reasoning_content(self) -> str | None:
        """`reasoning`, by the name that some programs know it by."""
        return self.reasoning


def joined(pieces: Iterable[GenerationResponse]) -> list[GenerationResponse]:
    """Returns the pieces of several rows, mixed, as one response per row and sample, in their order."""
    by_row: dict[tuple[int, int], list[GenerationResponse]] = {}
    for piece in pieces:
        by_row.setdefault((piece.row, piece.sample), []).append(piece)
    return [join(by_row[row]) for row in sorted(by_row)]


def join(pieces: Sequence[GenerationResponse]) -> GenerationResponse:
    """Returns the pieces of one row as one response."""
    thoughts = [p.reasoning for p in pieces if p.reasoning is not None]
    return replace(
        pieces[-1],
        text="".join(p.text for p in pieces),
        reasoning="".join(thoughts) if thoughts else None,
        token_ids=tuple(token for p in pieces for token in p.token_ids),
        prompt_logprobs=pieces[0].prompt_logprobs,
        logprobs=None if pieces[-1].logprobs is None else tuple(token for p in pieces for token in p.logprobs),
    )
