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
import logging
import re
from typing import Any, Protocol

from icejax.checks.errors import InputError, quoted
from icejax.text.chat_marks import Marked, Marks, Origin
from icejax.text.chat_text import ChatText
from icejax.text.control_tokens import ControlTokens

LOG = logging.getLogger(__name__)
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
    if marked_chat != chat:
        try:
            text = write(values, chat)
        except InputError:  # the template refuses names that it knows
            text = None
        marked = _compared(marked, text, marks.controls)
    if Origin.PARTS in marked.origins:
        try:
            lettered = marks.read(write(marked_values, marks.put(_lettered_chat(chat, template)), marks))
        except InputError as error:
            names = quoted(_names(marked, Origin.PARTS))
            raise InputError(
                f"it is not clear whether {names} are control tokens of the chat template or text of a message, as with other "
                f"text {error}: change the messages or the template"
            ) from None
        marked = _replaced(marked, Origin.PARTS, _origin_of_parts(marked, lettered))
    spans = ((name.start, name.end) for name, origin in zip(*marked[1:], strict=True) if origin is Origin.MESSAGE)
    return ChatText(marked.text, spans)


def _compared(marked: Marked, text: str | None, controls: ControlTokens) -> Marked:
    """Returns the marked text as `text`, the one without marks, if both have the same names.

    If the texts differ, the template counts characters and may have cut a name.
    """
    marked = _replaced(marked, Origin.CUT, Origin.TEMPLATE if marked.text == text else Origin.MESSAGE)
    names = [] if text is None else controls.find(text)
    if text is None or [name.token for name in names] != [name.token for name in marked.names]:
        return marked
    return marked._replace(text=text, names=names)


def _replaced(marked: Marked, old: Origin, new: Origin) -> Marked:
    return marked._replace(origins=[new if origin is old else origin for origin in marked.origins])


def _names(marked: Marked, *origins: Origin) -> list[str]:
    return [marked.text[name.start : name.end] for name, origin in zip(*marked[1:], strict=True) if origin in origins]


def _origin_of_parts(marked: Marked, lettered: Marked) -> Origin:
    """Returns where the names of parts come from: the template if `lettered`, which has no text of messages, has them too.

    Raises:
        InputError: some are the template's, and others come from messages.
    """
    parts, expected = (_names(chat, Origin.PARTS) for chat in (marked, lettered))
    all_names, all_expected = (_names(chat, Origin.PARTS, Origin.TEMPLATE) for chat in (marked, lettered))
    if parts == expected or all_names == all_expected:
        return Origin.TEMPLATE
    if not expected:
        LOG.info("the chat template makes names of control tokens of a message's text; they stay text: %s", quoted(parts))
        return Origin.MESSAGE
    pairs = itertools.zip_longest(all_names, all_expected, fillvalue="")
    name, other = next(pair for pair in pairs if pair[0] != pair[1])
    raise InputError(
        "the chat template makes a control token of a message's text, or leaves one out: expected "
        f"{quoted(other) if other else 'no more'}, as with other text, found {quoted(name) if name else 'no more'}: "
        "change the message or the template"
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
