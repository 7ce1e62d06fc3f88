"""The vocabulary in a GGUF file's metadata: tokens, their types and the ids of special tokens. `tokenizer_files` calls it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from icejax.checks.errors import InputError, input_error_from, quoted
from icejax.checks.json_file import MOST_BYTES

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = range(1, 5)  # token types; 5 is unused, 6 a byte
MOST_TOKENS = 2**21
ROLES = ("bos", "eos", "eot", "eom", "unknown", "padding")
NO_TOKEN = (-1, 2**32 - 1)  # ids that stand for no token
SENTENCEPIECE = dict(unknown=0, bos=1, eos=2)  # roles of a file that does not name them
WORDS = {str: "a text", int: "a whole number", bool: "true or false"}
SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which no file can hold
SPACE = "\u2581"  # what SentencePiece writes for a space


@dataclass(frozen=True)
class Vocabulary:
    """A GGUF file's tokens.

    Attributes:
        tokens: texts by token id.
        ids: token ids by text.
        types: i64[V], token types as llama.cpp numbers them.
        special: ids by role, for the `ROLES` that the file has.
        is_control: bool[V], tokens that are never text: control and unknown tokens, bos, eos and the other end tokens.
    """

    tokens: list[str]
    ids: dict[str, int]
    types: np.ndarray
    special: dict[str, int]
    is_control: np.ndarray

    def name(self, role: str) -> str | None:
        """Returns the text of the token with a role; None where the file has none."""
        return self.tokens[self.special[role]] if role in self.special else None


def read_vocabulary(metadata: dict[str, Any], *, sentencepiece: bool) -> Vocabulary:
    """Returns the vocabulary; InputError for tokens, types or ids that do not fit each other.

    Args:
        sentencepiece: whether tokens write `SPACE` for a space, and some ids have roles by themselves.
    """
    tokens = take_texts(metadata, "tokens", most=MOST_TOKENS)
    if not tokens:
        raise InputError(f"{PREFIX}tokens is empty: expected the tokenizer's tokens")
    types = take_numbers(metadata, "token_type", len(tokens), kinds="iu")
    types = np.full(len(tokens), NORMAL) if types is None else types.astype(np.int64)
    if sentencepiece:
        _respell_spaces(tokens, types)
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        i = next(i for i, token in enumerate(tokens) if ids[token] != i)
        raise InputError(f"{PREFIX}tokens: {i} and {ids[tokens[i]]} are both {quoted(tokens[i])}: expected different tokens")
    special = {role: token_id(metadata, role, len(tokens)) for role in ROLES}
    for role, i in SENTENCEPIECE.items() if sentencepiece else ():
        if f"{PREFIX}{role}_token_id" not in metadata and i < len(tokens) and types[i] in (UNKNOWN, CONTROL):
            special[role] = i
    special = {role: i for role, i in special.items() if i is not None}
    is_control = np.isin(types, (UNKNOWN, CONTROL))
    is_control[[i for role, i in special.items() if role not in ("unknown", "padding")]] = True
    return Vocabulary(tokens, ids, types, special, is_control)


def take(metadata: dict[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """Returns a value of the type `kind`; `default` where the metadata lacks it, InputError where it is of another type."""
    value = metadata.get(key, default)
    if isinstance(value, np.generic):
        value = value.item()
    if value is not default and type(value) is not kind and not (kind is str and isinstance(value, str)):
        raise InputError(f"{key} must be {WORDS[kind]}, found {quoted(value)}")
    return value


def take_texts(metadata: dict[str, Any], name: str, *, most: int) -> list[str]:
    """Returns a list of texts, which together have at most 100 MiB."""
    key = PREFIX + name
    if key not in metadata:
        raise InputError(f"the file's metadata has no {key}: expected the tokenizer's {name}")
    texts = _array(metadata[key], key)
    if len(texts) > most:
        raise InputError(f"{key} has {len(texts)} entries: expected at most {most}")
    texts = list(texts)
    faults = (i for i, text in enumerate(texts) if not isinstance(text, str) or SURROGATE.search(text))
    if (fault := next(faults, None)) is not None:
        raise InputError(f"{key}: entry {fault} is {quoted(texts[fault])}: expected a text")
    if (size := sum(map(len, texts))) > MOST_BYTES:
        raise InputError(f"{key} has {size} characters: expected at most {MOST_BYTES}")
    return texts


def take_numbers(metadata: dict[str, Any], name: str, count: int, *, kinds: str) -> np.ndarray | None:
    """Returns an array of one number per token; None where the metadata lacks it.

    Args:
        kinds: numpy's letters for the kinds of numbers that are expected.
    """
    key = PREFIX + name
    if key not in metadata:
        return None
    values = _array(metadata[key], key)
    if len(values) != count:
        raise InputError(f"{key} has {len(values)} entries and {PREFIX}tokens has {count}: expected one for each token")
    with input_error_from(f"{key}: expected numbers"):
        numbers = np.asarray(values)
    if count and (numbers.ndim != 1 or numbers.dtype.kind not in kinds or np.isnan(numbers).any()):
        raise InputError(f"{key} must be {'whole ' if kinds == 'iu' else ''}numbers, found {quoted(list(values[:4]))}")
    return numbers


def _array(value: Any, key: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple, np.ndarray)) or getattr(value, "ndim", 1) != 1:
        raise InputError(f"{key} must be a list, found {quoted(value)}")
    return value.tolist() if isinstance(value, np.ndarray) else value


def _respell_spaces(tokens: list[str], types: np.ndarray) -> None:
    """Writes user-defined tokens of spaces alone as the model's other tokens; converters to GGUF write them as spaces."""
    others = set(tokens)
    for i in np.flatnonzero(types == USER_DEFINED):
        spelled = SPACE * len(tokens[i])
        if tokens[i] and not tokens[i].strip(" ") and spelled not in others:
            tokens[i] = spelled


def token_id(metadata: dict[str, Any], role: str, count: int) -> int | None:
    """Returns the id of the token with a role; None where the metadata has none, InputError if it is no token's."""
    key = f"{PREFIX}{role}_token_id"
    value = take(metadata, key, int)
    if value is None or value in NO_TOKEN:
        return None
    if not 0 <= value < count:
        raise InputError(f"{key} is {value}: expected the id of one of the {count} tokens")
    return value
