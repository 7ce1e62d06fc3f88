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
ROUNDS = 10


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

    By the Illinois rule (Dowell and Jarratt, 1971), on the logarithm of tokens over budget.
    """
    found: list[tuple[float, dict[str, float]]] = []

    def off(at: float) -> float:
        options = knob.options(at, tokens)
        found.append((math.log(attended(options) / tokens), options))
        return found[-1][0]

    low, high = knob.low, knob.high
    below, above, side = off(low), off(high), 0
    while len(found) < ROUNDS and below < 0 < above and abs(found[-1][0]) > CLOSE / 2:
        at = low + (high - low) * below / (below - above)
        here = off(at)
        if here < 0:
            low, below, above, side = at, here, above / (2 if side < 0 else 1), -1
        else:
            high, above, below, side = at, here, below / (2 if side > 0 else 1), 1
    return min(found, key=lambda pair: abs(pair[0]))[1]
