"""Chat templates: renders messages as text. `api.prompts`, `chat_turns` and the commands call it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from icejax.checks.errors import InputError
from icejax.sandbox.client import SANDBOX

CHARACTERS = 2**24  # characters that a template may add to its messages
REASONING, ALSO = "reasoning", ("reasoning_content", "thinking")  # templates read an answer's thoughts by one of these names


def render(tokenizer: Any, messages: Sequence[dict[str, str]], *, now: float | None = None) -> str:
    """Returns the messages in the tokenizer's chat template, up to where the model's answer begins.

    Args:
        messages: messages with a role and a content each, and perhaps `reasoning`, which the template also gets by the names
            `reasoning_content` and `thinking`.
        now: unix time that the template takes as the current time; None: the current time.

    Raises:
        InputError: there is no template, or it refuses the messages, fails, or does not end.
    """
    template = tokenizer.chat_template
    if isinstance(template, dict):
        if "default" not in template:
            known = ", ".join(sorted(map(str, template)))
            raise InputError(f"the tokenizer's chat templates are {known}: expected one named default")
        template = template["default"]
    if not template:
        raise InputError(
            "the tokenizer has no chat template: choose a model that has one, or give icejax.generate the prompt as it is "
            "(without --chat), in the model's own form"
        )
    if not isinstance(template, str):
        raise InputError(f"the tokenizer's chat template must be text, found a {type(template).__name__}")
    messages = [message | {name: message[REASONING] for name in ALSO if REASONING in message} for message in messages]
    variables = tokenizer.special_tokens_map | dict(tools=None, documents=None, messages=messages, add_generation_prompt=True)
    now = time.time() if now is None else now
    limit = CHARACTERS + sum(len(text) for message in messages for text in message.values())
    answer = SANDBOX.ask(dict(template=template, variables=variables, now=now, most=limit), most=limit)
    if "text" not in answer:
        raise InputError(f"the tokenizer's chat template {answer['fault']}")
    return answer["text"]
