"""OmniKV (ICLR 2025): a few filter layers attend to all tokens, and the layers after them to the tokens that they rank highest.

`--cache omnikv`. A filter shares the chosen positions i32[B, M] with its followers (`policies/follower.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from icejax.cache.bases.all_tokens import TokenState
from icejax.cache.bases.retrieval import PAGE
from icejax.cache.policies.follower import PositionFollower
from icejax.cache.policies.full import Full
from icejax.cache.protocol import CachePolicy, Heads, Lengths, Outcome, Report, Shared, View
from icejax.cache.sizes import CacheSpec
from icejax.checks.numbers import integer
from icejax.ops.attention.dense import Attended, masked_scores
from icejax.ops.slots import merge_heads
from icejax.ops.topk import best

NOWHERE = -1  # stands for a position where no token is chosen


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FilterState:
    """Keys and values of every token, and how many tokens of each row came as text; later tokens were decoded."""

    tokens: TokenState
    text: jax.Array  # i32[B]


@dataclass(frozen=True)
class OmniKV(Full):
    """OmniKV: a filter layer attends to all tokens, and the layers after it to the tokens with its highest scores.

    A filter ranks tokens by their largest score over its query heads. All heads of all layers up to the next filter attend to
    the same tokens, and to the newest decoded ones. The authors' code lists the filters of each model (2, 8 and 18 of the 32
    layers of Llama 3 8B); here they are evenly spaced, from `first` on. By default, of 16 layers 2 and 10 are filters, 0, 1, 3
    and 11 keep the full cache, and the others follow. Their code attends to all decoded tokens, and their example leaves all
    tokens on the device; here the followers' tokens are in host memory.

    Attributes:
        budget: tokens of the text that the layers after a filter attend to; decoded tokens come on top.
        generated: newest decoded tokens, all of which are attended to; older ones are ranked with the text.
        first: layers before the first filter, which keep the full cache; None: 2 for models of 16 layers and more, else 0.
        every: layers from one filter to the next.
        wait: layers right after a filter that also keep the full cache; meanwhile the authors' code fetches tokens.

    Raises:
        InputError: an option is out of range.
    """

    budget: int = 256
    generated: int = 512
    by_head = False  # all heads attend to the same tokens
    first: int | None = None
    every: int = 8
    wait: int = 1

    def __post_init__(self) -> None:
        integer("budget", self.budget)
        integer("generated", self.generated, least=PAGE, most=2**20)
        if self.first is not None:
            integer("first", self.first, least=0, most=1024)
        integer("wait", self.wait, least=0, most=1024)
        integer("every", self.every, least=self.wait + 2, most=2048)

    def for_layers(self, full: Sequence[int], *, of: int) -> list[CachePolicy]:
        first = (2 if of >= 16 else 0) if self.first is None else self.first
        follower, policies = PositionFollower(self.budget, self.generated), []
        for rank in range(len(full)):
            behind = (rank - first) % self.every
            dense = rank < first or 0 < behind <= self.wait
            policies.append(Full() if dense else follower if behind else self)
        return policies

    def init(self, spec: CacheSpec) -> FilterState:
        return FilterState(super().init(spec), jnp.zeros(spec.batch_size, jnp.int32))

    def prefill(self, state: FilterState, heads: Heads, attended: Attended, view: View) -> Outcome:
        outcome = super().prefill(state.tokens, heads, attended, view)
        return replace(outcome, state=FilterState(outcome.state, heads.lengths))

    def extend(self, state: FilterState, heads: Heads, view: View) -> Outcome:
        outcome = super().extend(state.tokens, heads, view)
        return replace(outcome, state=FilterState(outcome.state, view.lengths.seen + heads.lengths))

    def trimmed(self, state: FilterState, tokens: Int[Array, " B"], page: Int[Array, ""]) -> FilterState:
        return replace(state, tokens=super().trimmed(state.tokens, tokens, page), text=tokens)

    def decode(self, state: FilterState, heads: Heads, view: View) -> Outcome:
        outcome = super().decode(state.tokens, heads, view)
        with jax.named_scope("select"):
            choice = self._chosen_positions(
                outcome.state.k, heads, first=self._num_ranked(state, view.lengths), seen=view.lengths.seen
            )
        return replace(outcome, state=replace(state, tokens=outcome.state), shared=Shared(choice=choice))

    def _num_ranked(self, state: FilterState, lengths: Lengths) -> Int[Array, " B"]:
        """Returns how many tokens are ranked: all but the newest decoded ones, which followers always attend to."""
        return jnp.maximum(state.text, lengths.seen + 1 - self.generated)

    def _chosen_positions(
        self, k: Float[Array, "R S H"], heads: Heads, *, first: Int[Array, " B"], seen: Int[Array, " B"]
    ) -> Int[Array, "B M"]:
        """Returns the positions of the best tokens before `first` and of all tokens from `first` on; NOWHERE for padding."""
        positions = jnp.arange(k.shape[1], dtype=jnp.int32)[None]
        mask = jnp.repeat(positions < first[:, None], heads.k.shape[2], axis=0)
        scores = masked_scores(merge_heads(heads.by_group()), k, mask[:, None], scoring=heads.scoring)
        worth = scores.reshape(len(first), -1, k.shape[1]).max(1)
        ranked, *_ = best(worth, min(self.budget, k.shape[1]))
        newest = first[:, None] + jnp.arange(self.generated, dtype=jnp.int32)[None]
        ranked, newest = (
            jnp.where(ranked < first[:, None], ranked, NOWHERE),
            jnp.where(newest <= seen[:, None], newest, NOWHERE),
        )
        return jnp.concatenate([ranked, newest], axis=1)

    def report(self, state: FilterState, lengths: Lengths) -> Report:
        return super().report(state.tokens, lengths)
