"""Sizes that prompts and caches are padded to: few, because every program is compiled for its sizes."""

from __future__ import annotations

SHORTEST = 256  # tokens
STEP = 8192  # tokens between the sizes of long prompts, where doubling would cost memory
LONG_MULTIPLE = 1024  # tokens


def bucket(tokens: int) -> int:
    """Returns the size that `tokens` are padded to: 256, 384, 512, 768, ... to 16,384, and multiples of 8,192 above."""
    if tokens > 2 * STEP:
        return -(-tokens // STEP) * STEP
    size = SHORTEST
    while size < tokens:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


def room_for(new_tokens: int, *, prompt: int) -> int:
    """Returns the slots for new tokens behind a prompt that is padded to `prompt`.

    Behind a long prompt they are multiples of 1,024: XLA:GPU splits its products over so many tokens in parts, and copies the
    values of all in every step if they do not divide.
    """
    new = bucket(new_tokens)
    return new if prompt < 2 * STEP else -(-new // LONG_MULTIPLE) * LONG_MULTIPLE
