"""Tells which names of control tokens in a chat are the template's, and which are text of messages.

`chat_template.render` calls it. A chat is rendered once, and up to three times:

1. with marks around names (`chat_marks`): a name that the template has is the template's, a name that a message has is text;
2. without marks, if a message has names: marks may change a text, if the template counts characters;
3. with the letter x for all characters of messages, if a name comes from neither: no text becomes a name there.

Example of 3: a template writes '<|' + role + '|>' and then the message in lower case. With the message "a" renderings 1 and 3
have the names <|user|>, <|assistant|>, which are the template's. With the message "<|END|>" only rendering 1 has <|end|>.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Set
from typing import Any, Protocol

from icejax.checks.errors import InputError, quoted
from icejax.text.chat_marks import Marked, Marks, Origin
from icejax.text.chat_text import ChatText
from icejax.text.control_tokens import ControlTokens

KINDS = ("role", "type")  # keys whose values are no free text: templates compare them, and refuse those that they do not know


class Write(Protocol):
    """Renders a chat; `values`: the variables that icejax sets; `marks`: those to put around names in the template."""

    def __call__(self, values: dict[str, Any], chat: dict[str, Any], marks: Marks | None = None) -> str: ...


def told_apart(write: Write, marks: Marks, template: str, values: dict[str, Any], chat: dict[str, Any]) -> ChatText:
    """Returns a rendered chat with the spans in which names of control tokens are text.

    Args:
        values: the template's variables that icejax sets, such as special tokens.
        chat: the messages, tools and arguments of a user.

    Raises:
        InputError: the template refuses or fails, or it makes control tokens of a message's text, and which is not clear.
    """
    marked_values, marked_chat = marks.put(values, in_template=True), marks.put(chat)
    marked = marks.read(write(marked_values, marked_chat, marks))
    own = {Origin.TEMPLATE}
    if marked_chat != chat:
        try:
            text = write(values, chat)
        except InputError:  # the template refuses names that it knows
            text = None
        own |= {Origin.CUT} if text == marked.text else set()  # it counts no characters, so that it cut nothing off
        marked = _without_marks(marked, text, marks.controls)
    unclear = _names(marked, {Origin.CUT, Origin.PARTS} - own)
    if unclear:
        try:
            lettered = marks.read(write(marked_values, marks.put(_lettered_chat(chat, template)), marks))
        except InputError as error:
            raise InputError(
                f"it is not clear whether {quoted(unclear)} are control tokens of the chat template or text of a message, as "
                f"with other text {error}: change the messages or the template"
            ) from None
        own = _own(marked, lettered)
    spans = ((name.start, name.end) for name, origin in zip(*marked[1:], strict=True) if origin not in own)
    return ChatText(marked.text, spans)


def _without_marks(marked: Marked, text: str | None, controls: ControlTokens) -> Marked:
    """Returns the marked text as `text`, the one without marks, if both have the same names."""
    names = [] if text is None else controls.find(text)
    if text is None or [name.token for name in names] != [name.token for name in marked.names]:
        return marked
    return marked._replace(text=text, names=names)


def _names(marked: Marked, origins: Set[Origin]) -> list[str]:
    return [marked.text[name.start : name.end] for name, origin in zip(*marked[1:], strict=True) if origin in origins]


def _own(marked: Marked, lettered: Marked) -> Set[Origin]:
    """Returns the origins whose names are the template's: those that `lettered` has, which has no text of messages.

    Raises:
        InputError: some names of parts are the template's, and others come from messages.
    """
    parts = {Origin.PARTS} & {*lettered.origins}
    own = {Origin.TEMPLATE} | parts
    expected = _names(lettered, own)
    if _names(marked, own | {Origin.CUT}) == expected:
        return own | {Origin.CUT}
    # The template may decide by the messages' text which names it writes.
    if not parts or _names(marked, parts) == _names(lettered, parts):
        return own
    pairs = itertools.zip_longest(_names(marked, own), expected)
    name, other = (quoted(name) if name else "no more" for name in next(pair for pair in pairs if pair[0] != pair[1]))
    raise InputError(
        "the chat template makes a control token of a message's text, or leaves one out: "
        f"expected {other}, as with other text, found {name}: change the message or the template"
    )


def _lettered_chat(chat: dict[str, Any], template: str) -> dict[str, Any]:
    """Returns a chat with the letter x for the characters of its texts; an argument of one word is a choice, and stays."""
    words = {name: value for name, value in chat.items() if isinstance(value, str) and value.isidentifier()}
    return _lettered(chat, template) | words


def _lettered(value: Any, template: str) -> Any:
    if isinstance(value, str):
        return re.sub(r"\S+", lambda match: "x" * len(match[0]), value)
    if isinstance(value, list):
        return [_lettered(item, template) for item in value]
    if isinstance(value, dict):  # keys that the template does not have are text too
        return {
            key if key in template else "x" * i: item if key in KINDS else _lettered(item, template)
            for i, (key, item) in enumerate(value.items(), 1)
        }
    return value
