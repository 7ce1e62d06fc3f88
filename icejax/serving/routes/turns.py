"""The messages of agents as chat templates take them; `/v1/responses` and `/v1/messages` call it.

Codex and Claude Code send several messages of the user one after another, and system messages in the middle of a conversation.
Many templates refuse both.
"""

from __future__ import annotations

import weakref
from typing import Any

from icejax.api.prompts import chat
from icejax.checks.errors import InputError
from icejax.text.chat_messages import Message

BETWEEN = "\n\n"  # two messages of the user
PROBE = "a later word"
_WRITES_LATE: weakref.WeakKeyDictionary[Any, dict[str, bool]] = weakref.WeakKeyDictionary()  # tokenizer -> template -> answer


def turns(tokenizer: Any, messages: list[Message]) -> list[Message]:
    """Returns messages of which no two of the user follow one another: such are one.

    A system message after another message stays one where the chat template writes it. Else it is the user's.
    """
    is_late = [message.get("role") == "system" and bool(i) for i, message in enumerate(messages)]
    if any(is_late) and not _writes_late_system(tokenizer):
        messages = [message | {"role": "user"} if late else message for message, late in zip(messages, is_late, strict=True)]
    joined: list[Message] = []
    for message in messages:
        if message.get("role") == "user" and joined and joined[-1].get("role") == "user":
            joined[-1] = joined[-1] | {"content": _both(joined[-1].get("content"), message.get("content"))}
        else:
            joined.append(message)
    return joined


def _both(first: Any, second: Any) -> Any:
    """Returns two contents as one, in parts if one of them has parts; the template refuses anything else."""
    if isinstance(first, str) and isinstance(second, str):
        return first + BETWEEN + second
    return [*_parts(first), *_parts(second)]


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _writes_late_system(tokenizer: Any) -> bool:
    """Says whether the chat template writes a system message in the middle of a conversation; each template is tried once."""
    known, template = _WRITES_LATE.setdefault(tokenizer, {}), str(tokenizer.chat_template)
    if template not in known:
        said = [("user", "a"), ("assistant", "b"), ("system", PROBE), ("user", "c")]
        try:
            known[template] = PROBE in chat(tokenizer, [{"role": role, "content": content} for role, content in said])
        except InputError:
            known[template] = False
    return known[template]
