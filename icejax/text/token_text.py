"""The text and the bytes of a single token. `engine.logprobs` calls it for every reported token."""

from __future__ import annotations

import re
from typing import Any

from icejax.text.detokenize import UNFINISHED, decoded

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's sign for a space
BYTE = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's name of a byte
PRINTABLE = {*range(33, 127), *range(161, 256)} - {173}
OTHERS = sorted({*range(256)} - PRINTABLE)
# Byte-level tokenizers write a printable byte as its own character, and the n-th other byte as the character 256 + n.
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(OTHERS)}


def token_text(tokenizer: Any, token: int) -> tuple[str, bytes]:
    """Returns the text that a token adds to a text, and its bytes. The text of an incomplete character is `UNFINISHED`.

    Examples: SentencePiece's token "▁he" gives " he", although a decoder drops the space that begins a text. The first byte of
    "é" gives `UNFINISHED` and b"\\xc3".

    Raises:
        InputError: the tokenizer fails.
    """
    text = decoded(tokenizer, [token], clean_up_tokenization_spaces=False)
    vocabulary = getattr(tokenizer, "convert_ids_to_tokens", None)  # not all tokenizers have the method
    name = (vocabulary(token) if vocabulary is not None else None) or text
    if name.startswith(SPACE) and not text.startswith(SPACE):
        text = name.replace(SPACE, " ")
    if UNFINISHED not in text:
        return text, text.encode()
    if match := BYTE.fullmatch(name):
        return text, bytes([int(match[1], 16)])
    return text, bytes(map(BYTE_OF.get, name)) if BYTE_OF.keys() >= {*name} else text.encode()
