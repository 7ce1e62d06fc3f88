"""Options of adaptive methods, chosen so that what a query head attends to is the budget in the mean.

What top-p, MagicPIG and vAttention attend to differs from head to head and from step to step. One option of each is searched
for on a text of a task that stands in no table by default, with the question in the prefill and through the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

TASK = "multikey-8"
CLOSE = 0.02  # of the budget
ROUNDS = 8


@dataclass(frozen=True)
class Knob:
    """What is searched for.

    Attributes:
        option: its name.
        low, high: where the search begins; the higher, the more is attended to.
        value: the option's value at a place between them.
        more: the other options that differ from a policy's own defaults, given the budget.
    """

    option: str
    low: float
    high: float
    value: Callable[[float], float]
    more: Callable[[int], dict[str, int]] = lambda tokens: {}

    def options(self, at: float, tokens: int) -> dict[str, float]:
        """Returns the options of a policy at a place."""
        return self.more(tokens) | {self.option: self.value(at)}


# The two that sample have room for twice the budget: heads that are asked for more than others get it.
KNOBS = {
    "topp": Knob("mass", -6, 12, lambda at: 1 / (1 + math.exp(-at))),
    "magicpig": Knob("tables", math.log(2), math.log(2048), lambda at: round(math.exp(at)), lambda n: dict(budget=2 * n)),
    # The top tokens have half of what 4 sinks and a window of 16 leave of the budget, the sample the rest in the mean.
    "vattention": Knob("epsilon", 0, 8, lambda at: math.exp(-at), lambda n: dict(budget=2 * n, top=max(1, (n - 20) // 2))),
}


def search(knob: Knob, tokens: int, attended: Callable[[dict[str, float]], float]) -> dict[str, float]:
    """Returns the options with which `attended`, their mean of tokens, comes closest to a budget.

    Between two places, one of which attends to too few and one to too many, the next one is where a line between the logarithms
    of both would meet the budget, but no nearer to either than a tenth of the way.
    """
    found: list[tuple[float, dict[str, float]]] = []

    def off(at: float) -> float:
        options = knob.options(at, tokens)
        found.append((math.log(attended(options) / tokens), options))
        return found[-1][0]

    low, high = (knob.low, off(knob.low)), (knob.high, off(knob.high))
    while len(found) < ROUNDS and low[1] < 0 < high[1] and abs(found[-1][0]) > CLOSE:
        share = min(max(low[1] / (low[1] - high[1]), 0.1), 0.9)
        at = low[0] + share * (high[0] - low[0])
        here = (at, off(at))
        low, high = (here, high) if here[1] < 0 else (low, here)
    return min(found, key=lambda pair: abs(pair[0]))[1]
