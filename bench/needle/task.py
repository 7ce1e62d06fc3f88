"""The pass-key tasks: facts hidden in real text, and the questions that ask for them.

Three kinds of fact, each on a line of its own:

    Pass key qx:12345.               a key
    Pass key qx after 12345:67890.   a further value of the same name; it names the value before
    Pass key qx:key ab.              a hop: qx uses the key of ab

A question stands at the end of the text, and the model has to continue it with the answer:

    Pass key qx:     12345.          or, for a hop,  key ab:24680.
    Pass keys qx:    12345:67890.    all values of the name, in order of appearance

Text, names and digits are split into a training and a held-out part, so an evaluation shares only the form of the sentences
with training.
"""

from __future__ import annotations

import functools
import itertools
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from icejax.checks.errors import InputError

Split = Literal["train", "heldout"]
Asked = Literal["key", "values", "hop"]
Kind = Literal["code", "documentation", "licence", "prose"]
KINDS: tuple[Kind, ...] = ("code", "documentation", "licence", "prose")
SHARES = (0.5, 0.2, 0.1, 0.2)  # shares of contexts, by kind
LETTERS = "abcdefghijklmnopqrstuvwxyz"
EOS = 256  # end-of-text token, after the 256 bytes
DIGITS = 5
_NEITHER = bytes(i for i in range(128) if not (chr(i).isalpha() or chr(i).isspace()))
VALUES = 4  # values of a name with several


@dataclass(frozen=True)
class Facts:
    """How many facts of each kind a context holds: plain keys, names with several values, and hops."""

    keys: int = 0
    chains: int = 0
    hops: int = 0

    @property
    def names(self) -> int:
        """Number of names; a hop has two."""
        return self.keys + self.chains + 2 * self.hops


@dataclass(frozen=True)
class Task:
    """A form of evaluation.

    Attributes:
        facts: facts of a context.
        asked: the kind of fact that the questions ask for; the others distract.
        together: whether all questions of a context are asked in one text, each after the model's answer to the last.
        early: whether the facts are in the model's own turn, after the prompt.
    """

    facts: Facts
    asked: Asked = "key"
    together: bool = False
    early: bool = False


TASKS = {
    "single": Task(Facts(keys=1)),
    "multikey-4": Task(Facts(keys=4)),
    "multikey-8": Task(Facts(keys=8)),
    "multikey-16": Task(Facts(keys=16)),
    "multiquery-4": Task(Facts(keys=4), together=True),
    "multivalue-4": Task(Facts(keys=4, chains=1), asked="values"),
    "hops": Task(Facts(keys=4, hops=2), asked="hop"),
    "early": Task(Facts(keys=4), early=True),
}


def _heldout(text: str) -> bool:
    """Returns whether a file name or a name is in the held-out tenth; the same on every machine."""
    return zlib.crc32(text.encode()) % 10 == 0


def _kind(path: Path) -> Kind | None:
    """Returns the kind of text of a file by its name; None for a file that is not used."""
    name = path.name.lower()
    if name.startswith(("licen", "copying", "copyright", "notice")) or "common-licenses" in path.parts:
        return "licence"
    if name in ("metadata", "topics.py") or name.startswith("readme") or path.suffix == ".pod":
        return "prose"
    if path.suffix in (".md", ".rst", ".txt"):
        return "prose" if "vim" in path.parts else "documentation"  # Vim's manual is a book
    return "code" if path.suffix == ".py" else None


@functools.cache
def _files() -> dict[Kind, dict[str, Path]]:
    """Returns the files of each kind, by paths relative to the folder where they are installed.

    Code comes only from the standard library, other kinds also from installed packages and the system.
    """
    library = Path(sysconfig.get_path("stdlib"))
    by_kind: dict[Kind, dict[str, Path]] = {kind: {} for kind in KINDS}
    for root in (library, Path(sysconfig.get_path("purelib")), Path("/usr/share")):
        for path in sorted(root.rglob("*")):
            kind = _kind(path)
            foreign = root == library and "site-packages" in path.parts or root != library and kind == "code"
            if kind and not foreign and path.is_file() and not path.is_symlink():
                by_kind[kind].setdefault(path.relative_to(root).as_posix(), path)
    return by_kind


@functools.cache
def corpus(split: Split, kind: Kind) -> bytes:
    """Returns the ASCII text of one kind in `split`, without duplicates, small files and tables of numbers."""
    paths = (path for name, path in _files()[kind].items() if _heldout(name) == (split == "heldout"))
    texts = dict.fromkeys(path.read_bytes() for path in paths)
    return b"\n".join(t for t in texts if len(t) > 1000 and t.isascii() and _words(t))


def _words(text: bytes) -> bool:
    """Returns whether letters and blanks are more than two thirds of a text."""
    return len(text.translate(None, _NEITHER)) > len(text) * 2 / 3


@functools.cache
def names(split: Split) -> tuple[str, ...]:
    """Returns the two-letter names of `split`."""
    all_names = (a + b for a in LETTERS for b in LETTERS)
    return tuple(n for n in all_names if _heldout("name " + n) == (split == "heldout"))


def digits(rng: np.random.Generator, split: Split) -> str:
    """Returns a five-digit string; multiples of seven are held out."""
    while True:
        value = int(rng.integers(0, 10**DIGITS))
        if (value % 7 == 0) == (split == "heldout"):
            return f"{value:0{DIGITS}d}"


@dataclass(frozen=True)
class Question:
    """A question at the end of a text, and the answer, which ends in a full stop."""

    text: str
    answer: str
    asked: Asked


@dataclass(frozen=True)
class Context:
    """A text with facts in it.

    Attributes:
        text: ends in a line break; a question is appended to it.
        questions: questions about every key, then every name with several values, then every hop.
        facts: the lines of the facts, without line breaks.
    """

    text: bytes
    questions: tuple[Question, ...]
    facts: tuple[bytes, ...]

    def asked(self, task: Task) -> tuple[Question, ...]:
        """Returns the questions that `task` asks."""
        return tuple(question for question in self.questions if question.asked == task.asked)


def question(name: str) -> str:
    """Returns the question for the key of `name`."""
    return f"Pass key {name}:"


@dataclass(frozen=True)
class Drawn:
    """Facts before they are hidden in a text: groups of lines, which keep their order within a group, and questions."""

    groups: tuple[tuple[str, ...], ...]
    questions: tuple[Question, ...]

    @property
    def lines(self) -> tuple[bytes, ...]:
        """All lines, without line breaks."""
        return tuple(line.encode() for group in self.groups for line in group)


def draw(rng: np.random.Generator, facts: Facts, split: Split) -> Drawn:
    """Returns facts with names and digits of `split`."""
    name_iterator = iter([names(split)[i] for i in rng.choice(len(names(split)), size=facts.names, replace=False)])
    groups: list[tuple[str, ...]] = []
    questions = []
    for name in itertools.islice(name_iterator, facts.keys):
        value = digits(rng, split)
        groups.append((f"{question(name)}{value}.",))
        questions.append(Question(question(name), f"{value}.", "key"))
    for name in itertools.islice(name_iterator, facts.chains):
        values = [digits(rng, split) for _ in range(VALUES)]
        later = (f"Pass key {name} after {a}:{b}." for a, b in itertools.pairwise(values))
        groups.append((f"{question(name)}{values[0]}.", *later))
        questions.append(Question(f"Pass keys {name}:", ":".join(values) + ".", "values"))
    for _ in range(facts.hops):
        name, target_name, value = next(name_iterator), next(name_iterator), digits(rng, split)
        groups += [(f"{question(name)}key {target_name}.",), (f"{question(target_name)}{value}.",)]
        questions.append(Question(question(name), f"key {target_name}:{value}.", "hop"))
    return Drawn(tuple(groups), tuple(questions))


def context(rng: np.random.Generator, *, length: int, facts: Facts, split: Split) -> Context:
    """Returns `length` bytes of real text of any kind, with new facts hidden in it."""
    drawn = draw(rng, facts, split)
    return Context(hide(rng, drawn, length=length, split=split, kinds=KINDS), drawn.questions, drawn.lines)


def hide(rng: np.random.Generator, drawn: Drawn, *, length: int, split: Split, kinds: tuple[Kind, ...]) -> bytes:
    """Returns `length` bytes of real text of one of `kinds`, with the facts on lines of their own at random line breaks."""
    shares = np.asarray([SHARES[KINDS.index(kind)] for kind in kinds])
    text = corpus(split, kinds[rng.choice(len(kinds), p=shares / shares.sum())])
    total = sum(len(line) + 1 for line in drawn.lines)
    filler_length = length - total - 1
    if filler_length < 0:
        raise InputError(f"facts of {total} bytes do not fit in a context of {length}")
    if filler_length >= len(text):
        raise InputError(f"a context must be shorter than the {len(text):,} bytes of text that there are, got {length:,}")
    start = int(rng.integers(0, len(text) - filler_length))
    filler = text[start : start + filler_length] + b"\n"
    breaks = np.flatnonzero(np.frombuffer(filler, np.uint8) == ord("\n")) + 1
    placed: list[tuple[int, float, str]] = []
    for group in drawn.groups:
        positions, ties = np.sort(rng.choice(np.append(breaks, 0), size=len(group))), np.sort(rng.random(len(group)))
        placed += zip(positions.tolist(), ties.tolist(), group, strict=True)
    parts, last = [], 0
    for position, _, line in sorted(placed):
        parts += [filler[last:position], line.encode(), b"\n"]
        last = position
    return b"".join([*parts, filler[last:]])
