"""The clustered cache that estimates its own error, and fetches more pages where the error is too large (`--cache tolerant`).

A step attends twice: to the pages of the budget, then to more pages in the KV heads whose estimate exceeds the tolerance.
Errors are f32[B, K] per step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from icejax.cache.bases.channel_scaling import scaled
from icejax.cache.bases.digest_pages import DigestPages
from icejax.cache.bases.reranking import attend_best
from icejax.cache.bases.retrieval import NOTHING, Near, PagedState, Pages
from icejax.cache.bases.selection import Selection
from icejax.cache.bases.similar_pages import ScaledState
from icejax.cache.index.digest_tree import Digested
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
        gain: ratio of true error to unevenness of weights at the end of the prompt; turns an unevenness into an error.
        error: estimated relative error of the newest step, mean over KV heads.
    """

    gain: jax.Array  # f32[B]
    error: jax.Array  # f32[B]


@dataclass(frozen=True)
class Tolerant(DigestPages):
    """The clustered cache that estimates the error of every KV head, and fetches more pages where it is above a tolerance.

    The error comes from the values of tokens not attended exactly. If the part of these values that keys do not predict were
    independent of the scores, the error would be the deviation of that part times the unevenness of the weights, over the norm
    of the output. The deviation is measured on the last four tokens of the prompt, whose exact attention is known: one number
    per row and layer, which does not change with later text. The estimate is meant to exceed the true error in 95% of steps
    (bench/results/calibrate.md).

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

    def num_ranked(self, pages: int) -> int:
        return self.pages_for(self.largest_budget, pages)

    def num_fetched(self, pages: int) -> int:
        return self.num_ranked(pages)

    def find(self, heads: Heads, index: Digested, view: View) -> Selection:
        return self.walk_pages(heads, index, view, self.num_ranked(index.levels[0].count.shape[-1]))

    def _attended(
        self, heads: Heads, near: Near, pages: Pages, selection: Selection, budget: int | Int[Array, "B K"]
    ) -> tuple[Attended, Float[Array, "B K M p"], Float[Array, "B K G"]]:
        return attend_best(heads, near, pages, selection, budget, most=self.max_page_tokens(self.largest_budget), tail=True)

    def init(self, spec: CacheSpec) -> EstimatedState:
        zeros = jnp.zeros(spec.batch_size)
        return EstimatedState(**vars(super().init(spec)), gain=zeros, error=zeros)

    def prefill(self, state: EstimatedState, heads: Heads, attended: Attended, view: View) -> Outcome:
        outcome = super().prefill(state, heads, attended, view)
        state, lengths = outcome.state, Lengths.of(heads.lengths)
        heads = scaled(heads, state.factors)
        planes = tuple(x.transpose(1, 2, 0, 3, 4) for x in jnp.unstack(outcome.pages, axis=3))  # [B, K, P, p, W]

        def add_token(back: jax.Array, sums: Float[Array, "3 B"]) -> Float[Array, "3 B"]:
            seen = jnp.maximum(heads.lengths - back, 1)
            last = (seen - 1)[:, None, None, None]
            q, k, v, exact = (jnp.take_along_axis(x, last, axis=1) for x in (heads.q, heads.k, heads.v, attended.out))
            if exact.shape[-1] != v.shape[-1]:  # a latent layer attended with expanded heads
                exact = _exact_attention(heads, q, seen)
            token = Heads(q, k, v, jnp.ones_like(heads.lengths), heads.scoring)
            near = self._near_when(state, token, lengths, seen)
            selection = self.walk_pages(token, state.index, view, self._num_first(state))
            pages = (jnp.take_along_axis(x, selection.ids[..., None, None], axis=2) for x in planes)
            pages = self._of_planes(token, tuple(pages), selection.counts)
            approximate, _, uneven = self._attended(token, near, pages, selection, self.budget)
            exact = exact.reshape(approximate.out.shape).astype(jnp.float32)
            error = jnp.linalg.norm(approximate.out - exact, axis=-1) / jnp.maximum(jnp.linalg.norm(exact, axis=-1), 1e-30)
            norms = jnp.linalg.norm(v.astype(jnp.float32), axis=-1).mean((1, 2))
            return sums + jnp.stack([error.mean((1, 2)), _unevenness(approximate, uneven, selection).mean((1, 2)), norms])

        count = min(TOLD_BY, self.window_layout.fill)  # all of these tokens stand in the window
        true, estimate, norms = jax.lax.fori_loop(0, count, add_token, jnp.zeros((3, len(heads.lengths))))
        # Without unevenness the gain is the values' norm, as if keys did not predict them and their mean were 0.
        gain = jnp.where(
            estimate > LEAST_UNEVENNESS / jnp.maximum(norms, LEAST_UNEVENNESS),
            true / jnp.maximum(estimate, 1e-30),
            norms / count,
        )
        return replace(outcome, state=replace(state, gain=gain))

    def _num_first(self, state: PagedState) -> int:
        """Returns how many pages are fetched before the error is estimated."""
        return self.pages_for(self.budget, self.index.counts(state.index).shape[-1])

    def _near_when(self, state: PagedState, heads: Heads, lengths: Lengths, seen: jax.Array) -> Near:
        """Returns keys, values and mask of sinks and window as they were after `seen` tokens."""
        window = state.window
        masks = (per_head(x, heads.k.shape[2]) for x in self.window_layout.masks(window, lengths, seen=seen))
        parts = zip(window.sinks, window.newest, strict=True)
        planes = tuple(jnp.concatenate(pair, axis=2) for pair in parts)
        return *heads.from_planes(planes), jnp.concatenate(tuple(masks), axis=2)

    def fetch_and_attend(
        self, state: EstimatedState, heads: Heads, near: Near, found: Selection, view: View
    ) -> tuple[Attended, Selection, EstimatedState]:
        first = self._num_first(state)
        with jax.named_scope("select"):
            initial = self.walk_pages(heads, state.index, view, first)
        with jax.named_scope("fetch"):
            pages, fetched = view.pool.fetch_live(initial.ids, initial.counts > 0)
        with jax.named_scope("attend"):
            attended, weights, uneven = self._attended(
                heads, near, self._of_planes(heads, pages, initial.counts), initial, self.budget
            )
            error = self._error(state, attended, uneven, initial)
        exceeds = error > self.tolerance
        counts = jnp.where(exceeds[..., None], found.counts[..., first:], 0)
        with jax.named_scope("fetch"):
            if counts.shape[-1]:
                held = tuple(jnp.zeros((*counts.shape, *x.shape[3:]), x.dtype) for x in pages)
                further, num_fetched = view.pool.fetch_missing(
                    found.ids[..., first:], counts > 0, held, jnp.full_like(counts, NOTHING)
                )
                pages = tuple(jnp.concatenate(pair, axis=2) for pair in zip(pages, further, strict=True))
                fetched += num_fetched
        with jax.named_scope("attend"):
            counts = jnp.concatenate([initial.counts, counts], axis=2)
            ids = jnp.concatenate([initial.ids, found.ids[..., first:]], axis=2)
            tail, uneven = jax.tree.map(
                lambda x, y: jnp.where(exceeds.reshape(*exceeds.shape, *(1,) * (x.ndim - 2)), x, y),
                (tuple(found.tail), found.uneven),
                (tuple(initial.tail), initial.uneven),
            )
            selection = replace(found, ids=ids, counts=counts, tail=Attended(*tail), uneven=uneven)
            budget = jnp.where(exceeds, self.largest_budget, self.budget)
            attended, weights, uneven = self._attended(heads, near, self._of_planes(heads, pages, counts), selection, budget)
            error = self._error(state, attended, uneven, selection).mean(1)
        return attended, selection, replace(state, weights=weights, fetched=fetched, error=error)

    def _error(
        self, state: EstimatedState, attended: Attended, uneven: Float[Array, "B K G"], selection: Selection
    ) -> jax.Array:
        """Returns the estimated relative error of each KV head, f32[B, K]."""
        return COVERED * state.gain[:, None] * _unevenness(attended, uneven, selection).mean(2)

    def report(self, state: EstimatedState, lengths: Lengths) -> Report:
        report = super().report(state, lengths)
        return replace(report, estimates=jnp.stack([state.error, self.exact_tokens(state, lengths)]))


def _exact_attention(heads: Heads, q: Float[Array, "B 1 N H"], seen: Int[Array, " B"]) -> Float[Array, "B 1 N Hv"]:
    """Returns the exact attention of a query to the first `seen` tokens of a text."""
    keys, values = heads.k.swapaxes(1, 2), heads.v.swapaxes(1, 2)
    mask = jnp.broadcast_to(jnp.arange(keys.shape[2])[None, None] < seen[:, None, None], keys.shape[:3])
    return attend_all(q, keys, values, mask, scoring=heads.scoring)[0]


def _unevenness(attended: Attended, uneven: Float[Array, "B K G"], selection: Selection) -> Float[Array, "B K G"]:
    """Returns the norm of the weights' deviations, for tokens not attended exactly, over the norm of the output."""
    tail = jnp.exp(2 * (selection.tail.lse - attended.lse)) * selection.uneven
    return jnp.sqrt(uneven + tail) / jnp.maximum(jnp.linalg.norm(attended.out, axis=-1), 1e-30)
