"""HumanEval and HumanEval+ as tasks of the harness: a model completes Python functions, and tests run on them in the sandbox.

HumanEval is Chen et al. 2021 (arXiv 2107.03374), HumanEval+ Liu et al. 2023 (arXiv 2305.01210). The files come from
openai/human-eval and evalplus/humanevalplus_release. Prompts and stop strings are the paper's. The `_instruct` tasks ask in the
words of Qwen2.5-Coder's own evaluation (qwencoder-eval/instruct/eval_plus in its repository) and are for chats.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from icejax.checks.errors import InputError
from icejax.evaluation.own_task import OwnTask
from icejax.evaluation.setting import Setting
from icejax.evaluation.tasks import evalplus
from icejax.evaluation.tasks.files import json_lines
from icejax.sandbox import programs

BASE, PLUS, INSTRUCT = "humaneval/HumanEval.jsonl.gz", "evalplus/HumanEvalPlus.jsonl.gz", "_instruct"
FILES = {"humaneval": BASE, "humaneval_plus": PLUS, "humaneval_instruct": BASE, "humaneval_plus_instruct": PLUS}
STOPS = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]  # §3.2 of the paper: lines that begin after the function
ASKED = "Can you complete the following Python function?\n```python\n{{prompt}}\n```"
BEGUN, END = "```python\n", "\n```"  # beginning of its answer, end of the answer's code
FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
SECONDS = 20  # of processor time for all tests of a function
IMPORTED = "import collections, decimal, hashlib, heapq, json, math, random, re, typing"  # what completions use most

# `find_zero` has many right answers, so EvalPlus puts the answer into the polynomial.
ZERO = "return abs(sum(c * out**i for i, c in enumerate(inputs[0]))) <= atol"


def program(problem: dict[str, str], completion: str) -> str:
    """Returns the program that tests a completion: HumanEval's own tests, or EvalPlus's where the problem has `inputs`.

    EvalPlus compares the function with the problem's own solution on each input.
    """
    code = problem["prompt"] + completion + "\n"
    if "inputs" not in problem:
        return f"{code}{problem['test']}\ncheck({problem['entry_point']})\n"
    return code + evalplus.comparison(problem, ZERO if problem["entry_point"] == "find_zero" else "")


def has(name: str) -> bool:
    """Returns whether this file has a task of this name."""
    return name in FILES


def task(name: str, setting: Setting) -> OwnTask:
    """Returns a task of the harness, with the problems of a file in the data folder.

    Raises:
        InputError: the file is missing or is none of problems, or this machine cannot run programs safely.
    """
    instruct = name.endswith(INSTRUCT)
    form = dict(doc_to_text=ASKED, gen_prefix=BEGUN) if instruct else dict(doc_to_text="{{prompt}}")
    score = functools.partial(_passed, instruct=instruct)
    return code_task(name, problems(setting.data / FILES[name]), score, until=[END] if instruct else STOPS, **form)


def code_task(
    name: str, rows: list[dict[str, str]], score: Callable[[dict, list[str]], dict], *, until: list[str], **form: str
) -> OwnTask:
    """Returns a task whose answers are programs.

    Args:
        score: runs the program of a problem's answer.
        until: strings that end an answer.
        form: the harness's options of the prompt.

    Raises:
        InputError: this machine cannot run programs safely.
    """
    check_sandbox()
    return OwnTask(
        rows,
        task=name,
        output_type="generate_until",
        doc_to_target="",
        generation_kwargs=dict(until=until, max_gen_toks=1024, do_sample=False),
        process_results=score,
        metric_list=[dict(metric="pass@1", aggregation="mean", higher_is_better=True)],
        num_fewshot=0,  # a problem as an example would have no answer
        **form,
    )


def passes(program: str) -> dict[str, float]:
    """Runs a program in the sandbox; returns its score."""
    return {"pass@1": float(programs.run(program, seconds=SECONDS) == "passed")}


def _passed(problem: dict[str, str], answers: list[str], *, instruct: bool) -> dict[str, float]:
    """Returns the score of an answer: the function's body, or with `instruct` the whole function again."""
    return passes(program(problem, f"\n{untabbed(answers[0])}" if instruct else answers[0]))


def untabbed(answer: str) -> str:
    """Returns an answer with four spaces for each tab, as Qwen's evaluation runs it."""
    return answer.replace("\t", "    ")


def problems(file: Path) -> list[dict[str, str]]:
    """Returns the problems of a file of JSON lines in gzip; values are text, `inputs` a Python expression.

    Raises:
        InputError: the file is missing or is none of problems.
    """

    def problem(line: dict[str, Any]) -> dict[str, str]:
        row = {name: str(line[name]) for name in FIELDS}
        if "plus_input" in line:
            row |= dict(inputs=repr(line["base_input"] + line["plus_input"]), atol=str(float(line["atol"])))
            row |= dict(reference=row["prompt"] + row["canonical_solution"])
        return row

    return json_lines(file, problem, what="problems", fields=", ".join(FIELDS))


def check_sandbox() -> None:
    """Raises InputError if the sandbox cannot run programs that import the standard library."""
    try:
        if (end := programs.run(IMPORTED)) == "passed":
            return
        fault = f"a program that only imports of the standard library {end}"
    except programs.Unsafe as error:
        fault = str(error)
    raise InputError(f"this machine has no way to run a model's programs safely: {fault}")
