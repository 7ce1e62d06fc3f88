"""HumanEval and HumanEval+ as tasks of the harness: a model completes Python functions, and tests run on them in the sandbox.

HumanEval is Chen et al. 2021 (arXiv 2107.03374), HumanEval+ Liu et al. 2023 (arXiv 2305.01210). The files are those of
openai/human-eval and evalplus/humanevalplus_release. Prompts and stop strings are the paper's. The `_instruct` tasks ask in the
words of Qwen2.5-Coder's own evaluation (qwencoder-eval/instruct/eval_plus in its repository) and are for chats.
"""

from __future__ import annotations

import functools
import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import datasets

from icejax.checks.errors import InputError
from icejax.sandbox import programs

BASE, PLUS, INSTRUCT = "humaneval/HumanEval.jsonl.gz", "evalplus/HumanEvalPlus.jsonl.gz", "_instruct"
FILES = {"humaneval": BASE, "humaneval_plus": PLUS, "humaneval_instruct": BASE, "humaneval_plus_instruct": PLUS}
STOPS = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]  # §3.2 of the paper: lines that begin after the function
ASKED = "Can you complete the following Python function?\n```python\n{{prompt}}\n```"
BEGUN, END = "```python\n", "\n```"  # what the answer to it begins with, and where its code ends
SECONDS = 20  # of processor time for all tests of a function
IMPORTED = "import collections, decimal, hashlib, heapq, json, math, random, re, typing"  # what completions use most
FLOATS = 1e-6  # EvalPlus's absolute tolerance of floats where a problem names none

# `find_zero` has many right answers, so EvalPlus puts the answer into the polynomial.
PLUS_TEST = """
import copy, json
def _close(out, expected, atol):
    if isinstance(expected, (list, tuple)):
        alike = isinstance(out, (list, tuple)) and len(out) == len(expected)
        return alike and all(_close(x, y, atol) for x, y in zip(out, expected))
    return abs(out - expected) <= atol + 1e-07 * abs(expected)
def _floats(x):
    return isinstance(x, float) or bool(isinstance(x, (list, tuple)) and x and all(isinstance(y, float) for y in x))
def _equal(inputs, out, expected, atol):
    if {entry!r} == "find_zero":
        return abs(sum(c * out**i for i, c in enumerate(inputs[0]))) <= atol
    if out == expected:
        return True
    atol = atol or ({floats} if _floats(expected) else 0)
    return bool(atol) and _close(out, expected, atol)
_reference = {{}}
exec({reference!r}, _reference)
for _inputs in json.loads({inputs!r}):
    _expected = _reference[{entry!r}](*copy.deepcopy(_inputs))
    assert _equal(_inputs, {entry}(*copy.deepcopy(_inputs)), _expected, {atol})
"""


def program(problem: dict[str, str], completion: str) -> str:
    """Returns the program that tests a completion: HumanEval's own tests, or EvalPlus's where the problem has `inputs`.

    EvalPlus compares the function with the problem's own solution on each input.
    """
    code = problem["prompt"] + completion + "\n"
    if "inputs" not in problem:
        return f"{code}{problem['test']}\ncheck({problem['entry_point']})\n"
    reference = problem["prompt"] + problem["canonical_solution"]
    return code + PLUS_TEST.format(
        entry=problem["entry_point"], reference=reference, inputs=problem["inputs"], atol=problem["atol"], floats=FLOATS
    )


def task(name: str, data: Path) -> dict[str, Any]:
    """Returns a task of the harness, with the problems of a file in the data folder.

    Raises:
        InputError: the file is missing or is none of problems, or this machine cannot run programs safely.
    """
    check_sandbox()
    rows, instruct = problems(data / FILES[name]), name.endswith(INSTRUCT)
    form = dict(doc_to_text=ASKED, gen_prefix=BEGUN) if instruct else dict(doc_to_text="{{prompt}}")
    return form | dict(
        task=name,
        custom_dataset=lambda **_: {"test": datasets.Dataset.from_list(rows)},
        test_split="test",
        output_type="generate_until",
        doc_to_target="",
        generation_kwargs=dict(until=[END] if instruct else STOPS, max_gen_toks=1024, do_sample=False),
        process_results=functools.partial(_passed, between="\n" if instruct else ""),
        metric_list=[dict(metric="pass@1", aggregation="mean", higher_is_better=True)],
        metadata=dict(version=1.0),
    )


def _passed(problem: dict[str, str], answers: list[str], *, between: str) -> dict[str, float]:
    """Returns the score of an answer; behind a `between` that ends the prompt it defines the function again."""
    return {"pass@1": float(programs.run(program(problem, between + answers[0]), seconds=SECONDS) == "passed")}


def problems(file: Path) -> list[dict[str, str]]:
    """Returns the problems of a file of JSON lines in gzip; values are text, `inputs` are JSON.

    Raises:
        InputError: the file is missing or is none of problems.
    """
    names = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
    try:
        lines = [json.loads(line) for line in gzip.open(file, "rt", encoding="utf-8")]
        rows = [{name: str(line[name]) for name in names} for line in lines]
        for row, line in zip(rows, lines, strict=True):
            if "plus_input" in line:
                row |= dict(inputs=json.dumps(line["base_input"] + line["plus_input"]), atol=str(float(line["atol"])))
    except FileNotFoundError:
        raise InputError(f"--data has no {file.name}: expected {file}") from None
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{file} is no file of problems ({error}): expected JSON lines in gzip with {', '.join(names)}"
        ) from None
    return rows


def check_sandbox() -> None:
    """Raises InputError if the sandbox cannot run programs that import the standard library."""
    try:
        if (end := programs.run(IMPORTED)) == "passed":
            return
        fault = f"a program that only imports of the standard library {end}"
    except programs.Unsafe as error:
        fault = str(error)
    raise InputError(f"this machine has no way to run a model's programs safely: {fault}")
