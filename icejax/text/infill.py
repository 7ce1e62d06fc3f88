"""A text between two others, by the tokens that a model was trained to fill in with. The server calls it.

Example: Qwen2.5-Coder continues "<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>" with what belongs before "): pass".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from icejax.checks.errors import InputError
from icejax.text.encode import added_tokens, encode

# Names of the tokens before the first text, before the second, and before the answer.
FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
# Tokens that models write after an answer where a new file or the padding of their training began.
ENDS = ("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>", "<fim_pad>", "<file_sep>", "▁<EOT>")
NO_INFILL = "the model has no tokens for a text between two others: leave suffix out, or serve a model that was trained for it"
SPACE = "▁"  # SentencePiece's
FIELD = "fim_tokens"  # of tokenizer_config.json, where the reader of GGUF files writes a file's own form


def infill_form(tokenizer: Any) -> tuple[int, int, int] | None:
    """Returns the tokens before the first text, before the second and before the answer; None for a model without."""
    settings = getattr(tokenizer, "init_kwargs", None)
    own = settings.get(FIELD) if isinstance(settings, Mapping) else None
    for names in FORMS if own is None else (own,):
        ids = [_token(tokenizer, name) for name in names]
        if None not in ids:
            return tuple(ids)
    return None


def infill_ends(tokenizer: Any) -> tuple[str, ...]:
    """Returns stop strings that end a text between two others, beside the model's own ends: names of tokens, and their text."""
    known = [name for name in ENDS if _token(tokenizer, name) is not None]
    return tuple(dict.fromkeys(text for name in known for text in (name, name.replace(SPACE, " "))))


def infill(tokenizer: Any, before: str, behind: str, *, parse_special: bool = False) -> list[int]:
    """Returns the token ids of a prompt whose answer belongs between two texts.

    Args:
        parse_special: whether names of control tokens in the texts are these tokens.

    Raises:
        InputError: the model has no tokens for it.
    """
    form = infill_form(tokenizer)
    if form is None:
        raise InputError(NO_INFILL)
    first, second, middle = form
    options = dict(parse_special=parse_special)
    ids = encode(tokenizer, before, **options) if before else []
    ends = encode(tokenizer, behind, continues=True, **options)
    return [*added_tokens(tokenizer)[0], first, *ids, second, *ends, middle]


def _token(tokenizer: Any, name: str) -> int | None:
    token = tokenizer.convert_tokens_to_ids(name)
    return token if token is not None and tokenizer.convert_ids_to_tokens(token) == name else None
