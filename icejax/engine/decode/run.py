"""A running generation: its programs, and the arrays that change from step to step. The decode loop advances it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from icejax.cache.pool.host_pool import Pool
from icejax.cache.pool.page_format import NoPages, PagesWithCodes, pool_bytes
from icejax.cache.protocol import CachePolicy, KVCache
from icejax.cache.registry import display_name
from icejax.checks.errors import InputError
from icejax.engine.batch import insert, resized, without_row
from icejax.engine.decode.constrained import constrained
from icejax.engine.decode.counters import NOT_FINITE, pack_nothing
from icejax.engine.decode.state import DecodeState, Step
from icejax.engine.decode.step import DecodePrograms
from icejax.engine.plan import Plan, reports
from icejax.engine.renewal import renewed, without_cache
from icejax.engine.response import RunReport
from icejax.engine.sampling import row_keys
from icejax.models.decoder import CausalLM
from icejax.runtime import devices
from icejax.runtime.mesh import size as mesh_size


@dataclass
class Run:
    """A running generation: its programs, and the values that change from step to step.

    Attributes:
        step: the newest step, whose tokens are not yet in the cache.
        watch: called with the state after every step.
        fed: the step whose tokens the newest step has put into the cache; None before the first step.
        renewing: whether a row's cache is being computed again, or that was interrupted.
    """

    decoding: DecodePrograms
    state: DecodeState
    step: Step
    pool: jax.Array | PagesWithCodes | NoPages | None
    watch: Callable[[DecodeState], None] | None = None
    fed: Step | None = None
    renewing: bool = False

    def advance(self) -> None:
        """Takes a decode step."""
        self.fed = self.step
        self.state, self.step, self.pool = self.decoding.step(self.state, self.pool)
        if self.watch is not None:
            self.watch(self.state)

    def force(self, tokens: dict[int, int]) -> None:
        """Replaces the newest tokens of some rows, which then have not ended; a row whose logits are not finite stays so."""
        if tokens:
            rows, newest = np.zeros(self.size, bool), np.zeros(self.size, np.int32)
            rows[list(tokens)], newest[list(tokens)] = True, list(tokens.values())
            counters, done = _forced(self.step.counters, self.state.done, rows, newest)
            self.step = replace(self.step, counters=counters)
            self.state = replace(self.state, last_tokens=jnp.copy(self.step.tokens), done=done)

    def constrain(self, masks: dict[int, np.ndarray]) -> None:
        """Chooses the newest tokens of some rows again, among those of their masks."""
        if masks:
            rows = np.zeros(self.size, bool)
            rows[list(masks)] = True
            bits = np.zeros((len(rows), len(next(iter(masks.values())))), np.uint32)
            bits[list(masks)] = list(masks.values())
            self.state, self.step = constrained(self.state, self.step, bits, rows, self.decoding.plan)

    @property
    def size(self) -> int:
        """Number of places of the batch."""
        return len(self.state.done)

    def resize(self, places: Sequence[int], size: int) -> None:
        """Moves the rows of `places` to the first places of a batch of `size` places, in that order."""
        self.state, self.step = resized(self.state, self.step, places, size)

    def end(self, rows: Sequence[bool]) -> None:
        """Marks the rows where `rows` is true as ended: no pages and experts are fetched for them any more."""
        self.state = replace(self.state, done=self.state.done | np.asarray(rows))

    def take_out(self, at: int) -> DecodeState:
        """Returns the row `at` without its cache, for `renew`; among several rows its place counts as ended until then."""
        row = without_cache(self.state, at)
        if self.size > 1:
            self.end(np.arange(self.size) == at)
        return row

    def renew(self, at: int, row: DecodeState, text: Sequence[int]) -> None:
        """Prefills the whole text of a row that was taken out, and puts the row back."""
        self.renewing, alone = True, self.size == 1
        if alone:
            self.state, self.fed, self.decoding.clock = row, self.step, 0  # frees the old cache before the new one is made
        row, step, self.pool = renewed(self.decoding.model, self.decoding.plan, row, text, self.pool)
        self.state = row if alone else insert(without_row(self.state, at), row, at, plan=self.decoding.plan)
        self.step, self.renewing = step if alone else self.step.with_row(at, step), False

    @property
    def interrupted(self) -> bool:
        """Whether a step or a text was interrupted: the old arrays were donated, and no new ones came back."""
        return any(x.is_deleted() for x in jax.tree.leaves((self.state, self.pool)))

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


@jax.jit
def _forced(counters: jax.Array, done: jax.Array, rows: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a step's counters with the `tokens` of some `rows`, and the rows that have ended."""
    rows &= counters[0] != NOT_FINITE
    return counters.at[0].set(jnp.where(rows, tokens, counters[0])), done & ~rows


def resumed_run(model: CausalLM, plan: Plan, cache: KVCache, pool: Pool | None) -> Run:
    """Returns the run of one row from a saved cache, for `extend` to add text to."""
    zeros = jnp.zeros(1, jnp.int32)
    state = DecodeState(cache, zeros, zeros > 0, row_keys([(0, 0)]), jnp.copy(zeros))
    return Run(DecodePrograms(model, plan), state, Step(jnp.asarray(pack_nothing(1)), jnp.zeros((1, 1))), pool)


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


def run_constants(run: Run, cache: CachePolicy) -> RunConstants:
    """Returns the constants of a run."""
    return constants(run.decoding.model, run.decoding.plan, cache, run.state.cache, run.pool)


def constants(model: CausalLM, plan: Plan, policy: CachePolicy, cache: KVCache, pool: Any) -> RunConstants:
    """Returns the constants of runs with this cache and pool, arrays or shapes; bytes are divided by the number of rows."""
    config, batch = model.config, plan.spec.batch_size
    digest_bytes = sum(report.digest_bytes for report in reports(plan, cache))
    device_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache.layers))
    report = RunReport(
        cache=display_name(policy),
        budget=policy.budget,
        device_kv_bytes=(device_bytes - digest_bytes) // batch,
        digest_bytes=digest_bytes // batch,
        host_kv_bytes=pool_bytes(pool) // batch,
        fetch_backend=plan.fetch_backend or None,
        device=devices.device_name(),
        dtype=model.dtype,
    )
    specs = map(plan.spec_of, range(config.num_hidden_layers))
    item = jnp.dtype(model.dtype).itemsize
    return RunConstants(
        report=report,
        token_bytes=sum(spec.num_kv_heads * sum(spec.planes) for spec in specs) * item * mesh_size(plan.mesh),
        expert_bytes=max(0 if layer.experts is None else layer.experts.bytes_from_host for layer in model.model.layers),
    )
