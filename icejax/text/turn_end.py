"""The tokens that end a turn: the tokenizer's eos, and the token that the chat template writes after an answer.

`api.generate.load` adds them to the eos ids of the model's config: a fine-tune may have the config of its base model.
Example: the template writes "<|im_start|>assistant\\nYes.<|im_end|>\\n<|im_start|>user": an answer ends with <|im_end|>.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from icejax.checks.errors import InputError
from icejax.text.chat_template import render
from icejax.text.reasoning import is_harmony

LOG = logging.getLogger(__name__)
ANSWER = "Yes, it is so."
TALK = (("user", "Is it so?"), ("assistant", ANSWER), ("user", "Why?"))


def end_ids(tokenizer: Any) -> tuple[int, ...]:
    """Returns the ids of the tokenizer's eos and of the chat template's end mark, where the tokenizer has them."""
    eos = getattr(tokenizer, "eos_token_id", None)  # not all tokenizers have the attribute
    ids = [token for token in (eos, _template_end(tokenizer)) if isinstance(token, int)]
    return tuple(dict.fromkeys(ids))


def _template_end(tokenizer: Any) -> int | None:
    """Returns the id of the added token that the chat template writes after an answer; None if it writes none."""
    added = getattr(tokenizer, "added_tokens_decoder", None)
    # Harmony ends every message of an answer in the same way, thoughts too.
    if not getattr(tokenizer, "chat_template", None) or not isinstance(added, Mapping) or is_harmony(tokenizer):
        return None
    try:
        talk = render(tokenizer, [dict(role=role, content=content) for role, content in TALK])
    except InputError as error:  # a chat raises it too; a prompt without the template needs none
        LOG.info("the template's end of an answer is not known: %s", error)
        return None
    behind = talk.partition(ANSWER)[2].lstrip()
    marks = {token.content: number for number, token in added.items() if token.content and behind.startswith(token.content)}
    return marks[max(marks, key=len)] if marks else None
