"""Prompts to tokens: chat templates, and what a prompt must be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from icejax.errors import InputError
from icejax.models import CausalLM
from icejax.templates import render


def chat(tokenizer: Any, prompt: str, *, system: str | None = None) -> str:
    """Returns `prompt` as a user's turn in the tokenizer's chat template; InputError if it has none, refuses or fails."""
    if not prompt:
        raise InputError("a prompt is empty: expected some text")
    return render(tokenizer, [*opening(system), {"role": "user", "content": prompt}])


def opening(system: str | None) -> list[dict[str, str]]:
    """Returns the messages that a chat begins with."""
    return [] if system is None else [{"role": "system", "content": system}]


def encode(
    model: CausalLM, tokenizer: Any, prompts: Sequence[str], *, special_tokens: bool = True, context_length: int | None = None
) -> list[list[int]]:
    """Returns the token ids of prompts.

    Raises:
        InputError: a prompt is empty, no Unicode text, or leaves no room for a token in `context_length` (the model's own
            by default); or the tokenizer is of another model.
    """
    context_length = model.config.context_length if context_length is None else context_length
    if context_length < 1:
        raise InputError(f"context_length must be at least 1, got {context_length}")
    if not prompts:
        raise InputError("no prompt: expected at least one")
    encoded = []
    for row, prompt in enumerate(prompts):
        if not _is_unicode(prompt):
            raise InputError(f"prompt {row + 1} is not UTF-8 text: convert it first")
        ids = tokenizer(prompt, add_special_tokens=special_tokens, verbose=False)["input_ids"] if prompt else []
        if not ids:
            raise InputError(f"prompt {row + 1} is empty: expected some text")
        if len(ids) >= context_length:
            raise InputError(
                f"prompt {row + 1} has {len(ids)} tokens and the context holds {context_length}, the answer included: "
                "shorten it, or raise --context-length if the model can take it"
            )
        if max(ids) >= model.config.vocab_size:
            raise InputError(
                f"prompt {row + 1} has token {max(ids)} and the model knows {model.config.vocab_size}: "
                "the tokenizer is not the model's"
            )
        encoded.append(ids)
    return encoded


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of another encoding, as the shell passes them on
        return False
    return True
