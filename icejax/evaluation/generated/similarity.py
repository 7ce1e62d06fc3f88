"""RepoQA's scorer (Liu et al. 2024, arXiv 2406.06025): a function is right if it is the nearest one, and near enough.

The similarity is BLEU with smoothing method 4 over words, as in `repoqa/metric.py` of evalplus/repoqa, of sources without
comments and docstrings, as in its `compute_score.py`. Functions are read from an answer by Python's own parser in place of
tree-sitter, so of code that does not parse the whole block is compared.
"""

from __future__ import annotations

import ast
import functools
import io
import itertools
import re
import tokenize
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


@functools.lru_cache(maxsize=4096)
def without_comments(code: str) -> str:
    """Returns code without comments and texts that are whole lines of a block; behind a token that is none all stays."""
    spans, text, begins, depth = [], None, True, 0
    try:
        for kind, _, start, end, _ in tokenize.generate_tokens(io.StringIO(code).readline):
            if kind == tokenize.ERRORTOKEN:
                break  # from Python 3.12 on an error is raised here
            if kind == tokenize.COMMENT:
                spans.append((start, end))
            elif kind == tokenize.NEWLINE:
                spans += [] if text is None else [text]
                text, begins = None, True
            elif kind in (tokenize.INDENT, tokenize.DEDENT):
                depth += 1 if kind == tokenize.INDENT else -1
            elif kind != tokenize.NL:
                text = (start, end) if begins and depth and kind == tokenize.STRING else None
                begins = False
    except (tokenize.TokenError, SyntaxError):
        pass
    starts = [0, *itertools.accumulate(len(line) + 1 for line in code.split("\n"))]
    for (first, left), (last, right) in sorted(spans, reverse=True):
        code = code[: starts[first - 1] + left] + code[starts[last - 1] + right :]
    return code


def scores(answer: str, target: Function, others: Iterable[Function]) -> tuple[float, float]:
    """Returns whether an answer is the target and not another function, as 1 or 0, and its similarity to the target.

    Two functions with equal similarity: the first one counts, as in RepoQA, whose order is that of the text.
    """
    code = without_comments(function_of(answer))
    near = {function: similarity(code, without_comments(function.source)) for function in others}
    best = max(near, key=near.get)
    return float(best == target and near[best] >= NEAR), near[target]
