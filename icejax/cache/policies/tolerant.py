"""The clustered cache that estimates its own error, and fetches more pages where the error is too large (`--cache tolerant`).

A step attends in two rounds: to the pages of the budget, then to more in the KV heads whose estimate exceeds the tolerance.
Errors are f32[B, K] per step.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.bases.channel_scaling import scaled
from icejax.cache.bases.looked_pages import LookedPages
from icejax.cache.bases.reranking import at
from icejax.cache.bases.retrieval import NOTHING, Near
from icejax.cache.bases.rounds import CodedRounds, Round, Slots, WholeRounds
from icejax.cache.bases.selection import Selection
from icejax.cache.bases.similar_pages import ScaledState
from icejax.cache.index.digest_tree import Digested
from icejax.cache.pool.host_pool import Fetched, PoolLayer
from icejax.cache.pool.page_format import without_codes
from icejax.cache.protocol import Heads, Lengths, Outcome, Report, View
from icejax.cache.sizes import CacheSpec
from icejax.checks.numbers import integer, number
from icejax.ops.attention.dense import Attended, attend_all
from icejax.ops.slots import per_head

COVERED = 1.48  # so estimates exceed the true error in 99% of the steps it was chosen on (bench/results/calibrate.md)
TOLD_BY = 4  # last tokens of a prompt, whose true errors set the gain
LEAST_UNEVENNESS = 1e-6  # below it unevenness is rounding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EstimatedState(ScaledState):
    """The device state of a layer that estimates its error.

    Attributes:
        gain: ratio of true error, without that of codes, to unevenness of weights at the end of the prompt; turns an unevenness
            into an error.
        error: estimated relative error of the newest step, mean over KV heads.
    """

    gain: jax.Array  # f32[B]
    error: jax.Array  # f32[B]


@dataclass(frozen=True)
class Tolerant(LookedPages):
    """The clustered cache that estimates the error of every KV head, and fetches more pages where it is above a tolerance.

    The error comes from the values of tokens not attended exactly. If the part of these values that keys do not predict were
    independent of the scores, the error would be the deviation of that part times the unevenness of the weights, over the norm
    of the output. The deviation is measured on the last four tokens of the prompt, whose exact attention is known: one number
    per row and layer, which does not change with later text. The estimate is meant to exceed the true error in 95% of steps
    (bench/results/calibrate.md).

    With `look` each round weighs all tokens of its pages by their codes and fetches the best, as `Clustered` does. The error of
    the codes follows from their steps (`icejax.ops.pages.code_error`). Its square is added to that of the error above, whose
    deviation is measured without it.

    Attributes:
        tolerance: estimated relative error above which a KV head fetches more pages.
        max_budget: most tokens that such a head attends to exactly; None: four times the budget, and at least 1,024, because
            with fewer hardly any more pages are fetched.

    Raises:
        InputError: an option is out of range, or leaves nothing to be estimated.
    """

    tolerance: float = 0.05
    max_budget: int | None = None

    packs_by_head = False  # the error is measured over all KV heads

    def __post_init__(self) -> None:
        super().__post_init__()
        number("tolerance", self.tolerance, least=0, most=1e3, above=True)
        if self.max_budget is None:
            integer("budget", self.budget, most=2**28)  # a head may attend to four times as many tokens
        else:
            integer("max_budget", self.max_budget, least=self.budget, most=2**30)

    @property
    def largest_budget(self) -> int:
        """Largest number of tokens that a KV head attends to exactly."""
        return max(4 * self.budget, 1024) if self.max_budget is None else self.max_budget

    @property
    def rounds(self) -> WholeRounds:
        """The pages that a round reads, and its attention."""
        return (CodedRounds if self.look else WholeRounds)(self, self.largest_budget)

    def num_ranked(self, pages: int) -> int:
        return self.pages_for(self.largest_budget, pages)

    def num_fetched(self, pages: int) -> int:
        return self.rounds.num_fetched(pages)

    def find(self, heads: Heads, index: Digested, view: View) -> Selection:
        return self.walk_pages(heads, index, view, self.rounds.num_most(index.levels[0].count.shape[-1], view.pool.pool))

    def init(self, spec: CacheSpec) -> EstimatedState:
        zeros = jnp.zeros(spec.batch_size)
        return EstimatedState(**vars(super().init(spec)), gain=zeros, error=zeros)

    def prefill(self, state: EstimatedState, heads: Heads, attended: Attended, view: View) -> Outcome:
        outcome = super().prefill(state, heads, attended, view)
        state, lengths, rounds = outcome.state, Lengths.of(heads.lengths), self.rounds
        heads = scaled(heads, state.factors)
        planes, read = (
            tuple(x.transpose(1, 2, 0, 3, 4) for x in jnp.unstack(pages, axis=3))  # [B, K, P, p, W]
            for pages in (without_codes(outcome.pages), rounds.read_of(outcome.pages))
        )
        slots = Slots(len(planes), lambda ids, there: (_slots_of(planes, ids), jnp.zeros(len(ids), jnp.int32)))
        num_pages = self.index.counts(state.index).shape[-1]
        first, most = (count(num_pages, outcome.pages) for count in (rounds.num_first, rounds.num_most))

        def add_token(back: jax.Array, sums: Float[Array, "4 B"]) -> Float[Array, "4 B"]:
            seen = jnp.maximum(heads.lengths - back, 1)
            last = (seen - 1)[:, None, None, None]
            q, k, v, exact = (jnp.take_along_axis(x, last, axis=1) for x in (heads.q, heads.k, heads.v, attended.out))
            if exact.shape[-1] != v.shape[-1]:  # a latent layer attended with expanded heads
                exact = _exact_attention(heads, q, seen)
            token = Heads(q, k, v, jnp.ones_like(heads.lengths), heads.scoring)
            near = self._near_when(state, token, lengths, seen)
            selection = self.walk_pages(token, state.index, view, first, among=most)
            done = rounds.attend(token, near, at(read, selection.ids), selection, self.budget, slots)
            out, exact = done.attended.out, exact.reshape(done.attended.out.shape).astype(jnp.float32)
            error = jnp.linalg.norm(out - exact, axis=-1) / jnp.maximum(jnp.linalg.norm(exact, axis=-1), 1e-30)
            norms = jnp.linalg.norm(v.astype(jnp.float32), axis=-1).mean((1, 2))
            return sums + jnp.stack([*(x.mean((1, 2)) for x in (error, done.uneven, done.of_codes)), norms])

        count = min(TOLD_BY, self.window_layout.fill)  # all of these tokens are in the window
        true, estimate, of_codes, norms = jax.lax.fori_loop(0, count, add_token, jnp.zeros((4, len(heads.lengths))))
        # Without unevenness the gain is the values' norm, as if keys did not predict them and their mean were 0.
        gain = jnp.where(
            estimate > LEAST_UNEVENNESS / jnp.maximum(norms, LEAST_UNEVENNESS),
            jnp.sqrt(jnp.maximum(jnp.square(true) - jnp.square(of_codes), 0)) / jnp.maximum(estimate, 1e-30),
            norms / count,
        )
        return replace(outcome, state=replace(state, gain=gain))

    def _near_when(self, state: EstimatedState, heads: Heads, lengths: Lengths, seen: jax.Array) -> Near:
        """Returns keys, values and mask of sinks and window as they were after `seen` tokens."""
        window = state.window
        masks = (per_head(x, heads.k.shape[2]) for x in self.window_layout.masks(window, lengths, seen=seen))
        parts = zip(window.sinks, window.newest, strict=True)
        planes = tuple(jnp.concatenate(pair, axis=2) for pair in parts)
        return *heads.from_planes(planes), jnp.concatenate(tuple(masks), axis=2)

    def fetch_and_attend(
        self, state: EstimatedState, heads: Heads, near: Near, found: Selection, view: View
    ) -> tuple[Attended, Selection, EstimatedState]:
        rounds, pool = self.rounds, view.pool
        first = rounds.num_first(self.index.counts(state.index).shape[-1], pool.pool)
        read, single = rounds.read(pool), replace(pool, single_slots=True)
        with jax.named_scope("select"):
            initial = self.walk_pages(heads, state.index, view, first, among=found.ids.shape[-1])
        with jax.named_scope("fetch"):
            pages, fetched = read.fetch_live(initial.ids, initial.counts > 0)
        with jax.named_scope("attend"):
            slots = Slots(pool.pages.shape[-3], single.fetch_live)
            done = rounds.attend(heads, near, pages, initial, self.budget, slots)
            exceeds = self._error(state, done) > self.tolerance
        further, counts = found.ids[..., first:], jnp.where(exceeds[..., None], found.counts[..., first:], 0)
        with jax.named_scope("fetch"):
            if counts.shape[-1]:
                more, num_fetched = _fetch_few(read, further, counts > 0)
                pages = tuple(jnp.concatenate(pair, axis=2) for pair in zip(pages, more, strict=True))
                fetched += num_fetched
        with jax.named_scope("attend"):
            ids = jnp.concatenate([initial.ids, further], axis=2)
            counts = jnp.concatenate([jnp.where(exceeds[..., None], initial.counts, 0), counts], axis=2)
            slots = slots._replace(read=functools.partial(_fetch_few, single))
            selection = replace(found, ids=ids, counts=counts)
            done = rounds.attend(heads, near, pages, selection, self.largest_budget, slots).where(exceeds, done)
            error = self._error(state, done).mean(1)
        fetched = rounds.in_pool(fetched, done.slots, pool.pool)
        selection = replace(found, ids=done.ids, counts=done.counts)
        return done.attended, selection, replace(state, weights=done.weights, fetched=fetched, error=error)

    def _error(self, state: EstimatedState, done: Round) -> Float[Array, "B K"]:
        """Returns the estimated relative error of each KV head."""
        return COVERED * done.error(state.gain)

    def report(self, state: EstimatedState, lengths: Lengths) -> Report:
        report = super().report(state, lengths)
        return replace(report, estimates=jnp.stack([state.error, self.exact_tokens(state, lengths)]))


def _exact_attention(heads: Heads, q: Float[Array, "B 1 N H"], seen: Int[Array, " B"]) -> Float[Array, "B 1 N Hv"]:
    """Returns the exact attention of a query to the first `seen` tokens of a text."""
    keys, values = heads.k.swapaxes(1, 2), heads.v.swapaxes(1, 2)
    mask = jnp.broadcast_to(jnp.arange(keys.shape[2])[None, None] < seen[:, None, None], keys.shape[:3])
    return attend_all(q, keys, values, mask, scoring=heads.scoring)[0]


def _slots_of(planes: tuple[jax.Array, ...], ids: Int[Array, "B K m"]) -> tuple[jax.Array, ...]:
    """Returns single slots [B, K, m, 1, W] of planes of pages."""
    return at(tuple(x.reshape(*x.shape[:2], -1, 1, x.shape[-1]) for x in planes), ids)


def _fetch_few(pool: PoolLayer, ids: Int[Array, "B K M"], there: Bool[Array, "B K M"]) -> tuple[Fetched, Int[Array, " B"]]:
    """Returns `pool.fetch_live`, reading nothing else by any backend."""
    held = tuple(jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(pool.fetch, ids))
    return pool.fetch_missing(ids, there, held, jnp.full_like(ids, NOTHING))
