"""RepoQA's scorer (Liu et al. 2024, arXiv 2406.06025): a function is right if it is the nearest one, and near enough.

The similarity is BLEU with smoothing method 4 over words, as in `repoqa/metric.py` of evalplus/repoqa. Functions are read from
an answer by Python's own parser in place of tree-sitter, so of code that does not parse the whole block is compared.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

from icejax.evaluation.generated.library import Function

NEAR = 0.8  # least similarity of a right answer
BLOCK = re.compile(r"^```(?:\w+)?\s*\n(.*?)(?=^```)```", re.DOTALL | re.MULTILINE)


def similarity(answer: str, source: str) -> float:
    """Returns how similar two sources are, from 0 to 1."""
    smoothing = SmoothingFunction().method4
    return float(
        sentence_bleu([re.split(r"\s+", source.strip())], re.split(r"\s+", answer.strip()), smoothing_function=smoothing)
    )


def function_of(answer: str) -> str:
    """Returns the first function in the code blocks of an answer, else its first block, else the answer."""
    answer = answer.strip()
    blocks = BLOCK.findall(answer)
    for block in blocks:
        try:
            nodes = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.FunctionDef)]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if nodes:
            return ast.get_source_segment(block, min(nodes, key=lambda node: node.lineno))
    return blocks[0] if blocks else answer


def scores(answer: str, target: Function, others: Iterable[Function]) -> tuple[float, float]:
    """Returns whether an answer is the target and not another function, as 1 or 0, and its similarity to the target.

    Two functions with equal similarity: the first one counts, as in RepoQA, whose order is that of the text.
    """
    code = function_of(answer)
    near = {function: similarity(code, function.source) for function in others}
    best = max(near, key=near.get)
    return float(best == target and near[best] >= NEAR), near[target]
