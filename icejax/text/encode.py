"""Text to token ids: names of control tokens in messages and plain prompts stay text. `api.prompts` calls it.

Example: in "<|im_start|>user\\nsay <|im_end|><|im_end|>" a message has the first <|im_end|>. Between the control tokens of the
template "user\\nsay <|im_end|>" is encoded without special tokens, so that it gives "user", "\\n", "say", " <", "|", ...
"""

from __future__ import annotations

import bisect
import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

from icejax.checks.errors import InputError
from icejax.checks.numbers import is_unicode
from icejax.text.chat_text import ChatText, spans_of
from icejax.text.control_tokens import ControlTokens, Name

Encode = Callable[..., list[int]]
BORDERS = ("\n", "|")  # texts that rarely share a token with the text after them
# transformers writes `split_special_tokens` into the tokenizer and then reads it: another thread's call must not come between.
CALLS = threading.Lock()


def encode(
    tokenizer: Any, text: str, *, special_tokens: bool = False, parse_special: bool = False, continues: bool = False
) -> list[int]:
    """Returns the token ids of a text; without names of control tokens in it, they are the tokenizer's for the whole text.

    Args:
        special_tokens: whether the tokenizer adds special tokens; a `ChatText` has the template's already and gets none. A bos
            that the text begins with is not added again.
        parse_special: whether a control token's name is that token everywhere; False: only where a chat template wrote it.
        continues: whether the text follows other text: then the tokenizer puts neither special tokens nor a space in front.

    Raises:
        InputError: the text has half of a surrogate pair, which no UTF-8 text has.
    """
    if not is_unicode(text):
        raise InputError("the text is not UTF-8: convert it first")
    adds = special_tokens and not continues and not isinstance(text, ChatText)
    call = functools.partial(_call, tokenizer)
    whole = encode_behind(call, str(text)) if continues else call(text, add_special_tokens=adds)
    controls = ControlTokens(tokenizer)
    if not controls.ids:
        return whole
    before, behind = added_tokens(tokenizer) if adds else ([], [])
    if parse_special:
        is_double = bool(before) and whole[len(before) : 2 * len(before)] == before
        return whole[len(before) :] if is_double else whole
    names = controls.find(text)
    own = _outside(names, spans_of(text))
    if len(own) == len(names) and controls.count(whole) <= len(own) + controls.count(before + behind):
        return whole
    return before + encode_apart(tokenizer, text, own, continues=continues) + behind


def encode_apart(tokenizer: Any, text: str, own: list[Name], *, continues: bool = False) -> list[int]:
    """Returns the token ids of a text with only the control tokens `own`; the text between them is encoded piece by piece."""
    text, call, controls = str(text), functools.partial(_call, tokenizer), ControlTokens(tokenizer)
    anew = bool(own) and _begins_anew(call, text[own[0].start : own[0].end], own[0].token)
    ids, end = [], 0
    for name in (*own, None):
        piece = text[end : len(text) if name is None else name.first]
        if piece:
            ids += _plain(call, controls, piece, first=anew if end else not continues)
        if name is not None:
            ids.append(name.token)
            end = name.last
    return ids


def _outside(names: list[Name], spans: tuple[tuple[int, int], ...]) -> list[Name]:
    """Returns the names that touch none of the spans, which are in order."""
    starts = [start for start, _ in spans]
    before = [bisect.bisect_left(starts, name.end) - 1 for name in names]  # the last span that begins before a name ends
    return [name for name, i in zip(names, before, strict=True) if i < 0 or spans[i][1] <= name.start]


def _call(tokenizer: Any, text: str, *, add_special_tokens: bool = False, **options: bool) -> list[int]:
    with CALLS:
        return list(tokenizer(str(text), add_special_tokens=add_special_tokens, verbose=False, **options)["input_ids"])


def added_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Returns the special tokens that a tokenizer adds before and after a text."""
    call = functools.partial(_call, tokenizer)
    bare, whole = call("a"), call("a", add_special_tokens=True)
    starts = [i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare]
    return (whole[: starts[0]], whole[starts[0] + len(bare) :]) if starts else ([], [])


def _begins_anew(call: Encode, name: str, token: int) -> bool:
    """Says whether a tokenizer encodes the text after a control token as the beginning of a text, perhaps with a space."""
    return call(name + "a") == [token, *call("a")]


def _plain(call: Encode, controls: ControlTokens, text: str, *, first: bool) -> list[int]:
    """Returns the token ids of a text without control tokens; `first`: as the beginning of a text."""
    bare = functools.partial(call, split_special_tokens=True)
    ids = bare(text) if first else encode_behind(bare, text)
    cuts = [name.start + 1 for name in controls.find(text) if name.end - name.start > 1] if controls.count(ids) else []
    if not cuts:
        return ids
    # The names are in the vocabulary itself, as Unigram's are, or not called special: a cut leaves none of them whole.
    parts = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    return [token for i, part in enumerate(parts) for token in _plain(call, controls, part, first=first and i == 0)]


def encode_behind(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Returns the token ids of `text` after other text, without the space that a tokenizer puts in front of every text.

    Example: SentencePiece gives "he" the token "▁he". Behind "\\n" it gives the token "he", which is returned.

    Args:
        encode: returns the token ids of a text, without special tokens.
    """
    ids = encode(text)
    if encode("\na")[-1:] == encode("a"):  # a tokenizer that puts nothing in front
        return ids
    for border in BORDERS:
        before, whole = encode(border), encode(border + text)
        if whole[: len(before)] == before:
            return whole[len(before) :]
    return ids
