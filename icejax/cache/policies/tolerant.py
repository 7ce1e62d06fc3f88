"""The clustered cache that estimates its own error, and fetches more where that is too large."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from icejax.cache.bases.channel_scaling import scaled
from icejax.cache.bases.digest_pages import DigestPages, ScaledState
from icejax.cache.bases.reranking import attend_best
from icejax.cache.bases.retrieval import NOTHING, Near, PagedState, Pages
from icejax.cache.bases.selection import Selection
from icejax.cache.index.digest_tree import Digested
from icejax.cache.protocol import Heads, Lengths, Outcome, Report, View
from icejax.cache.sizes import CacheSpec
from icejax.checks.numbers import integer, number
from icejax.ops.attention.dense import Attended, attend_all
from icejax.ops.slots import per_head

COVERED = 1.48  # times the estimate are above the true error of 99% of the steps it was chosen on (bench/results/calibrate.md)
TOLD_BY = 4  # last tokens of a prompt, whose true errors are known
LEAST_UNEVENNESS = 1e-6  # of weights that are no less even than rounding leaves them


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EstimatedState(ScaledState):
    """What the device keeps of a layer that estimates its error.

    Attributes:
        gain: by what the unevenness of weights is multiplied to be an error: what it was at the end of the prompt.
        error: estimates of the newest step's relative error, means over KV heads.
    """

    gain: jax.Array  # f32[B]
    error: jax.Array  # f32[B]


@dataclass(frozen=True)
class Tolerant(DigestPages):
    """The clustered cache that estimates the error of every KV head, and fetches more pages where it is above a tolerance.

    The error is that of values of tokens not attended exactly. Were what keys do not tell of them independent of the scores,
    it would be a deviation times how uneven the weights are, over the norm of the output. The deviation is taken from the last
    four tokens of the prompt, whose exact attention is known: one number per layer, which stays as it is when more text comes.
    The estimate is meant to be above the true error of 95% of steps (bench/results/calibrate.md).

    Attributes:
        tolerance: relative error above which a KV head fetches more, by the estimate.
        max_budget: tokens such a head attends to exactly at most; None: four times the budget, and at least 1,024, below
            which few pages more are fetched.

    Raises:
        InputError: an option is out of range, or leaves nothing to be estimated.
    """

    tolerance: float = 0.05
    max_budget: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        number("tolerance", self.tolerance, least=0, most=1e3, above=True)
        if self.max_budget is None:
            integer("budget", self.budget, most=2**28)  # four times as much may be attended to
        else:
            integer("max_budget", self.max_budget, least=self.budget, most=2**30)

    @property
    def largest_budget(self) -> int:
        """Tokens that a KV head attends to exactly at most."""
        return max(4 * self.budget, 1024) if self.max_budget is None else self.max_budget

    def num_ranked(self, pages: int) -> int:
        return self.pages_for(self.largest_budget, pages)

    def num_fetched(self, pages: int) -> int:
        return self.num_ranked(pages)

    def find(self, heads: Heads, index: Digested, view: View) -> Selection:
        return self.walked(heads, index, view, self.num_ranked(index.levels[0].count.shape[-1]))

    def _attended(
        self, heads: Heads, near: Near, pages: Pages, found: Selection, budget: int | Int[Array, "B K"]
    ) -> tuple[Attended, Float[Array, "B K M p"], Float[Array, "B K G"]]:
        return attend_best(heads, near, pages, found, budget, most=self.most_exact(self.largest_budget), tail=True)

    def init(self, spec: CacheSpec) -> EstimatedState:
        none = jnp.zeros(spec.batch_size)
        return EstimatedState(**vars(super().init(spec)), gain=none, error=none)

    def prefill(self, state: EstimatedState, heads: Heads, attended: Attended, view: View) -> Outcome:
        outcome = super().prefill(state, heads, attended, view)
        state, lengths = outcome.state, Lengths.of(heads.lengths)
        heads = scaled(heads, state.factors)
        planes = tuple(x.transpose(1, 2, 0, 3, 4) for x in jnp.unstack(outcome.pages, axis=3))  # [B, K, P, p, W]

        def one(back: jax.Array, sums: Float[Array, "3 B"]) -> Float[Array, "3 B"]:
            seen = jnp.maximum(heads.lengths - back, 1)
            at = (seen - 1)[:, None, None, None]
            q, k, v, exact = (jnp.take_along_axis(x, at, axis=1) for x in (heads.q, heads.k, heads.v, attended.out))
            if exact.shape[-1] != v.shape[-1]:  # of a latent layer, which attended with expanded heads
                exact = _exact(heads, q, seen)
            token = Heads(q, k, v, jnp.ones_like(heads.lengths), heads.scoring)
            near = self._near_at(state, token, lengths, seen)
            found = self.walked(token, state.index, view, self._first(state))
            pages = (jnp.take_along_axis(x, found.ids[..., None, None], axis=2) for x in planes)
            pages = self._of_planes(token, tuple(pages), found.counts)
            ours, _, uneven = self._attended(token, near, pages, found, self.budget)
            exact = exact.reshape(ours.out.shape).astype(jnp.float32)
            off = jnp.linalg.norm(ours.out - exact, axis=-1) / jnp.maximum(jnp.linalg.norm(exact, axis=-1), 1e-30)
            norms = jnp.linalg.norm(v.astype(jnp.float32), axis=-1).mean((1, 2))
            return sums + jnp.stack([off.mean((1, 2)), _unevenness(ours, uneven, found).mean((1, 2)), norms])

        count = min(TOLD_BY, self.window_of.fill)  # all of them stand in the window
        true, told, norms = jax.lax.fori_loop(0, count, one, jnp.zeros((3, len(heads.lengths))))
        # Where nothing was left to estimates: as if values had nothing to do with keys, and no mean.
        gain = jnp.where(
            told > LEAST_UNEVENNESS / jnp.maximum(norms, LEAST_UNEVENNESS), true / jnp.maximum(told, 1e-30), norms / count
        )
        return replace(outcome, state=replace(state, gain=gain))

    def _first(self, state: PagedState) -> int:
        """Returns how many pages are fetched before the error is estimated."""
        return self.pages_for(self.budget, self.index.counts(state.index).shape[-1])

    def _near_at(self, state: PagedState, heads: Heads, lengths: Lengths, seen: jax.Array) -> Near:
        """Returns sinks and window as they were when so many tokens had been seen."""
        window = state.window
        masks = (per_head(x, heads.k.shape[2]) for x in self.window_of.masks(window, lengths, seen=seen))
        parts = zip(window.sinks, window.newest, strict=True)
        planes = tuple(jnp.concatenate(pair, axis=2) for pair in parts)
        return *heads.of_planes(planes), jnp.concatenate(tuple(masks), axis=2)

    def fetch_and_attend(
        self, state: EstimatedState, heads: Heads, near: Near, found: Selection, view: View
    ) -> tuple[Attended, Selection, EstimatedState]:
        first = self._first(state)
        with jax.named_scope("select"):
            few = self.walked(heads, state.index, view, first)
        with jax.named_scope("fetch"):
            pages, fetched = view.pool.fetch_live(few.ids, few.counts > 0)
        with jax.named_scope("attend"):
            attended, weights, uneven = self._attended(heads, near, self._of_planes(heads, pages, few.counts), few, self.budget)
            error = self._error(state, attended, uneven, few)
        more = error > self.tolerance
        counts = jnp.where(more[..., None], found.counts[..., first:], 0)
        with jax.named_scope("fetch"):
            if counts.shape[-1]:
                none = tuple(jnp.zeros((*counts.shape, *x.shape[3:]), x.dtype) for x in pages)
                rest, came = view.pool.fetch_missing(found.ids[..., first:], counts > 0, none, jnp.full_like(counts, NOTHING))
                pages = tuple(jnp.concatenate(pair, axis=2) for pair in zip(pages, rest, strict=True))
                fetched += came
        with jax.named_scope("attend"):
            counts = jnp.concatenate([few.counts, counts], axis=2)
            ids = jnp.concatenate([few.ids, found.ids[..., first:]], axis=2)
            rest, uneven = jax.tree.map(
                lambda x, y: jnp.where(more.reshape(*more.shape, *(1,) * (x.ndim - 2)), x, y),
                (tuple(found.tail), found.uneven),
                (tuple(few.tail), few.uneven),
            )
            whole = replace(found, ids=ids, counts=counts, tail=Attended(*rest), uneven=uneven)
            budget = jnp.where(more, self.largest_budget, self.budget)
            attended, weights, uneven = self._attended(heads, near, self._of_planes(heads, pages, counts), whole, budget)
            error = self._error(state, attended, uneven, whole).mean(1)
        return attended, whole, replace(state, weights=weights, fetched=fetched, error=error)

    def _error(self, state: EstimatedState, attended: Attended, uneven: Float[Array, "B K G"], found: Selection) -> jax.Array:
        """Returns the estimated relative errors f32[B, K] of the KV heads."""
        return COVERED * state.gain[:, None] * _unevenness(attended, uneven, found).mean(2)

    def report(self, state: EstimatedState, lengths: Lengths) -> Report:
        report = super().report(state, lengths)
        masks = self.window_of.masks(state.window, lengths, seen=lengths.seen)
        tokens = sum(mask.sum(1, dtype=jnp.float32) for mask in masks)
        tokens += (state.weights > 0).sum((2, 3), dtype=jnp.float32).mean(1)
        return replace(report, estimates=jnp.stack([state.error, tokens]))


def _exact(heads: Heads, q: Float[Array, "B 1 N H"], seen: Int[Array, " B"]) -> Float[Array, "B 1 N Hv"]:
    """Returns what a query attends to of the first tokens of a text, so many of each row."""
    keys, values = heads.k.swapaxes(1, 2), heads.v.swapaxes(1, 2)
    mask = jnp.broadcast_to(jnp.arange(keys.shape[2])[None, None] < seen[:, None, None], keys.shape[:3])
    return attend_all(q, keys, values, mask, scoring=heads.scoring)[0]


def _unevenness(attended: Attended, uneven: Float[Array, "B K G"], found: Selection) -> Float[Array, "B K G"]:
    """Returns how far weights of tokens not attended exactly are from those they count with, over the output's norm."""
    rest = jnp.exp(2 * (found.tail.lse - attended.lse)) * found.uneven
    return jnp.sqrt(uneven + rest) / jnp.maximum(jnp.linalg.norm(attended.out, axis=-1), 1e-30)
