"""The bars of `bench.engine`: a ratio of two times or rates of the same run, and the bound that it should keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Bar:
    """A bound of a ratio: the least that is wanted, or the most that is allowed."""

    bound: float
    is_least: bool = False

    def holds(self, ratio: float) -> bool:
        """Returns whether a ratio keeps the bound."""
        return ratio >= self.bound if self.is_least else ratio <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.is_least else '<='} {self.bound:g}"


BARS = {
    ("batch", "throughput"): Bar(3, is_least=True),
    ("prefill", "itl"): Bar(1.5),
    ("prefill", "ttft"): Bar(1.6),
    ("lines", "throughput"): Bar(1.5, is_least=True),
    ("prefix", "ttft"): Bar(1 / 20),
    ("prefix", "disk_ttft"): Bar(1 / 5),
}


def judged(part: str, measure: str, ratios: Sequence[float], **figures: float | int) -> dict:
    """Returns the row of a measure.

    Args:
        ratios: the ratio of each repeat; the row has their median, and whether it keeps the bar.
        figures: the sizes, and the seconds and rates of which the ratio is.
    """
    ratio, bar = float(np.median(ratios)), BARS[part, measure]
    spread = dict(ratio=ratio, ratio_low=min(ratios), ratio_high=max(ratios))
    numbers = {name: round(value, 4) if isinstance(value, float) else value for name, value in (figures | spread).items()}
    return dict(part=part, measure=measure) | numbers | dict(bar=str(bar), holds=bar.holds(ratio))
