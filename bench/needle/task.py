"""The pass-key task: facts hidden in real text, and the questions that ask for them.

A fact is the line ``Pass key qx:12345.`` (a name of two letters, five digits); its question is ``Pass key qx:`` at
the end of the context, and its answer ``12345.``. Text, names and digits are split into a training and a held-out
part, so that an evaluation shares nothing with training but the form of the sentence.
"""

from __future__ import annotations

import functools
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

Split = Literal["train", "heldout"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
EOS = 256  # after the 256 bytes
DIGITS = 5
ANSWER_LENGTH = DIGITS + 1  # the digits and the full stop


def _heldout(text: str) -> bool:
    """Says whether a file name or a name belongs to the held-out tenth; stable across machines."""
    return zlib.crc32(text.encode()) % 10 == 0


@functools.cache
def corpus(split: Split) -> bytes:
    """Returns the ASCII text of the standard library's sources and documentation that belongs to `split`."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in [*root.rglob("*.py"), *root.rglob("*.txt")] if "site-packages" not in p.parts)
    names = [p.relative_to(root).as_posix() for p in files]
    picked = [p for p, name in zip(files, names, strict=True) if _heldout(name) == (split == "heldout")]
    texts = (p.read_bytes() for p in picked)
    return b"\n".join(t for t in texts if len(t) > 1000 and t.isascii())


@functools.cache
def names(split: Split) -> tuple[str, ...]:
    """Returns the two-letter names of `split`."""
    every = (a + b for a in LETTERS for b in LETTERS)
    return tuple(n for n in every if _heldout("name " + n) == (split == "heldout"))


def digits(rng: np.random.Generator, split: Split) -> str:
    """Returns a five-digit string; multiples of seven are held out."""
    while True:
        value = int(rng.integers(0, 10**DIGITS))
        if (value % 7 == 0) == (split == "heldout"):
            return f"{value:0{DIGITS}d}"


def question(name: str) -> str:
    """Returns the text after which the model is to write the digits of `name`."""
    return f"Pass key {name}:"


@dataclass(frozen=True)
class Context:
    """A text with facts in it.

    Attributes:
        text: the context, ending in a line break; a question is appended to it.
        answers: name -> digits of every fact in the text.
    """

    text: bytes
    answers: dict[str, str]


def context(rng: np.random.Generator, *, length: int, facts: int, split: Split) -> Context:
    """Returns `length` bytes of real text with `facts` facts, each on a line of its own at a random line break."""
    chosen = rng.choice(len(names(split)), size=facts, replace=False)
    answers = {names(split)[i]: digits(rng, split) for i in chosen}
    lines = [f"{question(name)}{value}.\n".encode() for name, value in answers.items()]
    filler_length = length - sum(map(len, lines)) - 1
    if filler_length < 0:
        raise ValueError(f"{facts} facts do not fit in a context of {length} bytes")
    text = corpus(split)
    start = int(rng.integers(0, len(text) - filler_length))
    filler = text[start : start + filler_length] + b"\n"
    breaks = np.flatnonzero(np.frombuffer(filler, np.uint8) == ord("\n")) + 1
    at = np.sort(rng.choice(np.append(breaks, 0), size=facts))
    parts, last = [], 0
    for position, line in zip(at, lines, strict=True):
        parts += [filler[last:position], line]
        last = position
    return Context(b"".join([*parts, filler[last:]]), answers)
