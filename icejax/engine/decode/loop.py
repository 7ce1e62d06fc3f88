"""The decode loop: takes decode steps and turns each row's tokens into responses.

The core and `Session` call it. Per step one array of counters i32[8, B] comes to the host; the next step already runs while
the host reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from icejax.cache.protocol import CachePolicy
from icejax.checks.errors import InputError
from icejax.engine.batch import without_row
from icejax.engine.decode.counters import NOT_FINITE, StepCounters
from icejax.engine.decode.logprobs import TopLogprobs
from icejax.engine.decode.nonfinite import not_finite
from icejax.engine.decode.row import Row
from icejax.engine.decode.run import Run, RunConstants, run_constants
from icejax.engine.decode.state import Step
from icejax.engine.response import GenerationResponse

LOG = logging.getLogger(__name__)
Outcome = GenerationResponse | InputError


class DecodeLoop:
    """Rows that decode together.

    `run` holds the newest state whenever the caller has control.

    Attributes:
        rows: the unfinished rows, by their places in the batch.
    """

    def __init__(self, run: Run, constants: RunConstants) -> None:
        self.run, self.constants = run, constants
        self.rows: dict[int, Row] = {}
        self._has_stepped, self._most_logprobs = False, 0

    def put(self, at: int, row: Row) -> None:
        """Takes a row whose state is in the place `at` of the run, and whose first token is in the run's newest step."""
        self.run.step.counters.block_until_ready()
        row.begin()
        LOG.info("first token after %.2f s, %.2f s of them compiling", *row.first_token.values())
        self.rows[at] = row
        self._most_logprobs = max(self._most_logprobs, row.logprobs or 0)

    def drop(self, at: int) -> None:
        """Frees the place of a row that has ended or was stopped; its place then reads and writes nothing among other rows."""
        self.rows.pop(at, None)
        if self.run.size > 1:
            self.run.state = without_row(self.run.state, at)

    def resize(self, places: Sequence[int], size: int) -> None:
        """Continues with `size` places, of which the first have the rows of `places`, in that order."""
        self.run.resize(places, size)
        self.rows = {at: self.rows[old] for at, old in enumerate(places)}

    def step(self) -> Iterator[tuple[int, Outcome]]:
        """Reads the newest token of every row and takes a step; yields each row's place and its response, or its error.

        A row that has ended or failed leaves `rows`. A row fails if its logits are not finite, the tokenizer fails, or its
        grammar can be followed no further.
        """
        run, rows = self.run, dict(self.rows)
        run.force({at: row.next_forced for at, row in rows.items() if row.forced})
        run.constrain({at: row.mask for at, row in rows.items() if row.mask is not None})
        pending = run.step
        outgrown = {at: run.take_out(at) for at, row in rows.items() if row.reaches(run.decoding.plan.renewal)}
        is_step = not all(at in outgrown or row.ends_with_next() for at, row in rows.items())
        # The next step runs while the host reads this one's tokens. The first token does not wait for the step to compile.
        runs_ahead = self._has_stepped and is_step
        if runs_ahead:
            run.advance()
        counters, ranked = StepCounters.read(pending.counters), self._ranked(pending)
        for at, row in rows.items():
            if at not in self.rows:  # the caller has dropped it since the step began
                continue
            if counters.token[at] == NOT_FINITE:
                del self.rows[at]
                reason = not_finite(run.decoding.model, [*row.prompt, *row.tokens])
                yield at, InputError(f"prompt {row.number}: the model's logits are not finite: {reason}")
                continue
            try:
                parts = row.take(counters.row(at))
                logprobs = None if row.logprobs is None else ranked.named(at, row.logprobs, row.tokenizer)
            except InputError as error:  # the tokenizer fails, or the grammar
                del self.rows[at]
                yield at, error
                continue
            if row.finish_reason is not None:
                del self.rows[at]
            yield at, row.response(parts, logprobs, self.constants)
        if self.rows and is_step and not runs_ahead:
            self._has_stepped = True
            run.advance()
        for at, row_state in outgrown.items():
            if at in self.rows:
                run.renew(at, row_state, [*rows[at].prompt, *rows[at].tokens])

    def _ranked(self, pending: Step) -> TopLogprobs | None:
        if all(row.logprobs is None for row in self.rows.values()):
            return None
        return TopLogprobs(pending.logits, pending.tokens, most=self._most_logprobs)


def decode_row(row: Row, run: Run, cache: CachePolicy) -> Iterator[GenerationResponse]:
    """Decodes one row until it has ended, and yields a response per token.

    Raises:
        InputError: the row's logits are not finite.
    """
    loop = DecodeLoop(run, run_constants(run, cache))
    loop.put(0, row)
    while loop.rows:
        for _, outcome in loop.step():
            if isinstance(outcome, InputError):
                raise outcome
            yield outcome
