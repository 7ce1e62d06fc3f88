"""Attention maps: which prompt positions each layer attended to exactly, summed over the decode steps of one row.

A prefill packs the prompt's positions into pages as it packs values. Each decode step then adds the attention weights
f32[K, M, p] of the fetched pages to f64[S] per layer. The core makes one for a request that asks for it, `evaluation` for
`--explain`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from icejax.cache.bases.retrieval import PagedState
from icejax.cache.pool.page_format import without_codes
from icejax.cache.protocol import Outcome
from icejax.checks.errors import InputError
from icejax.engine.decode.state import DecodeState
from icejax.engine.plan import Plan
from icejax.engine.response import Attention

BINS = 480  # columns of a picture


class AttentionMap:
    """Sums over decode steps the exact attention to each position of one prompt.

    Attributes:
        weights: layer -> f64[S], attention weights summed over decode steps and query heads, without sinks and window.
        steps: number of decode steps so far.
    """

    def __init__(self, positions: Mapping[int, np.ndarray], tokens: int, *, renewal: int) -> None:
        """Begins without a step.

        Args:
            positions: layer -> i32[K, P, p], the prompt positions of the tokens in its pages.
            tokens: number of tokens of the prompt.
            renewal: length of the text at which LongRoPE's keys are computed again; 0: never.
        """
        self._positions, self._renewal, self.steps = positions, renewal, 0
        self.weights = {layer: np.zeros(tokens) for layer in positions}

    def watch(self, state: DecodeState, row: int = 0) -> None:
        """Adds the newest step of a row of a batch, to which `state` belongs.

        Steps after LongRoPE's factors have changed are left out: the prompt's tokens are in other pages then.
        """
        if self._renewal and int(state.cache.lengths.seen[row]) >= self._renewal:
            return
        self.steps += 1
        for layer, total in self.weights.items():
            paged: PagedState = state.cache.layers[layer]
            pages, weights = np.asarray(paged.ids)[row], np.asarray(paged.weights)[row]
            positions = self._positions[layer].reshape(len(pages), -1, weights.shape[-1])  # [K, P, p], or [K, slots, 1]
            for head in range(len(pages)):
                # Other pages hold generated tokens, or are unknown (-1) since a compaction.
                in_prompt = (pages[head] >= 0) & (pages[head] < positions.shape[1]) & (weights[head] > 0).any(-1)
                page_weights = weights[head][in_prompt]
                np.add.at(total, positions[head, pages[head][in_prompt]][page_weights > 0], page_weights[page_weights > 0])

    def picture(self) -> Attention:
        """Returns the mean over the steps so far, in at most `BINS` equal stretches of the prompt."""
        tokens = len(next(iter(self.weights.values())))
        edges = np.linspace(0, tokens, min(BINS, tokens) + 1).astype(int)
        sums = np.stack([np.add.reduceat(weights, edges[:-1]) for weights in self.weights.values()])
        return Attention(tuple(self.weights), tokens, self.steps, (sums / max(1, self.steps)).astype(np.float32))


def check_has_pages(plan: Plan) -> None:
    """Raises InputError if nothing is fetched from the host, so that no attention to it can be shown."""
    if not (plan.pooled and plan.pool.planes):
        raise InputError("explain shows what is fetched from the host: it needs pages there, as of --cache clustered")


def positions_in(outcome: Outcome) -> np.ndarray:
    """Returns the positions i32[K, P, p] of the tokens in a layer's pages, whose values are the positions of their tokens."""
    return np.asarray(without_codes(outcome.pages))[:, 0, :, 1, :, 0].transpose(1, 0, 2).astype(np.int32)
