"""Find the function, after RepoQA (Liu et al. 2024, arXiv 2406.06025): a description, and the function that it describes.

RepoQA's data cannot be had without its hub; the functions here are those of Python's standard library, and a function's
docstring, which the text leaves out, is its description. Instruction, order of the prompt, ten depths and scorer are RepoQA's.
"""

from __future__ import annotations

import functools
from typing import Any

from icejax.checks.errors import InputError
from icejax.evaluation.generated.library import Excerpt, Function, excerpt
from icejax.evaluation.generated.similarity import scores
from icejax.evaluation.own_task import OwnTask
from icejax.evaluation.setting import Setting

INSTRUCTION = (
    "Based on the function description and code context, please retrieve and repeat the exact described function from the code "
    "context in a code block wrapped by ```:"
)
BEGUN, END = "```python\n", "\n```"  # beginning of an answer, end of its code
LENGTHS = (2048, 4096, 8192)
DEPTHS = tuple(range(5, 100, 10))  # percent
ANSWER_TOKENS = 512
NEAR = 5  # percent by which a function's position may differ from its depth
DRAWS = 100  # texts that are tried for one with a described function there


def task(setting: Setting) -> OwnTask:
    """Returns the task: a sample for each depth and length.

    Raises:
        InputError: a length is out of range.
    """
    lengths = setting.lengths_for("find_function", LENGTHS, least=min(LENGTHS))
    rows = [dict(length=length, depth=depth) for depth in DEPTHS for length in lengths]

    @functools.cache
    def sample(length: int, depth: int) -> tuple[Excerpt, Function]:
        return _sample(setting, length, depth)

    def text(doc: dict[str, Any]) -> str:
        code, target = sample(doc["length"], doc["depth"])
        return prompt(code.text, target.description)

    def results(doc: dict[str, Any], answers: list[str]) -> dict[str, float]:
        code, target = sample(doc["length"], doc["depth"])
        found, near = scores(BEGUN + answers[0] + END + "\n", target, code.functions)
        return dict(found=found, similarity=near)

    return OwnTask(
        rows,
        task="find_function",
        output_type="generate_until",
        doc_to_text=text,
        doc_to_target=lambda doc: sample(doc["length"], doc["depth"])[1].source,
        gen_prefix=BEGUN,
        generation_kwargs=dict(until=[END], max_gen_toks=ANSWER_TOKENS, do_sample=False),
        process_results=results,
        metric_list=[dict(metric=name, aggregation="mean", higher_is_better=True) for name in ("found", "similarity")],
        num_fewshot=0,
    )


def prompt(code: str, description: str) -> str:
    """Returns RepoQA's prompt: instruction, code, description, instruction."""
    return f"{INSTRUCTION}\n{code}\nFunction Description: {description}\n\n{INSTRUCTION}\n"


def _sample(setting: Setting, length: int, depth: int) -> tuple[Excerpt, Function]:
    """Returns functions, and the one nearest to the depth that has a description and fits its answer; InputError if none is."""
    longest = max(0, length - ANSWER_TOKENS - setting.template_tokens)
    for number in range(DRAWS):
        code = excerpt(setting, tokens=longest - len(setting.encode(prompt("", "") + BEGUN)), number=1000 * depth + number)
        fitting = [function for function in code.functions if function.description and function.fits and code.alone(function)]
        if not fitting:
            continue
        target = code.nearest(fitting, depth)
        if abs(code.depth(target) - depth) > NEAR:
            continue
        while code.functions and len(setting.encode(prompt(code.text, target.description) + BEGUN)) > longest:
            code = Excerpt(code.functions[:-1], code.ends[:-1])
        if target in code.functions:
            return code, target
    raise InputError(
        f"Python's standard library has no described function for a text of {length} tokens: give longer --lengths"
    )
