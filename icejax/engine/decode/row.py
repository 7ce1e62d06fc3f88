"""The host's record of a row while it decodes: its tokens, text and times, and the response for each token.

The decode loop calls it. Tokens come from the device as integers; everything here is on the host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from icejax.engine.decode.attention_map import AttentionMap
from icejax.engine.decode.counters import MILLION, NOTHING, StepCounters
from icejax.engine.decode.run import RunConstants
from icejax.engine.response import Attention, GenerationResponse, TokenLogprobs
from icejax.runtime.compile_clock import Mark
from icejax.text.detokenize import Detokenizer
from icejax.text.grammar.matcher import Matcher
from icejax.text.reasoning import Parts, Whole, splitter

PICTURES = 4  # tokens from one picture of a row's attention to the next


class Row:
    """The host's record of one row: its tokens, its text, and why it ended.

    Attributes:
        index, sample: `row` and `sample` of its responses.
        number: number of its prompt in error messages, from 1.
        tokens: tokens of the answer so far.
        totals: sums of its steps' counters.
        limit: maximum number of answer tokens.
        fed: number of tokens that ran before the first answer token: the prompt, or a session's newest text.
        logprobs: number of most likely tokens to report with each token; None: no log-probabilities.
        forced: tokens of the answer in place of the model's choices; empty: the model answers.
        matcher: the place of the answer in its grammar; None: it has none.
        prompt_logprobs: those of the prompt's tokens, which the first response has; None: there are none.
        attention: what the row attends to; None: nobody asks.
        finish_reason: `stop`, `length`, or None while the row continues.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str],
        eos: tuple[int, ...],
        prompt: Sequence[int],
        limit: int,
        *,
        index: int = 0,
        sample: int = 0,
        number: int = 1,
        fed: int | None = None,
        logprobs: int | None = None,
        forced: Sequence[int] = (),
        matcher: Matcher | None = None,
        whole_text: bool = False,
        started: Mark | None = None,
    ) -> None:
        """Begins a row without tokens, whose prefill begins now.

        Args:
            whole_text: as in `Request`.
            started: the start of the call, from which the time to the first token is counted; None: now.
        """
        self.tokenizer, self.prompt, self.logprobs = tokenizer, tuple(prompt), logprobs
        self.index, self.sample, self.number = index, sample, number
        self.fed = len(prompt) if fed is None else fed
        self.tokens: list[int] = []
        self.forced, self.matcher = forced, matcher
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self.attention: AttentionMap | None = None
        self.totals = NOTHING
        self.finish_reason: str | None = None
        self._text = Detokenizer(tokenizer, stop, before=self.prompt)
        self._splitter = Whole() if whole_text else splitter(tokenizer, self.prompt)
        self._eos, self.limit = eos, limit
        self._started, self._prefill_from = started or Mark.now(), time.perf_counter()
        self._ready, self._read_at = self._started, list[float]()

    @property
    def next_forced(self) -> int | None:
        """The next token, if the model does not choose it."""
        return self.forced[len(self.tokens)] if self.forced else None

    @property
    def mask(self) -> np.ndarray | None:
        """The tokens that the grammar allows next, u32[W]; None: all."""
        return None if self.matcher is None else self.matcher.mask

    def ends_with_next(self) -> bool:
        """Whether the row has ended, or reaches its token limit with the next token."""
        return self.finish_reason is not None or len(self.tokens) + 1 >= self.limit

    def reaches(self, tokens: int) -> bool:
        """Whether the next token makes the text `tokens` tokens long, and the row may continue."""
        return len(self.prompt) + len(self.tokens) + 1 == tokens and not self.ends_with_next()

    @property
    def holds_more(self) -> bool:
        """Whether the answer's tokens are more than its text and an end: thoughts, channels or a stop string."""
        return self._splitter.apart or self._text.stopped

    def begin(self) -> None:
        """Takes the present moment as that of the first token."""
        self._ready = Mark.now()

    @property
    def first_token(self) -> dict[str, float]:
        """The seconds to the first token, and those of them that were spent on compiling."""
        return dict(ttft_s=self._ready.time - self._started.time, compile_s=self._ready.compiling - self._started.compiling)

    def take(self, counters: StepCounters) -> Parts:
        """Adds a step's token and counters to the row; returns the text and the thoughts that the token completes.

        Raises:
            InputError: the tokenizer fails, or the grammar can be followed no further.
        """
        token = counters.token
        self._read_at.append(time.perf_counter())
        self.tokens.append(token)
        self.totals = self.totals.plus(counters)
        ends = token in self._eos and not self.forced
        text = "" if ends else self._text.add(token)
        special = None if ends or self._text.stopped else self._text.special(token)
        if self.matcher is not None and not ends:
            self.matcher.take(token)
        if ends or self._text.stopped or (self.matcher is not None and self.matcher.over):
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"
        parts = self._splitter.take(text, special)
        if self.finish_reason is None:
            return parts
        return parts.plus(self._splitter.take(self._text.rest())).plus(self._splitter.rest())

    def response(self, parts: Parts, logprobs: TokenLogprobs | None, constants: RunConstants) -> GenerationResponse:
        """Returns the response for the row's newest token."""
        totals, count, tpot = self.totals, len(self.tokens), None
        steps = count - 1  # the first token came with the prompt
        if self.finish_reason is not None and steps:
            tpot = float(np.median(np.diff(self._read_at)))
        timing = self.first_token
        return GenerationResponse(
            row=self.index,
            sample=self.sample,
            text=parts.text,
            reasoning=parts.reasoning,
            token_ids=(self.tokens[-1],),
            logprobs=None if logprobs is None else (logprobs,),
            prompt_logprobs=self.prompt_logprobs if count == 1 else None,
            attention=self._picture(),
            prompt_tokens=len(self.prompt),
            cached_tokens=len(self.prompt) - self.fed,
            new_tokens=count,
            finish_reason=self.finish_reason,
            tpot_s=tpot,
            prefill_tps=self.fed / (self._ready.time - self._prefill_from),
            decode_tps=1 / tpot if tpot is not None else None,
            full_kv_bytes=constants.token_bytes * (len(self.prompt) + count),
            pages_selected=totals.pages_attended,
            pages_fetched=totals.pages_fetched,
            hit_rate=1 - totals.pages_fetched / totals.pages_needed if totals.pages_needed else None,
            estimated_error=totals.error_millionths / MILLION / steps if totals.tokens_attended else None,
            budget_used=totals.tokens_attended / steps if totals.tokens_attended else None,
            expert_hit_rate=1 - totals.experts_fetched / totals.experts_taken if totals.experts_taken else None,
            expert_bytes_per_token=constants.expert_bytes * totals.experts_fetched / steps if totals.experts_taken else None,
            run=constants.report,
            **timing,
        )

    def _picture(self) -> Attention | None:
        is_due = len(self.tokens) % PICTURES == 1 or self.finish_reason is not None
        return self.attention.picture() if self.attention is not None and is_due else None
