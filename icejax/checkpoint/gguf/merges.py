"""The merges of a vocabulary: which two tokens become one, the first ones first. `tokenizer_files` calls it.

A byte-level vocabulary's merges lie in the GGUF file. Those of SentencePiece are derived from the tokens' scores.
Example: of the tokens "a", "b", "c", "ab", "abc" with the scores 0, 0, 0, -1, -2, the merges are a+b and then ab+c.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from icejax.checkpoint.gguf.vocabulary import NORMAL, PREFIX, USER_DEFINED, Vocabulary, take_numbers, take_texts
from icejax.checks.errors import InputError, quoted
from icejax.checks.json_file import MOST_BYTES

Merges = list[tuple[str, str]]
MOST_MERGES = 2**22
MOST_WORK = 2**30  # characters that are looked at to derive merges
MARKS = 8  # characters around the two tokens of a merge in tokenizer.json


def written_merges(metadata: dict[str, Any], vocabulary: Vocabulary) -> Merges:
    """Returns the merges of `tokenizer.ggml.merges`, two tokens with a space between them; of equal ones the first."""
    merges, ids = {}, vocabulary.ids
    for i, text in enumerate(take_texts(metadata, "merges", most=MOST_MERGES)):
        space = text.find(" ", 1)  # the first token may begin with a space
        left, right = text[:space], text[space + 1 :]
        if space < 0 or not right:
            raise InputError(f"{PREFIX}merges: entry {i} is {quoted(text)}: expected two tokens with a space between them")
        for token in (left, right, left + right):
            if token not in ids:
                raise InputError(
                    f"{PREFIX}merges: entry {i}, {quoted(text)}, needs the token {quoted(token)}, which is missing"
                )
        merges[left, right] = None
    return list(merges)


def derived_merges(metadata: dict[str, Any], vocabulary: Vocabulary) -> Merges:
    """Returns the merges of SentencePiece: every cut of a token into two tokens, in descending order of the token's score.

    The order is that of published tokenizer.json files: among equal scores, the longer left token comes first. User-defined
    tokens have the score 0, as in SentencePiece's own files; GGUF files give them another one. Where all tokens have one score,
    which some converters write, their ids are the order.
    """
    tokens, ids, types = vocabulary.tokens, vocabulary.ids, vocabulary.types
    scores = take_numbers(metadata, "scores", len(tokens), kinds="iuf")
    scores = np.zeros(len(tokens)) if scores is None else scores.astype(np.float64)
    normal = scores[types == NORMAL]
    if (normal == normal[:1]).all():
        scores = -np.arange(len(tokens), dtype=np.float64)
    scores[types == USER_DEFINED] = 0.0
    if (work := sum(len(token) ** 2 for token in tokens)) > MOST_WORK:
        raise InputError(f"{PREFIX}tokens are too long to derive merges from: {work} steps, expected at most {MOST_WORK}")
    lefts, rights, wholes, size = array("i"), array("i"), array("i"), 0
    for whole, (token, is_control) in enumerate(zip(tokens, vocabulary.is_control.tolist(), strict=True)):
        for cut in range(1, 1 if is_control else len(token)):
            left = ids.get(token[:cut])
            right = None if left is None else ids.get(token[cut:])
            if right is not None:
                lefts.append(left)
                rights.append(right)
                wholes.append(whole)
                size += len(token) + MARKS
        if size > MOST_BYTES:
            raise InputError(f"{PREFIX}tokens: their merges have more than {MOST_BYTES} bytes: expected a published vocabulary")
    left_ids, right_ids = np.asarray(lefts, np.int64), np.asarray(rights, np.int64)
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    order = np.lexsort((-lengths[right_ids], -lengths[left_ids], -scores[np.asarray(wholes, np.int64)]))
    pairs = zip(left_ids[order].tolist(), right_ids[order].tolist(), strict=True)
    return [(tokens[left], tokens[right]) for left, right in pairs]
