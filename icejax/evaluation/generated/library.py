"""Functions of Python's standard library as the text of tasks, the same wherever a version of Python runs.

Sources come from `ast.unparse`, without docstrings and comments, so that the text has no description.
"""

from __future__ import annotations

import ast
import functools
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from icejax.checks.errors import InputError
from icejax.evaluation.setting import Setting

LIBRARY = Path(sysconfig.get_path("stdlib"))
OUTSIDE = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "turtledemo", "__pycache__"}
DESCRIBED = 60  # least characters of a docstring that describes a function
FULL = 16  # the share of a text that may be empty because no function fits it is one in so many
LINES = range(4, 31)  # of a function that is asked for


@dataclass(frozen=True)
class Function:
    """A function of a module's outermost level.

    Attributes:
        path: of the module, such as "json/tool.py".
        source: without docstring and comments.
        description: its docstring in one line; None if it has none, or one that is short or names the function.
    """

    path: str
    name: str
    source: str
    description: str | None

    @property
    def fits(self) -> bool:
        """Whether it is neither too short nor too long to be asked for."""
        return self.source.count("\n") + 1 in LINES


@functools.cache
def paths() -> tuple[str, ...]:
    """Returns the paths of the standard library's modules, without tests and tables."""
    found = (path.relative_to(LIBRARY).as_posix() for path in LIBRARY.rglob("*.py"))
    return tuple(sorted(path for path in found if OUTSIDE.isdisjoint(path.split("/"))))


@functools.lru_cache(maxsize=1024)
def functions(path: str) -> tuple[Function, ...]:
    """Returns the functions of a module; none if it does not parse or is not ASCII."""
    try:
        nodes = ast.parse((LIBRARY / path).read_bytes().decode("ascii")).body
    except (OSError, ValueError, SyntaxError):
        return ()
    return tuple(_function(path, node) for node in nodes if isinstance(node, ast.FunctionDef))


def _function(path: str, node: ast.FunctionDef) -> Function:
    text = " ".join((ast.get_docstring(node) or "").split())
    told = len(text) >= DESCRIBED and not re.search(rf"\b{re.escape(node.name)}\b", text)
    return Function(path, node.name, ast.unparse(without_docstrings(node)), text if told else None)


def without_docstrings(node: ast.FunctionDef) -> ast.FunctionDef:
    """Returns the node; its docstring and the docstrings of definitions in it are removed."""
    for inner in ast.walk(node):
        if (
            isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            and ast.get_docstring(inner, clean=False) is not None
        ):
            inner.body = inner.body[1:] or [ast.Pass()]
    return node


@dataclass(frozen=True)
class Excerpt:
    """Functions in a row, and how many tokens end at each."""

    functions: tuple[Function, ...]
    ends: np.ndarray

    @property
    def text(self) -> str:
        """The functions' sources, each after the path of its module."""
        return "".join(map(_with_path, self.functions))

    def alone(self, function: Function) -> bool:
        """Says whether no other function has the name or the source."""
        names, sources = (Counter(getattr(one, key) for one in self.functions) for key in ("name", "source"))
        return names[function.name] == sources[function.source] == 1

    def nearest(self, candidates: list[Function], depth: float) -> Function:
        """Returns the candidate whose end is nearest to `depth` percent of the tokens."""
        return min(candidates, key=lambda function: abs(self.depth(function) - depth))

    def depth(self, function: Function) -> float:
        """Returns the percentage of the tokens before the function's end."""
        return float(100 * self.ends[self.functions.index(function)] / self.ends[-1])


def _with_path(function: Function) -> str:
    return f"# Path: {function.path}\n{function.source}\n\n"


@functools.lru_cache(maxsize=8192)
def _count(setting: Setting, function: Function) -> int:
    return setting.count(_with_path(function))


def excerpt(setting: Setting, *, tokens: int, number: int) -> Excerpt:
    """Returns functions of at most so many tokens, of modules in an order that `number` draws.

    Raises:
        InputError: the library has too few functions.
    """
    chosen, counts, total = [], [], 0
    for i in np.random.default_rng((number, tokens)).permutation(len(paths())):
        for function in functions(paths()[i]):
            count = _count(setting, function)
            if total + count <= tokens:
                chosen.append(function)
                counts.append(count)
                total += count
        if tokens - total < tokens // FULL:
            return Excerpt(tuple(chosen), np.cumsum(counts))
    raise InputError(f"Python's standard library has only {total} tokens of functions: --lengths must be at most that")
