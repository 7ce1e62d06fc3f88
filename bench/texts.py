"""Texts for a model of any tokenizer, and questions at their end whose true continuations are known.

`bench.compare`, `bench.attention.pages`, `bench.attention.calibrate` and `bench.attention.two_precisions` take them.

The texts are Python's own, so that a version of Python and a number give the same text on every machine: the modules of the
standard library, and the language reference. There are two tasks:

- `function`: a text of modules, and `# The function NAME of module M, written again:` with `def NAME`. The continuation is the
  function's own source.
- `value`: the language reference with lines such as `amber falcon = 48213` in it, and the beginning of one of these lines. The
  continuation is the rest of the line.
"""

from __future__ import annotations

import ast
import functools
import itertools
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bench.needle import task
from icejax.checks.errors import InputError

Task = Literal["function", "value"]
TASKS: tuple[Task, ...] = ("function", "value")
LIBRARY = Path(sysconfig.get_path("stdlib"))
QUESTIONS = 3  # per text
LINES = 16  # values in a text
CONTINUED = 17  # most tokens of a continuation
LONGEST = 64  # most tokens of a question and its continuation
CAPTURED = 6  # tokens of a continuation whose queries are captured: five digits and a line break, or fewer
SHORTEST = 512  # tokens of a text that has room for modules or values
WORDS = (
    "amber basalt cedar copper crimson dapple ember frosty golden hollow indigo jade linen marble olive silver".split(),
    "anchor basin canyon delta falcon garden harbor island lantern meadow needle orchard pebble river summit valley".split(),
)
APART = 500  # first characters of a text of prose, without values: a few tokens in front are cut off
WHOLE = ("prose", "source")  # kinds of `whole`
CHARACTERS = 400_000  # of such a text
FAR = 10_000  # numbers from here on are texts of no table


@dataclass(frozen=True)
class Question:
    """The tokens of a question, and of its true continuation."""

    tokens: list[int]
    continuation: list[int]


@dataclass(frozen=True)
class Document:
    """The tokens of a text, and questions about it."""

    tokens: list[int]
    questions: tuple[Question, ...]


def document(tokenizer: Any, name: Task, *, tokens: int, number: int) -> Document:
    """Returns a text of so many tokens, and `QUESTIONS` questions about it.

    Raises:
        InputError: the machine has too little text.
    """
    rng = np.random.default_rng((number, tokens, *name.encode()))
    ids, asked = (_modules if name == "function" else _values)(tokenizer, rng, tokens)
    begin = _begin(tokenizer)
    return Document(begin + ids[len(ids) - tokens + len(begin) :], tuple(asked))


def prompt(tokenizer: Any, name: Task, *, length: int, number: int) -> tuple[list[int], list[int]]:
    """Returns a text with a question at its end, of at most `length` tokens, and the next `CAPTURED` tokens."""
    text = document(tokenizer, name, tokens=length - LONGEST, number=number)
    question = text.questions[0]
    return text.tokens + question.tokens, question.continuation[:CAPTURED]


def excerpt(tokenizer: Any, kind: task.Kind, *, tokens: int, seed: int) -> list[int]:
    """Returns the tokens of a piece of real text of one kind; InputError if the machine has too little."""
    corpus = task.corpus("heldout", kind)
    start = int(np.random.default_rng(seed).integers(0, max(1, len(corpus) - 8 * tokens)))
    ids = _encode(tokenizer, corpus[start : start + 8 * tokens].decode())
    if len(ids) < tokens:
        raise InputError(f"--lengths must be at most the {len(ids)} tokens of {kind} that there are, got {tokens}")
    return ids[:tokens]


def whole(kind: Literal["prose", "source"]) -> str:
    """Returns a text of `CHARACTERS` characters: prose of the language reference, or modules of the standard library."""
    if kind == "prose":
        return _topics()[:CHARACTERS]
    modules, size = [], 0
    for i in np.random.default_rng(0).permutation(len(_paths())):
        if functions(_paths()[i]):  # it is ASCII and parses
            modules.append((LIBRARY / _paths()[i]).read_text("ascii"))
            size += len(modules[-1])
        if size >= CHARACTERS:
            break
    return "\n\n".join(modules)[:CHARACTERS]


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _begin(tokenizer: Any) -> list[int]:
    """Returns the tokens that the tokenizer puts in front of a text, such as Gemma's `<bos>`."""
    with_special = tokenizer.encode("x")
    return with_special[: with_special.index(_encode(tokenizer, "x")[0])]


def _question(tokenizer: Any, question: str, continuation: str) -> Question | None:
    """Returns a question; None if it is too long, or its last token would be another one with the continuation after it."""
    tokens, both = _encode(tokenizer, question), _encode(tokenizer, question + continuation)
    if both[: len(tokens)] != tokens or len(tokens) + CONTINUED > LONGEST:
        return None
    return Question(tokens, both[len(tokens) : len(tokens) + CONTINUED])


@dataclass(frozen=True)
class Function:
    """A function of a module's outermost level.

    Attributes:
        before: the module's text in front of it, from at most two definitions before.
        source: its source.
        behind: the module's text behind it.
    """

    module: str
    name: str
    before: str
    source: str
    behind: str


@functools.cache
def _paths() -> tuple[str, ...]:
    """Returns the paths of the standard library's modules, without tests and tables of texts and characters."""
    outside = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "topics.py"}
    paths = (path.relative_to(LIBRARY).as_posix() for path in LIBRARY.rglob("*.py") if not path.is_symlink())
    return tuple(sorted(path for path in paths if outside.isdisjoint(path.split("/"))))


@functools.lru_cache(maxsize=64)
def functions(path: str) -> tuple[Function, ...]:
    """Returns the functions of a module of the standard library's; none if it is not ASCII or does not parse."""
    source = (LIBRARY / path).read_bytes()
    try:
        text = source.decode("ascii")
        nodes = ast.parse(text).body
    except (UnicodeDecodeError, SyntaxError):
        return ()
    lines, module = text.splitlines(keepends=True), path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    found = []
    for i, node in enumerate(nodes):
        if isinstance(node, ast.FunctionDef) and text.count(f"def {node.name}(") == 1:
            first, last, end = nodes[max(0, i - 2)].lineno - 1, node.lineno - 1, node.end_lineno
            parts = ("".join(lines[slice(*ends)]) for ends in ((first, last), (last, end), (end, None)))
            found.append(Function(module, node.name, *parts))
    return tuple(found)


def _modules(tokenizer: Any, rng: np.random.Generator, tokens: int) -> tuple[list[int], list[Question]]:
    """Returns at least so many tokens of parts of modules, and questions about functions in its last ones."""
    most, parts, asked = tokens // (QUESTIONS + 1), [], []
    for i in rng.permutation(len(_paths())):
        found = functions(_paths()[i])
        if not found:
            continue
        function = found[rng.integers(len(found))]
        question, head = _question(tokenizer, *_asked(function)), f"# Module {function.module}\n{function.before}"
        if question is None or len(question.continuation) < CONTINUED or len(_encode(tokenizer, head + function.source)) > most:
            continue
        part = (head + function.source + function.behind)[: 8 * most]  # few tokens have more than eight characters
        parts.append(_encode(tokenizer, part)[: most - 2] + _encode(tokenizer, "\n\n"))
        asked.append(question)
        excess = sum(map(len, parts)) - tokens
        if excess >= 0:
            # Parts are cut where the text begins, so nothing is asked about these; at least three others are whole.
            whole = [j for j in range(len(parts)) if sum(map(len, parts[:j])) >= excess]
            return [*itertools.chain(*parts)], [asked[j] for j in rng.permutation(whole)[:QUESTIONS]]
    raise InputError(
        f"Python's modules have too few questions of at most {LONGEST} tokens, answers included, for a text of {tokens} "
        "tokens: take a shorter text, or a tokenizer of longer tokens"
    )


def _asked(function: Function) -> tuple[str, str]:
    question = f"# The function {function.name} of module {function.module}, written again:\n"
    head = f"def {function.name}"
    return question + head, function.source.removeprefix(head)


def _values(tokenizer: Any, rng: np.random.Generator, tokens: int) -> tuple[list[int], list[Question]]:
    """Returns at least so many tokens of prose with values in it, and questions about some of the values."""
    pairs = rng.permutation(len(WORDS[0]) * len(WORDS[1]))[:LINES]
    names = [f"{WORDS[0][i // len(WORDS[1])]} {WORDS[1][i % len(WORDS[1])]}" for i in pairs]
    lines = [(f"{name} =", f" {rng.integers(10_000, 100_000)}\n") for name in names]
    room = tokens - sum(len(_encode(tokenizer, name + value)) for name, value in lines)
    topics = _topics()
    first = int(rng.integers(max(1, len(topics) - 8 * room)))
    ids = _encode(tokenizer, topics[first : first + 8 * room])[: room + 32]
    prose = (tokenizer.decode(ids).rstrip("\n") + "\n").splitlines(keepends=True)
    ends = np.cumsum([len(line) for line in prose])
    places = np.sort(rng.choice(np.flatnonzero(ends > APART), LINES))
    parts, last = [], 0
    for place, line in zip(places, lines, strict=True):
        parts += [*prose[last:place], *line]
        last = place
    ids = _encode(tokenizer, "".join([*parts, *prose[last:]]))
    if len(ids) < tokens:
        raise InputError(f"a text with values must be shorter than Python's topics, got {tokens} tokens")
    asked = (_question(tokenizer, *lines[i]) for i in rng.permutation(LINES))
    return ids, [question for question in asked if question is not None][:QUESTIONS]


@functools.cache
def _topics() -> str:
    """Returns the topics of Python's `help`: the prose of its language reference, which is the same wherever a version runs."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).expandtabs()
