"""Chat templates: renders messages as text. `api.prompts`, `chat_turns` and the commands call it."""

from __future__ import annotations

import functools
import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from icejax.checks.errors import InputError, quoted
from icejax.sandbox.client import SANDBOX
from icejax.text.chat_marks import Marks
from icejax.text.chat_messages import Message
from icejax.text.chat_origin import told_apart
from icejax.text.chat_text import ChatText
from icejax.text.control_tokens import ControlTokens

LOG = logging.getLogger(__name__)
CHARACTERS = 2**24  # characters that a template may add to its messages
REASONING, ALSO = "reasoning", ("reasoning_content", "thinking")  # templates read an answer's thoughts by one of these names
PROBE = "Is it so?"  # the text of a message that says whether a template reads content parts


def render(
    tokenizer: Any, messages: Sequence[Message], variables: Mapping[str, Any] | None = None, *, now: float | None = None
) -> ChatText:
    """Returns the messages in the tokenizer's chat template, up to where the model's answer begins.

    If the last message is the assistant's, the text ends with its content, which the answer continues. Content parts reach a
    template that reads them; for any other template their texts are joined by line breaks.

    Args:
        messages: messages with a role and a content each, and perhaps `reasoning`, which the template also gets by the names
            `reasoning_content` and `thinking`.
        variables: the template's other variables, from `chat_messages.template_variables`.
        now: unix time that the template takes as the current time; None: the current time.

    Raises:
        InputError: there is no template, or it refuses the messages, fails, or does not end.
    """
    variables = {} if variables is None else variables
    template = _template(tokenizer, with_tools=bool(variables.get("tools")))
    for name in variables:
        _tell_unused(template, name)
    messages = [message | {name: message[REASONING] for name in ALSO if REASONING in message} for message in messages]
    ask = functools.partial(_rendered, template, now=time.time() if now is None else now)
    values = tokenizer.special_tokens_map | dict(tools=None, documents=None) | variables
    if any(isinstance(message.get("content"), list) for message in messages) and not _reads_parts(ask, values):
        messages = [_joined(message) for message in messages]
    continues = bool(messages) and messages[-1].get("role") == "assistant"
    chat = dict(variables, messages=messages)
    marks = Marks(ControlTokens(tokenizer), template + json.dumps([values, chat], ensure_ascii=False))

    def write(values: dict[str, Any], chat: dict[str, Any], template_marks: Marks | None = None) -> str:
        if continues:
            chat = chat | {"messages": [*chat["messages"][:-1], _continued(chat["messages"][-1], marks.end + " ")]}
        answer = ask(values | chat | dict(add_generation_prompt=not continues), marks=template_marks)
        if "text" not in answer:
            raise InputError(f"the tokenizer's chat template {marks.read(answer['fault']).text}")
        return _cut(answer["text"], marks.end) if continues else answer["text"]

    return told_apart(write, marks, template, values, chat)


def _template(tokenizer: Any, *, with_tools: bool) -> str:
    """Returns the tokenizer's chat template: of several the default one, or the one for tools."""
    template = getattr(tokenizer, "chat_template", None)  # not all tokenizers have the attribute
    if isinstance(template, dict):
        name = "tool_use" if with_tools and "tool_use" in template else "default"
        if name not in template:
            known = ", ".join(sorted(map(str, template)))
            raise InputError(f"the tokenizer's chat templates are {known}: expected one named default")
        template = template[name]
    if not template:
        raise InputError(
            "the tokenizer has no chat template: choose a model that has one, or give icejax.generate the prompt as it is "
            "(without --chat), in the model's own form"
        )
    if not isinstance(template, str):
        raise InputError(f"the tokenizer's chat template must be text, found a {type(template).__name__}")
    return template


@functools.lru_cache(maxsize=64)  # told once
def _tell_unused(template: str, name: str) -> None:
    if name not in template:
        LOG.warning("the chat template has no variable %s: it has no effect", quoted(name))


def _rendered(template: str, variables: Mapping[str, Any], *, now: float, marks: Marks | None = None) -> dict[str, Any]:
    limit = CHARACTERS + len(json.dumps(variables))
    request = dict(template=template, variables=variables, now=now, most=limit)
    if marks is not None:
        request |= dict(marks=marks.around, names=marks.names(template))
    return SANDBOX.ask(request, most=limit)


def _reads_parts(ask: Any, values: Mapping[str, Any]) -> bool:
    """Says whether a template writes the text of a content part, and not the part as an object."""
    message = {"role": "user", "content": [{"type": "text", "text": PROBE}]}
    text = ask(values | dict(messages=[message], add_generation_prompt=True)).get("text", "")
    return re.search(r"(?<!['\"])" + re.escape(PROBE), text) is not None


def _joined(message: Message) -> Message:
    content = message.get("content")
    return message | {"content": "\n".join(part["text"] for part in content)} if isinstance(content, list) else message


def _continued(message: Message, end: str) -> Message:
    """Returns the message that the answer continues with `end` after its text."""
    content = message.get("content")
    if content is None:
        raise InputError("the last message is the assistant's and has no content: expected a text that the answer continues")
    if isinstance(content, list):
        return message | {"content": [*content[:-1], content[-1] | {"text": content[-1]["text"] + end}]}
    return message | {"content": content + end}


def _cut(text: str, end: str) -> str:
    """Returns a rendered text up to the end of the message to continue; without spaces there if the template drops them."""
    before, mark, behind = text.rpartition(end)
    if not mark:
        raise InputError("the chat template leaves the last message out, which is the assistant's and would be continued")
    return before if behind.startswith(" ") else before.rstrip()
