"""MBPP+ as a task of the harness: a model writes a Python function for a sentence and an example, and tests run on it.

MBPP is Austin et al. 2021 (arXiv 2108.07732), MBPP+ Liu et al. 2023 (arXiv 2305.01210). The file comes from
evalplus/mbppplus_release. Prompts and stop strings follow Qwen2.5-Coder's own evaluation (qwencoder-eval/base and
qwencoder-eval/instruct in its repository). The types of inputs, which JSON does not hold, and the problems with many right
answers follow EvalPlus 0.3.1 (evalplus/data/mbpp.py and evalplus/eval/_special_oracle.py, Apache-2.0).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from icejax.evaluation.own_task import OwnTask
from icejax.evaluation.setting import Setting
from icejax.evaluation.tasks import code, evalplus
from icejax.evaluation.tasks.files import json_lines

FILE = "evalplus/MbppPlus.jsonl.gz"
NAMES = ("mbpp_plus", "mbpp_plus_instruct")
FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution")
# Where a completion ends: lines that begin after the function, and the next problem.
STOPS = ["\nif __name__", "\ndef main(", "\nprint(", '\n"""', "\nassert"]

SETS = "if set(out) == set(expected): return True"
GIVEN = "return (out if isinstance(out, bool) else out is not None) == (expected is not None)"
HEIGHT = (
    "if abs(out - round(inputs[0] ** 2 + 2 * inputs[0] * ((inputs[0] / 2) ** 2 + inputs[1] ** 2) ** 0.5)) <= atol: return True"
)
DIGITS = (
    "if out == sum(abs(int(a) - int(b)) for a, b in zip(*(str(x).zfill(max(len(str(y)) for y in inputs)) for x in inputs))): "
    "return True"
)
SPECIAL = dict.fromkeys(
    ("similar_elements", "find_char_long", "common_in_nested_lists", "extract_singly", "larg_nnum")
    + ("intersection_array", "find_dissimilar", "Diff"),
    SETS,
)
SPECIAL |= dict.fromkeys(("check_str", "text_match_three", "text_starta_endb"), GIVEN)
SPECIAL |= dict(
    are_equivalent="return True", sum_div="if out == 0: return True", surface_Area=HEIGHT, digit_distance_nums=DIGITS
)


def _deep(x: Any) -> Any:
    return tuple(map(_deep, x)) if isinstance(x, list) else x


def _each(x: list[list]) -> list[tuple]:
    return [tuple(y) for y in x]


# Types of the arguments of a call, by the number of the problem.
TYPES: dict[Callable[[list], list], tuple[int, ...]] = {
    lambda call: [tuple(x) for x in call]: (
        (2, 116, 132, 143, 222, 261, 273, 394, 399, 421, 424, 429, 470, 560, 579, 596, 616, 630, 726, 740, 744, 809)
    ),
    lambda call: [_each(x) for x in call]: (63, 64, 70, 94, 120, 237, 272, 299, 400, 409, 417, 438, 473, 614, 780),
    lambda call: [_each(call[0]), call[1]]: (75, 413, 444, 753),
    lambda call: [call[0], tuple(call[1])]: (106, 750),
    lambda call: [[set(x) if isinstance(x, list) and x else {} for x in call[0]]]: (115,),
    lambda call: [float(call[0]), complex(call[1])]: (124,),
    lambda call: [tuple(call[0]), call[1]]: (250, 405, 446, 617, 720, 763, 808),
    lambda call: [tuple(_each(x)) for x in call]: (259, 401, 445),
    lambda call: [tuple(tuple(x) if isinstance(x, list) else x for x in call[0])]: (278,),
    lambda call: [tuple(call[0]), *call[1:]]: (307,),
    lambda call: [{name: tuple(x) for name, x in call[0].items()}, *call[1:]]: (722,),
    lambda call: [complex(call[0])]: (252,),
    lambda call: list(_deep(call)): (580, 615, 791),
}
TYPED = {number: typed for typed, numbers in TYPES.items() for number in numbers}


def has(name: str) -> bool:
    """Returns whether this file has a task of this name."""
    return name in NAMES


def task(name: str, setting: Setting) -> OwnTask:
    """Returns a task of the harness, with the problems of the file in the data folder.

    Raises:
        InputError: the file is missing or is none of problems, or this machine cannot run programs safely.
    """
    rows, instruct = problems(setting.data / FILE), name.endswith(code.INSTRUCT)
    form = dict(doc_to_text=code.ASKED, gen_prefix=code.BEGUN) if instruct else dict(doc_to_text="{{prompt}}\n")
    score = functools.partial(_passed, instruct=instruct)
    return code.code_task(name, rows, score, until=[code.END] if instruct else STOPS, **form)


def _passed(problem: dict[str, str], answers: list[str], *, instruct: bool) -> dict[str, float]:
    return code.passes(program(problem, code.untabbed(answers[0]) if instruct else answers[0]))


def program(problem: dict[str, str], answer: str) -> str:
    """Returns the program that tests an answer: it compares the function with the problem's own on each input."""
    return f"{answer}\n{evalplus.comparison(problem, SPECIAL.get(problem['entry_point'], ''))}"


def problems(file: Path, *, plus: bool = True) -> list[dict[str, str]]:
    """Returns the problems of a file of JSON lines in gzip; values are text, `inputs` a Python expression.

    Args:
        plus: whether EvalPlus's inputs follow MBPP's.

    Raises:
        InputError: the file is missing or is none of problems.
    """
    return json_lines(file, functools.partial(_problem, plus=plus), what="problems", fields=f"{', '.join(FIELDS)}, plus_input")


def _problem(line: dict[str, Any], *, plus: bool) -> dict[str, str]:
    row = {name: str(line[name]).strip() for name in FIELDS}
    typed = TYPED.get(int(row["task_id"].removeprefix("Mbpp/")), list)
    calls = [typed(call) for call in (*line["base_input"], *(line["plus_input"] if plus else ()))]
    return row | dict(inputs=repr(calls), atol=str(float(line["atol"])), reference=line["prompt"] + line["canonical_solution"])
