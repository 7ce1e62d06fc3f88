"""Which form of tool calls a model writes: its tokenizer's added tokens and its chat template show it."""

from __future__ import annotations

from typing import Any

from icejax.serving.tools.form import Form
from icejax.serving.tools.harmony import Harmony
from icejax.serving.tools.hermes import OPENING as HERMES
from icejax.serving.tools.hermes import Hermes
from icejax.serving.tools.llama import PYTHON, Llama
from icejax.serving.tools.mistral import ARGUMENTS, Mistral
from icejax.serving.tools.mistral import OPENING as MISTRAL
from icejax.serving.tools.qwen_coder import QwenCoder
from icejax.text.reasoning import added_tokens, is_harmony

FUNCTION, PARAMETER = "<function=", "<parameter="


def form_of(tokenizer: Any) -> Form | None:
    """Returns the form of a model's tool calls; None if its chat template has none, or one that is not known."""
    templates = str(getattr(tokenizer, "chat_template", None) or "")  # of several, all
    tokens = added_tokens(tokenizer)
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    fields = dict(tokens=tokens, specials={number: token.content for number, token in added.items() if token.special})
    if is_harmony(tokenizer):
        return Harmony(**fields)
    if "tools" not in templates or (FUNCTION in templates and not (HERMES in templates and PARAMETER in templates)):
        return None
    if FUNCTION in templates:
        return QwenCoder(**fields)
    if MISTRAL in templates:
        return Mistral(named=ARGUMENTS in templates, **fields)
    if HERMES in templates:
        return Hermes(**fields)
    if "ipython" in templates or PYTHON in templates:
        return Llama(**fields)
    return None
