"""PyramidKV (arXiv 2406.02069): SnapKV with more tokens in the first layers and fewer in the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction

from icejax.cache.policies.snapkv import SnapKV
from icejax.checks.numbers import integer


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """PyramidKV: SnapKV whose budgets fall by the same step from layer to layer; their mean is the budget asked for.

    As in KVCache-Factory the last layer keeps `(budget - window) / beta` tokens beside the window, and the first
    `2 (budget - window)` less that. There a step is rounded down, so that more is kept than was asked for, and a prompt too
    short for the first layer's budget flattens the pyramid; here budgets are rounded one by one, sum up exactly, and are the
    same for every prompt. kvpress's PyramidKVPress gives the window no room of its own: there the whole budget is shared out.

    Attributes:
        budget: tokens kept per KV head after a text, the mean over layers, window included; decoded tokens come on top.
        window: last tokens of a text, which stay and whose queries decide; 8 in KVCache-Factory's runs.
        kernel: neighbours over which attention is pooled, an odd number; 7 in its runs.
        pooling: avg (SnapKV's own code) or max (its settings for LongBench, and KVCache-Factory's runs).
        group: how the query heads of a KV head agree: mean (as kvpress), max or sum.
        beta: how many times the last layer's share goes into the mean one, not counting the window; 1: all have the same.

    Raises:
        InputError: an option is out of range.
    """

    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("beta", self.beta, most=2**20)

    def for_layers(self, full: Sequence[int], *, of: int) -> list[SnapKV]:
        """Returns SnapKV with a budget of its own for every layer of full attention."""
        options = {field.name: getattr(self, field.name) for field in fields(SnapKV)}
        return [SnapKV(**options | dict(budget=self._budget(rank, len(full)))) for rank in range(len(full))]

    def _budget(self, rank: int, layers: int) -> int:
        slope = Fraction(layers - 1 - 2 * rank, max(layers - 1, 1))  # from 1 in the first layer to -1 in the last
        # Fractions, rounded half to even: two layers as far from the middle lose and win the same.
        return self.window + round((self.budget - self.window) * (1 + (1 - Fraction(1, self.beta)) * slope))
