"""The engine's core: rows of one decoding batch come and go, and each piece of work is a call in the caller's thread.

`api.generate` drives a core until all its requests are answered. `serving.thread` drives one in a thread of its own, for
callers that come at any time. One core owns the decoding batch, the pool and its extents.

    core = Core(model, tokenizer, policy, sizes)
    core.submit(job)
    while core.busy:
        for ticket, outcome in core.step(): ...
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from icejax.cache.pool import allocation
from icejax.cache.pool.extents import Extents
from icejax.cache.pool.page_format import pool_shapes
from icejax.cache.protocol import CachePolicy
from icejax.checks.errors import InputError
from icejax.engine import batch
from icejax.engine.decode.attention_map import check_has_pages
from icejax.engine.decode.counters import pack_nothing
from icejax.engine.decode.loop import DecodeLoop, Outcome
from icejax.engine.decode.row import Row
from icejax.engine.decode.run import Run, constants
from icejax.engine.decode.state import DecodeState, Step
from icejax.engine.decode.step import DecodePrograms
from icejax.engine.penalties import row_options
from icejax.engine.plan import Plan, make_plan
from icejax.engine.sampling import Sampling
from icejax.engine.serving.job import CoreSizes, Job
from icejax.engine.serving.prefix_cache import PrefixCache, divided
from icejax.engine.serving.prefix_folder import PrefixFolder
from icejax.engine.serving.prefixes import BLOCK, chain
from icejax.engine.serving.route import whole_route
from icejax.engine.serving.scheduler import Scheduler, Ticket, Work
from icejax.engine.serving.start import RowStart
from icejax.engine.snapshot.fingerprint import check_registered, fingerprint, weights_sum
from icejax.models.decoder import CausalLM
from icejax.runtime import heap, processes
from icejax.runtime.mesh import check_one_process, placed

LOG = logging.getLogger(__name__)
UNIT_S = 0.2  # seconds, beside half a step, that units of prefill may delay the rows that decode
SAMPLES_BYTES = 2**30  # bytes of arrays of prompts that have several answers


class Core:
    """A decoding batch whose rows come and go.

    Attributes:
        plan: the plan of the batch.
        scheduler: the queue.
        pool: the pool while no row decodes, which else the run has; None without a pool.
        constants: what is the same for all answers.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Any,
        policy: CachePolicy,
        sizes: CoreSizes,
        *,
        host_memory_limit: int | None = None,
        prefix_dir: Path | None = None,
        share: float = 1.0,
        most_waiting: int | None = None,
        progress: Callable[[int], None] | None = None,
        watch: Callable[[DecodeState], None] | None = None,
        agreed: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        """Allocates the pool.

        Args:
            host_memory_limit: bytes of host memory that the pool may take; None: all free memory.
            prefix_dir: the folder for cached prefixes; None: they stay in memory.
            share, most_waiting: as in `Scheduler`.
            progress: called with the number of layers that prompts have gone through, until the first decode step.
            watch: called with the state after every step.
            agreed: returns what process 0 of a group passes, in all of its processes; called with what the clock decides.

        Raises:
            InputError: the host has too little memory for the pool, the cache does not fit the model, or the folder cannot be
                used.
        """
        tokens = dict(prompt_tokens=sizes.prompt_tokens, new_tokens=sizes.new_tokens)
        self.plan = make_plan(model, policy, batch_size=sizes.places, joins=sizes.joins, **tokens)
        self._row_plan = self._plan_of(1)
        self._model, self._tokenizer = model, tokenizer
        self._progress, self._watch, self._agreed = progress, watch, agreed
        prefix_extents, prefix_bytes = divided(self.plan, sizes.prefix_memory)
        if sizes.samples:
            prefix_bytes = max(prefix_bytes, SAMPLES_BYTES)
        if prefix_bytes and model.config.short_context is not None:
            LOG.info("no prefix is stored: LongRoPE's keys change with a text's length")
            prefix_extents = prefix_bytes = 0
        self.pool, extents, rows_pool = None, None, None
        if self.plan.pooled:
            has_scratch = sizes.places > 1 or sizes.joins  # where rows that have ended write; a single row needs none
            count = sum(int(self.plan.extents(prompt).sum()) for prompt in sizes.prompts) + has_scratch
            rows_pool = pool_shapes(*self.plan.pool_sizes(count))
            count += prefix_extents
            self.pool = allocation.allocate(*self.plan.pool_sizes(count), limit=host_memory_limit, mesh=self.plan.mesh)
            extents = Extents(count, nobodys=has_scratch)
        shapes = jax.eval_shape(lambda: batch.empty_batch(self.plan))
        self.constants = constants(model, self.plan, policy, shapes.cache, rows_pool)
        self._prefix_cache = None
        if prefix_bytes:
            folder = None
            if prefix_dir is not None:
                check_registered(policy)
                identity = fingerprint(model, policy, tokenizer) | {"weights": weights_sum(model)}
                folder = PrefixFolder(prefix_dir, identity, self._row_plan, most_bytes=sizes.prefix_disk)
            # Several answers to a prompt of `generate` should be those of a prompt that is prefilled in one piece.
            options = dict(cuts=sizes.prefix_memory > 0, agreed=agreed)
            self._prefix_cache = PrefixCache(self._row_plan, extents, prefix_bytes, folder, **options)
        options = dict(share=share, most_waiting=most_waiting, prepare=self._prefix_cache and self._prefix_cache.prepare)
        options |= dict(smaller=self.plan.smaller_sizes if sizes.resizes else ())
        self.scheduler = Scheduler(sizes.places, extents, **options)
        self._in_units = share < 1
        self._start: tuple[Row, RowStart] | None = None  # of the prompt that is being prefilled
        self._loop: DecodeLoop | None = None  # None while no row decodes
        self._layers, self._has_stepped, self._step_s = 0, False, 0.0
        self._hosts_experts = any(layer.offloaded is not None for layer in model.model.layers)

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return self.scheduler.busy

    def submit(self, job: Job, *, owner: Any = None) -> Ticket:
        """Puts a job into the queue; `release` takes it out again.

        Args:
            owner: who gets the responses; the core does not look at it.

        Raises:
            InputError: too many jobs wait, the pool can never hold the row, or the job asks to explain and nothing is in it or
                several processes have it.
        """
        if job.explain:
            check_one_process(self.plan.mesh, "explain")
            check_has_pages(self.plan)
        ticket = Ticket(job, self.plan.extents(len(job.tokens)) if self.plan.pooled else None, owner=owner)
        self.scheduler.submit(ticket)
        return ticket

    def step(self) -> Iterator[tuple[Ticket, Outcome]]:
        """Does one piece of work, if there is any; yields tickets with a response, or with the error that ended them."""
        work, started = Work(self._agreed(self.scheduler.next().value)), time.perf_counter()
        processes.moved()
        if work is Work.NOTHING:
            return
        yield from self._prefill() if work is Work.PREFILL else self._decode()
        seconds = time.perf_counter() - started
        self.scheduler.ran(work, seconds)
        if work is Work.DECODE:
            self._step_s = seconds

    def compile_for(self, size: int) -> None:
        """Compiles what runs between steps of `size` places, and has all later steps compute at least so many.

        That is the first compaction, and the move of rows to the next smaller size and back. No row may decode.
        """
        self.scheduler.least, state = size, batch.empty_batch(self._plan_of(size))
        if self.plan.compact_every:
            state, self.pool = DecodePrograms(self._model, self.plan).compacted(state, self.pool)
        smaller, vocabulary = [other for other in self.scheduler.sizes if other < size], self._model.config.vocab_size
        if not smaller:
            return
        options = row_options([Sampling(temperature=1.0, frequency_penalty=1.0)] * size, [()] * size, vocabulary)
        step = Step(jnp.asarray(pack_nothing(size)), jnp.zeros((size, vocabulary)))
        # Committed as a step's results are, or what takes them compiles twice.
        (sampling, penalties), step = placed(self.plan.mesh, (options, step))
        state = dataclasses.replace(state, sampling=sampling, penalties=penalties)
        for other in (smaller[-1], size):
            state, step = batch.resized(state, step, (), other)

    def close(self) -> None:
        """Ends a prefill that has not ended, with the files that it reads or writes."""
        if self._start is not None:
            self._start[1].close()

    def release(self, ticket: Ticket) -> None:
        """Takes a ticket out of the queue or the batch; a ticket that is over stays so."""
        decoded = ticket.at in self.scheduler.decoding
        if decoded:
            self._loop.drop(ticket.at)
        if ticket is self.scheduler.prefilling and self._start is not None:
            self._start[1].close()
            self._start = None
        self.scheduler.release(ticket)
        if decoded and not self.scheduler.decoding:
            self.pool, self._loop = self._loop.run.pool, None

    def _prefill(self) -> Iterator[tuple[Ticket, Outcome]]:
        ticket = self.scheduler.prefilling
        if self._start is None:
            if self._loop is None:
                heap.give_back()  # new arrays find no room in what the C library holds of a batch that ended or was cancelled
            else:  # sums of two programs that run at once could meet in another order elsewhere
                self._loop.run.step.counters.block_until_ready()
            try:
                self._start = self._started(ticket)
            except InputError as error:  # the tokenizer fails
                self.release(ticket)
                yield ticket, error
                return
        row, start = self._start
        holder, begun = self if self._loop is None else self._loop.run, time.perf_counter()
        while True:  # a step after every short piece would take more than its share of the time
            piece_begun = time.perf_counter()
            try:
                start.advance(holder)
            except InputError as error:  # the tokenizer cannot name a prompt's tokens
                self.release(ticket)
                yield ticket, error
                return
            now = time.perf_counter()
            # The next piece probably takes as long as this one; the limit may be passed by half of it.
            if self._agreed(start.done or (now - begun) + (now - piece_begun) / 2 > UNIT_S + self._step_s / 2):
                break
        if start.done:
            self._start = None
            row.fed -= start.cached
            if self._prefix_cache is not None:
                self._prefix_cache.prefixes.hits += start.cached
            row.prompt_logprobs, row.attention = start.prompt_logprobs, start.attention
            self._put(self.scheduler.prefilled(), row, *start.result())

    def _started(self, ticket: Ticket) -> tuple[Row, RowStart]:
        """Returns the record and the start of a row whose ticket has just got its place."""
        job, row_salt = ticket.request, None
        route = ticket.route or whole_route(len(job.tokens))
        if self._prefix_cache is not None and job.prompt_logprobs is None:
            self._prefix_cache.prefixes.see(chain(job.tokens, job.salt))
            if len(job.tokens) >= BLOCK or job.samples > 1:
                row_salt = job.salt
        row = job.row(self._tokenizer, self.plan.eos_token_ids)
        options = dict(sampling=job.options.sampling, draw=job.draw, in_units=self._in_units, progress=self._tell_layer)
        options |= dict(prefixes=self._prefix_cache, salt=row_salt, logprobs=job.prompt_logprobs, tokenizer=self._tokenizer)
        options |= dict(explain=job.explain)
        return row, RowStart(self._model, self._row_plan, row.prompt, route, ticket.table, **options)

    def _put(self, ticket: Ticket, row: Row, state: DecodeState, step: Step) -> None:
        """Puts a prefilled row into its place in the batch."""
        size = self.scheduler.size
        if self._loop is None:
            arrays = (state, step) if size == 1 else (batch.empty_batch(self._plan_of(size)), step.of_rows(size))
            run = Run(DecodePrograms(self._model, self.plan), *arrays, self.pool, self._see_step)
            self._loop, self.pool = DecodeLoop(run, self.constants), None
        elif self._loop.run.size < size:  # all its places are taken
            self._loop.resize(range(ticket.at), size)
        run = self._loop.run
        if self._hosts_experts:  # prefill has moved some to the device
            run.decoding.take_weights()
        if size > 1:
            run.state = batch.insert(run.state, state, ticket.at, plan=self.plan)
            run.step = run.step.with_row(ticket.at, step)
        self._loop.put(ticket.at, row)

    def _decode(self) -> Iterator[tuple[Ticket, Outcome]]:
        self._has_stepped = True
        if (places := self.scheduler.shrink()) is not None:
            self._loop.resize(places, self.scheduler.size)
        tickets = dict(self.scheduler.decoding)
        for at, outcome in self._loop.step():
            is_over = at not in self._loop.rows
            yield tickets[at], outcome
            if is_over:
                self.release(tickets[at])
        if self.scheduler.prefilling is not None and self._loop is not None:
            self._loop.run.step.counters.block_until_ready()  # beside a unit it would take longer, and so would the unit

    def _plan_of(self, rows: int) -> Plan:
        return dataclasses.replace(self.plan, spec=dataclasses.replace(self.plan.spec, batch_size=rows))

    def _see_step(self, state: DecodeState) -> None:
        """Looks at the state after a step: the rows that explain themselves, and who watches."""
        for at, row in self._loop.rows.items():
            if row.attention is not None and row.attention.steps < row.limit - 1:  # the last token is not fed
                row.attention.watch(state, at)
        if self._watch is not None:
            self._watch(state)

    def _tell_layer(self, _: int) -> None:
        processes.moved()
        if self._progress is not None and not self._has_stepped:
            self._layers += 1
            self._progress(self._layers)
