"""The rules of the text before an answer that a grammar governs: thoughts, and the headers of harmony messages."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from icejax.text.reasoning import CHANNEL, CONSTRAIN, END, MESSAGE, START, Harmony, Marked, added_tokens, splitter

FREE = "/(?s:.*)/"
SOME_SPACES = "/[ \\n]{0,4}/"


def before_answer(tokenizer: Any, prompt: Sequence[int], *, in_message: bool) -> str:
    """Returns the rule, in llguidance's form of Lark.

    Args:
        prompt: the prompt's token ids; its end may have begun a thought.
        in_message: whether harmony's answer is the text of a message of the channel `final`; False: the answer writes its own
            header.
    """
    kind, tokens = splitter(tokenizer, prompt), added_tokens(tokenizer)
    if isinstance(kind, Marked):
        if kind.closing in tokens:
            thoughts = f"thoughts: {FREE} <[{tokens[kind.closing]}]> {SOME_SPACES}"
        else:
            closing = re.escape(kind.closing).replace("/", "\\/")
            thoughts = f"thoughts: closed {SOME_SPACES}\nclosed[lazy]: /(?s:.*){closing}/"
        opening = f"<[{tokens[kind.opening]}]>" if kind.opening in tokens else json.dumps(kind.opening)
        return ("thoughts" if kind.apart else f"({opening} thoughts)?") + f"\n{thoughts}"
    if not isinstance(kind, Harmony) or (kind.begun == "text" and in_message):
        return '""'
    start, channel, constrain, message, end = (f"<[{tokens[name]}]>" for name in (START, CHANNEL, CONSTRAIN, MESSAGE, END))
    header = f'{channel} "final" (" "? {constrain} "json")? {message}' if in_message else '""'
    begun = {"header": '""', "nothing": f'({start} "assistant")?'}.get(kind.begun, f'{FREE} {end} {start} "assistant"')
    return f'{begun} thoughts* {header}\nthoughts: {channel} "analysis" {message} {FREE} {end} {start} "assistant"'
