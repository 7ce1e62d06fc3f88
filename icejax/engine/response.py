"""What an answer says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability (natural) in the model's own distribution: before temperature, penalty and the like."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a token that was chosen, and of the most likely ones in its place, best first."""

    chosen: Logprob
    top: tuple[Logprob, ...]


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What is the same for every token of a run. Bytes are a row's share of what is reserved.

    Attributes:
        cache: the policy's name.
        budget: tokens attended exactly per KV head and layer; None: all.
        device_kv_bytes: keys and values on the device.
        digest_bytes: digests on the device.
        host_kv_bytes: the pool in host memory.
        fetch_backend: how host memory is read; None without a pool.
        device: platform and kind of the device.
        dtype: of the model's activations.
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
    """A piece of one row's text while it streams, or, from `generate`, all of it.

    Attributes:
        row: which prompt it answers.
        text, token_ids: the new text and its tokens; a final eos is among the tokens and not in the text.
        logprobs: of every token in `token_ids`; None unless asked for.
        prompt_tokens, new_tokens: tokens so far.
        finish_reason: `stop` (an eos or a stop string), `length`, or None while the row goes on.
        ttft_s: seconds from the call to the first token, tokenizing included.
        compile_s: how many of these went into tracing and compiling programs, which later calls of the same sizes do not do.
        tpot_s: median seconds per token after it, with what the reader does between them; None until the row has ended.
        prefill_tps, decode_tps: tokens per second of this row in the two phases, compiling included in the first.
        full_kv_bytes: what a full cache would take for the row's tokens so far.
        pages_selected, pages_fetched: pages attended to exactly, and pages that came from host memory, summed over steps,
            layers and KV heads; single tokens where the policy fetches those.
        hit_rate: share of the pages needed that were on the device already (`Clustered.resident`); None without pages.
        estimated_error: the cache's own estimate of the relative error of its attention, mean over steps, layers and heads;
            None of a policy that has none, and before the second token.
        budget_used: tokens attended exactly, mean over steps, layers and KV heads; None likewise.
        expert_hit_rate: share of the experts taken by tokens after the first that were on the device already, or came for an
            earlier row; None unless experts are in host memory.
        expert_bytes_per_token: bytes of experts that came from there, for each of these tokens; None likewise.
        run: what is the same for every token of the run.
    """

    row: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_tokens: int
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


def join(pieces: Sequence[GenerationResponse]) -> GenerationResponse:
    """Returns the pieces of one row as one response."""
    return replace(
        pieces[-1],
        text="".join(p.text for p in pieces),
        token_ids=tuple(token for p in pieces for token in p.token_ids),
        logprobs=None if pieces[-1].logprobs is None else tuple(token for p in pieces for token in p.logprobs),
    )
