"""Options that follow from the budget: of adaptive methods so that what a query head attends to is the budget in the mean.

What top-p, MagicPIG and vAttention attend to differs from head to head and from step to step. One option of each is searched
for on a text of a task that stands in no table by default, with the question in the prefill and through the cache. What a
method's own code takes from the length of a text, which a policy is not told, is given by its rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

TASK = "multikey-8"
CLOSE = 0.02  # of the budget
ROUNDS = 10


@dataclass(frozen=True)
class Knob:
    """What is searched for.

    Attributes:
        option: its name.
        low, high: where the search ends; the higher, the more is attended to.
        start, stride: where it begins, and how far it goes from there at first.
        value: the option's value at a place between them.
        more: the other options that differ from a policy's own defaults, given the budget.
    """

    option: str
    low: float
    high: float
    start: float
    stride: float
    value: Callable[[float], float]
    more: Callable[[int], dict[str, int]] = lambda tokens: {}

    def options(self, at: float, tokens: int) -> dict[str, float]:
        """Returns the options of a policy at a place."""
        return self.more(tokens) | {self.option: self.value(at)}


# The two that sample have room for twice the budget: heads that are asked for more than others get it.
KNOBS = {
    "topp": Knob("mass", -6, 12, 0, 1, lambda at: 1 / (1 + math.exp(-at))),
    "magicpig": Knob(
        "tables", math.log(2), math.log(2048), math.log(192), 0.5, lambda at: round(math.exp(at)), lambda n: dict(budget=2 * n)
    ),
    # The top tokens have half of what 4 sinks and a window of 16 leave of the budget, the sample the rest in the mean.
    "vattention": Knob(
        "epsilon", 0, 8, 1, 0.5, lambda at: math.exp(-at), lambda n: dict(budget=2 * n, top=max(1, (n - 20) // 2))
    ),
}


def _kept(budget: int, length: int) -> dict[str, int]:
    """Returns how many tokens RocketKV's code keeps of a text of n: n / c^r, where c is n / (2 budget)."""
    times = max(1.0, length / (2 * budget))
    return dict(kept=max(budget, int(length / times ** min(0.2 + 0.06 * math.log2(times), 0.8))))


# Options of a policy, given its budget and the length of the text.
BY_LENGTH: dict[str, Callable[[int, int], dict[str, int]]] = {"rocketkv": _kept}


def search(knob: Knob, tokens: int, attended: Callable[[dict[str, float]], float]) -> dict[str, float]:
    """Returns the options with which `attended`, their mean of tokens, comes closest to a budget.

    Strides that double find two places with the budget between them; then the Illinois rule (Dowell and Jarratt, 1971) is
    followed, on the logarithm of tokens over budget.
    """
    found: list[tuple[float, dict[str, float]]] = []
    ends: dict[bool, tuple[float, float]] = {}  # whether it is too much: the newest such place, and by how much it is
    at, stride, last = knob.start, knob.stride, None
    while len(found) < ROUNDS:
        options = knob.options(at, tokens)
        off = math.log(attended(options) / tokens)
        found.append((abs(off), options))
        over = off > 0
        ends[over] = at, off
        if abs(off) <= CLOSE / 2 or (at == (knob.low if over else knob.high)):
            break
        if len(ends) == 2:
            if over == last:
                place, other = ends[not over]
                ends[not over] = place, other / 2
            (low, below), (high, above) = ends[False], ends[True]
            at = low + (high - low) * below / (below - above)
        else:
            at = max(knob.low, at - stride) if over else min(knob.high, at + stride)
            stride *= 2
        last = over
    return min(found, key=lambda pair: pair[0])[1]
