"""EvalPlus's comparison of two functions' results (Liu et al. 2023, arXiv 2305.01210), as the end of a program.

The tested function and the problem's own solution get the same inputs, each a copy of its own. Results are compared exactly,
floats, and results of problems that name a tolerance, as `np.allclose` does with that tolerance and 1e-7 relative.
"""

from __future__ import annotations

FLOATS = 1e-6  # the absolute tolerance of floats where a problem names none

TEST = """
import copy
def _close(out, expected, atol):
    if isinstance(expected, (list, tuple)):
        alike = isinstance(out, (list, tuple)) and len(out) == len(expected)
        return alike and all(_close(x, y, atol) for x, y in zip(out, expected))
    return abs(out - expected) <= atol + 1e-07 * abs(expected)
def _floats(x):
    return isinstance(x, float) or bool(isinstance(x, (list, tuple)) and x and all(isinstance(y, float) for y in x))
def _equal(inputs, out, expected, atol):
    {special}
    if out == expected:
        return True
    atol = atol or ({floats} if _floats(expected) else 0)
    return bool(atol) and type(out) is type(expected) and _close(out, expected, atol)
_reference = {{}}
exec({reference!r}, _reference)
for _inputs in eval({inputs!r}, dict(inf=float("inf"), nan=float("nan"))):
    _expected = _reference[{entry!r}](*copy.deepcopy(_inputs))
    assert _equal(_inputs, {entry}(*copy.deepcopy(_inputs)), _expected, {atol})
"""


def comparison(problem: dict[str, str], special: str) -> str:
    """Returns the end of a program that has defined the function of a problem.

    Args:
        problem: `entry_point`, the function's name; `reference`, a program that defines it rightly; `inputs`, its arguments as
            a Python expression, a list with a list for each call; `atol`, the absolute tolerance, 0 for none.
        special: a statement, or nothing; it returns whether `out` is right for `inputs`, where a comparison with `expected` is
            not enough.
    """
    return TEST.format(
        entry=problem["entry_point"],
        reference=problem["reference"],
        inputs=problem["inputs"],
        atol=problem["atol"],
        floats=FLOATS,
        special=special,
    )
