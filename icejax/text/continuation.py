"""Token ids of a text that follows other text. `api.prompts` calls it for the later texts of a session."""

from __future__ import annotations

from collections.abc import Callable

BORDERS = ("\n", "|")  # texts that rarely share a token with the text behind them


def encode_behind(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Returns the token ids of `text` behind other text, without the space that a tokenizer puts in front of every text.

    Example: SentencePiece gives "he" the token "▁he". Behind "\\n" it gives the token "he", which is returned.

    Args:
        encode: returns the token ids of a text, without special tokens.
    """
    ids = encode(text)
    if encode("\na")[-1:] == encode("a"):  # a tokenizer that puts nothing in front
        return ids
    for border in BORDERS:
        before, whole = encode(border), encode(border + text)
        if whole[: len(before)] == before:
            return whole[len(before) :]
    return ids
