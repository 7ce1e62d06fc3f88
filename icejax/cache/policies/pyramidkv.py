"""PyramidKV (arXiv 2406.02069): SnapKV with larger budgets in the first layers than in the last (`--cache pyramidkv`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction

from icejax.cache.policies.snapkv import SnapKV
from icejax.checks.numbers import integer


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """PyramidKV: SnapKV whose budgets fall by the same step from layer to layer; their mean is `budget`.

    As in KVCache-Factory, the last layer keeps `(budget - window) / beta` tokens besides the window, and the first layer
    `2 (budget - window)` less that number. A budget of 68, a window of 8 and beta 20 in 4 layers:

        beside the window    117  79  41   3     mean 60
        with the window      125  87  49  11     mean 68

    KVCache-Factory rounds the step down, so that it keeps more than asked for, and flattens the pyramid for a prompt shorter
    than the first layer's budget. Here each budget is rounded, so that they sum up exactly, for every prompt alike. kvpress's
    PyramidKVPress has no room for the window besides the pyramid: it divides the whole budget.

    Attributes:
        budget: tokens kept per KV head after a text, the mean over layers, window included; decoded tokens come on top.
        window: last tokens of a text, which stay and whose queries score the others; 8 in KVCache-Factory's runs.
        kernel: neighbouring tokens over which attention is pooled, an odd number; 7 in KVCache-Factory's runs.
        pooling: avg (SnapKV's code) or max (SnapKV's settings for LongBench, and KVCache-Factory's runs).
        group: how the weights of a KV head's query heads are combined: mean (as kvpress), max or sum.
        beta: ratio of the mean budget to the last layer's, both without the window; 1: all layers have the same budget.

    Raises:
        InputError: an option is out of range.
    """

    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("beta", self.beta, most=2**20)

    def for_layers(self, full: Sequence[int], *, of: int) -> list[SnapKV]:
        """Returns a SnapKV with its own budget for every layer of full attention."""
        options = {field.name: getattr(self, field.name) for field in fields(SnapKV)}
        return [SnapKV(**options | dict(budget=self._budget(rank, len(full)))) for rank in range(len(full))]

    def _budget(self, rank: int, layers: int) -> int:
        slope = Fraction(layers - 1 - 2 * rank, max(layers - 1, 1))  # from 1 in the first layer to -1 in the last
        # Fractions rounded half to even: of two layers equally far from the middle one loses what the other gains.
        return self.window + round((self.budget - self.window) * (1 + (1 - Fraction(1, self.beta)) * slope))
