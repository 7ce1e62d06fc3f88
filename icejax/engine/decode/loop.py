"""The decode loop: takes decode steps and turns each row's tokens into text, until every row has ended.

`api.generate` and `Session` call `decode_rows`. Per step one array of counters i32[8, B] comes to the host; the next step
already runs while the host reads it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from icejax.cache.protocol import CachePolicy, KVCache
from icejax.cache.registry import display_name
from icejax.checks.errors import InputError
from icejax.engine.batch import insert, without_row
from icejax.engine.decode.counters import MILLION, NOT_FINITE, NOTHING, StepCounters, pack_token
from icejax.engine.decode.logprobs import token_logprobs
from icejax.engine.decode.nonfinite import not_finite
from icejax.engine.decode.step import DecodePrograms, DecodeState, Step
from icejax.engine.plan import Plan, reports
from icejax.engine.renewal import renewed, without_cache
from icejax.engine.response import GenerationResponse, RunReport, TokenLogprobs
from icejax.engine.sampling import row_keys
from icejax.models.decoder import CausalLM
from icejax.runtime import devices
from icejax.runtime.compile_clock import Mark
from icejax.text.detokenize import Detokenizer
from icejax.text.reasoning import Parts, splitter

LOG = logging.getLogger(__name__)


@dataclass
class Run:
    """A running generation: its programs, and the values that change from step to step.

    Attributes:
        step: the newest step, whose tokens are not yet in the cache.
        watch: called with the state after every step.
        fed: the step whose tokens the newest step has put into the cache; None before the first step.
        renewing: whether a row's cache is being computed anew, or that was interrupted.
    """

    decoding: DecodePrograms
    state: DecodeState
    step: Step
    pool: jax.Array | None
    watch: Callable[[DecodeState], None] | None = None
    fed: Step | None = None
    renewing: bool = False

    def advance(self) -> None:
        """Takes a decode step."""
        self.fed = self.step
        self.state, self.step, self.pool = self.decoding.step(self.state, self.pool)
        if self.watch is not None:
            self.watch(self.state)

    def end(self, rows: Sequence[bool]) -> None:
        """Marks the rows where `rows` is true as ended: no pages and experts are fetched for them any more."""
        self.state = replace(self.state, done=self.state.done | np.asarray(rows))

    def take_out(self, at: int) -> DecodeState:
        """Returns the row `at` without its cache, for `renew`; among several rows its place counts as ended until then."""
        row, rows = without_cache(self.state, at), np.arange(len(self.state.done))
        if len(rows) > 1:
            self.end(rows == at)
        return row

    def renew(self, at: int, row: DecodeState, text: Sequence[int]) -> None:
        """Prefills the whole text of a row that was taken out, and puts the row back."""
        self.renewing, alone = True, len(self.state.done) == 1
        if alone:
            self.state, self.fed, self.decoding.clock = row, self.step, 0  # frees the old cache before the new one is made
        row, step, self.pool = renewed(self.decoding.model, self.decoding.plan, row, text, self.pool)
        self.state = row if alone else insert(without_row(self.state, at), row, at, plan=self.decoding.plan)
        self.step, self.renewing = step if alone else self.step.with_row(at, step), False

    @property
    def interrupted(self) -> bool:
        """Whether a step or a text was interrupted: the old arrays were donated, and no new ones came back."""
        return any(x.is_deleted() for x in (*jax.tree.leaves(self.state), self.pool) if x is not None)

    @property
    def seen(self) -> int:
        """Number of tokens of the first row that are in the cache."""
        return int(self.state.cache.lengths.seen[0])

    def check(self, tokens: int) -> None:
        """Raises InputError if a fault or an interrupt left the cache incomplete; `tokens`: number of the row's tokens."""
        if self.interrupted or self.seen > tokens:
            raise InputError(
                "the session's last answer was interrupted and left an incomplete cache: "
                "load what was saved, or begin a new one"
            )

    def unread_token(self, tokens: int) -> list[int]:
        """Returns the token that is in the cache but was not read because of an interrupt, as a list of at most one.

        Args:
            tokens: number of the row's tokens that were read.
        """
        if self.interrupted or self.fed is None or self.seen != tokens + 1:
            return []
        token = int(self.fed.tokens[0])
        return [] if token == NOT_FINITE else [token]


def resumed_run(model: CausalLM, plan: Plan, cache: KVCache, pool: jax.Array | None) -> Run:
    """Returns the run of one row from a saved cache, for `extend` to add text to."""
    zeros = jnp.zeros(1, jnp.int32)
    state = DecodeState(cache, zeros, zeros > 0, row_keys([(0, 0)]), jnp.copy(zeros))
    return Run(DecodePrograms(model, plan), state, Step(pack_token(zeros), jnp.zeros((1, 1))), pool)


def decode_rows(rows: Sequence[Row], constants: RunConstants, run: Run, started: Mark) -> Iterator[GenerationResponse]:
    """Decodes until every row has ended, and yields a response per row and token.

    `run` holds the newest state whenever the caller has control.

    Args:
        started: the start of the call, from which the time to the first token is counted.

    Raises:
        InputError: a row's logits are not finite.
    """
    run.step.counters.block_until_ready()
    read_at, ready = [], Mark.now()
    ttft, compile_s = ready.time - started.time, ready.compiling - started.compiling
    LOG.info("first token after %.2f s, %.2f s of them compiling", ttft, compile_s)
    logprobs = {i: row.logprobs for i, row in enumerate(rows) if row.logprobs is not None}
    options = dict(most=max(logprobs.values(), default=0), tokenizer=rows[0].tokenizer)
    while any(row.finish_reason is None for row in rows):
        pending = run.step
        outgrown = {i: run.take_out(i) for i, row in enumerate(rows) if row.reaches(run.decoding.plan.renewal)}
        is_step = not all(i in outgrown or row.ends_with_next() for i, row in enumerate(rows))
        # The next step runs while the host reads this one's tokens. The first token does not wait for the step to compile.
        if read_at and is_step:
            run.advance()
        counters = StepCounters.read(pending.counters)
        live, row_logprobs = [i for i, row in enumerate(rows) if row.finish_reason is None], {}
        for row in (rows[i] for i in live if counters.token[i] == NOT_FINITE):
            reason = not_finite(run.decoding.model, [*row.prompt, *row.tokens])
            raise InputError(f"prompt {row.number}: the model's logits are not finite: {reason}")
        if counts := {i: logprobs[i] for i in live if i in logprobs}:
            row_logprobs = token_logprobs(pending.logits, pending.tokens, counts=counts, **options)
        first = not read_at
        read_at.append(time.perf_counter())
        for i, row in ((i, rows[i]) for i in live):
            parts = row.take(counters.row(i))
            tpot = float(np.median(np.diff(read_at))) if row.finish_reason is not None and len(row.tokens) > 1 else None
            timing = dict(ttft_s=ttft, compile_s=compile_s, tpot_s=tpot)
            yield _piece(i, row, parts, row_logprobs.get(i), timing, constants)
        ended = [row.finish_reason is not None for row in rows]
        if any(ended[i] for i in live) and not all(ended):
            run.end(ended)
        if first and is_step and not all(ended):
            run.advance()
        for i, row_state in outgrown.items():
            if not ended[i]:
                run.renew(i, row_state, [*rows[i].prompt, *rows[i].tokens])


def _piece(
    index: int, row: Row, parts: Parts, logprobs: TokenLogprobs | None, timing: dict[str, Any], constants: RunConstants
) -> GenerationResponse:
    """Returns the response for a row's newest token."""
    totals, count, tpot = row.totals, len(row.tokens), timing["tpot_s"]
    steps = count - 1  # the first token came with the prompt
    return GenerationResponse(
        row=index,
        text=parts.text,
        reasoning=parts.reasoning,
        token_ids=(row.tokens[-1],),
        logprobs=None if logprobs is None else (logprobs,),
        prompt_tokens=len(row.prompt),
        new_tokens=count,
        finish_reason=row.finish_reason,
        prefill_tps=row.fed / timing["ttft_s"],
        decode_tps=1 / tpot if tpot is not None else None,
        full_kv_bytes=constants.token_bytes * (len(row.prompt) + count),
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


class Row:
    """The host's record of one row: its tokens, its text, and why it ended.

    Attributes:
        number: number of its prompt in error messages, from 1.
        tokens: tokens of the answer so far.
        totals: sums of its steps' counters.
        fed: number of tokens that ran before the first answer token: the prompt, or a session's newest text.
        logprobs: number of most likely tokens to report with each token; None: no log-probabilities.
        finish_reason: `stop`, `length`, or None while the row goes on.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str],
        eos: tuple[int, ...],
        prompt: Sequence[int],
        limit: int,
        *,
        number: int = 1,
        fed: int | None = None,
        logprobs: int | None = None,
    ) -> None:
        self.tokenizer, self.prompt, self.number, self.logprobs = tokenizer, tuple(prompt), number, logprobs
        self.fed = len(prompt) if fed is None else fed
        self.tokens: list[int] = []
        self.totals = NOTHING
        self.finish_reason: str | None = None
        self._text, self._splitter = Detokenizer(tokenizer, stop, before=self.prompt), splitter(tokenizer, self.prompt)
        self._eos, self._limit = eos, limit

    def ends_with_next(self) -> bool:
        """Whether the row has ended, or reaches its token limit with the next token."""
        return self.finish_reason is not None or len(self.tokens) + 1 >= self._limit

    def reaches(self, tokens: int) -> bool:
        """Whether the next token makes the text `tokens` tokens long, and the row may go on."""
        return len(self.prompt) + len(self.tokens) + 1 == tokens and not self.ends_with_next()

    @property
    def holds_more(self) -> bool:
        """Whether the answer's tokens are more than its text and an end: thoughts, channels or a stop string."""
        return self._splitter.apart or self._text.stopped

    def take(self, counters: StepCounters) -> Parts:
        """Adds a step's token and counters to the row; returns the text and the thoughts that the token completes."""
        token = counters.token
        self.tokens.append(token)
        self.totals = self.totals.plus(counters)
        ends = token in self._eos
        text = "" if ends else self._text.add(token)
        special = None if ends or self._text.stopped else self._text.special(token)
        if ends or self._text.stopped:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self._limit:
            self.finish_reason = "length"
        parts = self._splitter.take(text, special)
        if self.finish_reason is None:
            return parts
        return parts.plus(self._splitter.take(self._text.rest())).plus(self._splitter.rest())


@dataclass(frozen=True)
class RunConstants:
    """The values of a run that are the same for every token.

    Attributes:
        report: the measurements of the run.
        token_bytes: bytes of a token's keys and values in all layers of a full cache.
        expert_bytes: bytes of one expert in host memory; 0 if no experts are there.
    """

    report: RunReport
    token_bytes: int
    expert_bytes: int


def run_constants(model: CausalLM, cache: CachePolicy, plan: Plan, run: Run) -> RunConstants:
    """Returns the constants of a run; the report's bytes are those of the run's arrays, divided by the number of rows."""
    config, batch = model.config, plan.spec.batch_size
    digest_bytes = sum(report.digest_bytes for report in reports(plan, run.state.cache))
    device_bytes = sum(x.nbytes for x in jax.tree.leaves(run.state.cache.layers))
    report = RunReport(
        cache=display_name(cache),
        budget=cache.budget,
        device_kv_bytes=(device_bytes - digest_bytes) // batch,
        digest_bytes=digest_bytes // batch,
        host_kv_bytes=run.pool.nbytes // batch if run.pool is not None else 0,
        fetch_backend=plan.fetch_backend if run.pool is not None else None,
        device=devices.device_name(),
        dtype=model.dtype,
    )
    specs = map(plan.spec_of, range(config.num_hidden_layers))
    item = jnp.dtype(model.dtype).itemsize
    return RunConstants(
        report=report,
        token_bytes=sum(spec.num_kv_heads * sum(spec.planes) for spec in specs) * item,
        expert_bytes=max(0 if layer.experts is None else layer.experts.bytes_from_host for layer in model.model.layers),
    )
