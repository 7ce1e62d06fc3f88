"""Options that `bench.compare` derives from a budget, so that adaptive methods attend to the budget on average.

The number of tokens that top-p, MagicPIG and vAttention attend to differs from head to head and from step to step. One option
of each is searched for on a text of a task that is in no table by default, with a dense and a sparse question. RocketKV's code
derives an option from the length of the text, which a policy does not know; `BY_LENGTH` has that rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

TASK = "multikey-8"
CLOSE = 0.02  # share of the budget; the search ends within half of it
ROUNDS = 10
BEYOND = 1.1  # a stride over the part that a line asks for, so that the budget comes to lie between two places


@dataclass(frozen=True)
class Knob:
    """An option to search for, as a function of a place on a line.

    Attributes:
        option: the option's name.
        low, high: the ends of the line; a higher place attends to more tokens.
        start, stride: the first place, and the length of the first stride.
        value: returns the option's value at a place.
        more: returns other options that differ from the policy's defaults, given the budget.
        traced: whether the policy's state does not depend on the option, so that one program can serve all its values.
    """

    option: str
    low: float
    high: float
    start: float
    stride: float
    value: Callable[[float], float]
    more: Callable[[int], dict[str, int]] = lambda tokens: {}
    traced: bool = True

    def options(self, at: float, tokens: int) -> dict[str, float]:
        """Returns the policy's options at a place."""
        return self.more(tokens) | {self.option: self.value(at)}


# The two methods that sample have room for twice the budget, because some heads need more than the mean.
KNOBS = {
    "topp": Knob("mass", -6, 12, 0, 1, lambda at: 1 / (1 + math.exp(-at))),
    "magicpig": Knob(
        "tables", math.log(2), math.log(2048), math.log(192), 0.5, lambda at: round(math.exp(at)), lambda n: dict(budget=2 * n),
        traced=False,
    ),
    # Beside 4 sinks and a window of 16, top tokens get half of the budget, and the sample the other half on average.
    "vattention": Knob(
        "epsilon", 0, 8, 1, 0.5, lambda at: math.exp(-at), lambda n: dict(budget=2 * n, top=max(1, (n - 20) // 2))
    ),
}  # fmt: skip


def _kept(budget: int, length: int) -> dict[str, int]:
    """Returns how many tokens RocketKV's code keeps of a text of n tokens: n / c^r, c = n / (2 budget).

    r is 0.2 + 0.06 log2(c), at most 0.8. For example, n = 4,096 and a budget of 256 give c = 8, r = 0.38 and 1,858 tokens.
    """
    compression = max(1.0, length / (2 * budget))
    return dict(kept=max(budget, int(length / compression ** min(0.2 + 0.06 * math.log2(compression), 0.8))))


# Options of a policy, given its budget and the length of the text.
BY_LENGTH: dict[str, Callable[[int, int], dict[str, int]]] = {"rocketkv": _kept}


def search(knob: Knob, tokens: int, attended: Callable[[dict[str, float]], float]) -> dict[str, float]:
    """Returns the options whose mean number of attended tokens is closest to a budget.

    Strides find two places with the budget between them: each is twice the last one at most, and a little more than the line
    through the last two places asks for. Then the Illinois rule (Dowell and Jarratt, 1971) finds the root of the logarithm of
    tokens over budget.

    Args:
        tokens: the budget.
        attended: returns the mean number of attended tokens, given the options.
    """
    trials: list[tuple[float, dict[str, float]]] = []
    ends: dict[bool, tuple[float, float]] = {}  # newest place and its log ratio, below (False) and above (True) the budget
    place, stride, last = knob.start, knob.stride, None
    while len(trials) < ROUNDS:
        options = knob.options(place, tokens)
        if any(options == tried for _, tried in trials):  # whole numbers lie no closer
            break
        log_ratio = math.log(attended(options) / tokens)
        trials.append((abs(log_ratio), options))
        over = log_ratio > 0
        before, ends[over] = ends.get(over), (place, log_ratio)
        if abs(log_ratio) <= CLOSE / 2 or (place == (knob.low if over else knob.high)):
            break
        if len(ends) == 2:
            if over == last:
                old_place, old_ratio = ends[not over]
                ends[not over] = old_place, old_ratio / 2
            (low, ratio_below), (high, ratio_above) = ends[False], ends[True]
            place = low + (high - low) * ratio_below / (ratio_below - ratio_above)
        else:
            if before and abs(log_ratio) < abs(before[1]):
                stride = min(stride, BEYOND * abs((place - before[0]) * log_ratio / (log_ratio - before[1])))
            place = max(knob.low, place - stride) if over else min(knob.high, place + stride)
            stride *= 2
        last = over
    return min(trials, key=lambda pair: pair[0])[1]
