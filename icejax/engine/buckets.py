"""Sizes that prompts and caches are padded to: few sizes, because each one compiles its own programs.

`plan`, `prefill`, `extend` and `nonfinite` call this. Sizes are in tokens.
"""

from __future__ import annotations

SHORTEST = 256  # tokens
SHORTEST_TEXT = 16  # tokens; fewer would read all weights for hardly less work
STEP = 8192  # tokens between the sizes of long prompts, where doubling would cost memory
LONG_MULTIPLE = 1024  # tokens; divides the room for new tokens after a long prompt


def bucket(tokens: int) -> int:
    """Returns the size that `tokens` are padded to: 256, 384, 512, 768, ... to 16,384, and multiples of 8,192 above.

    Examples: 1 -> 256, 257 -> 384, 385 -> 512, 1,000 -> 1,024, 16,384 -> 16,384, 16,385 -> 24,576.
    """
    if tokens > 2 * STEP:
        return -(-tokens // STEP) * STEP
    size = SHORTEST
    while size < tokens:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


def text_bucket(tokens: int) -> int:
    """Returns the size that a text of `tokens` after a cache is padded to: 16, 32, 64, 128, and the sizes of `bucket` above.

    A short question after a long document should cost what it computes, so these sizes are finer than those of prompts.
    """
    return bucket(tokens) if tokens > SHORTEST // 2 else max(SHORTEST_TEXT, 1 << (tokens - 1).bit_length())


def room_for(new_tokens: int, *, prompt: int, heads: int | None = None) -> int:
    """Returns the number of slots for new tokens after a prompt that is padded to `prompt` tokens.

    Behind 16,384 tokens and more it is a multiple of 1,024: XLA:GPU splits products over that many tokens into parts, and
    copies all values in every step if the parts do not divide the tokens. With one of `heads`, a device's KV heads, there are
    more parts, and the multiple is 2,048; with one or two, behind 262,144 tokens and more, it is 4,096. A session opens on any
    mesh, so for its sizes `heads` is None, and the multiple 1,024.

    Examples: 256 new tokens get 256 slots after 1,024 prompt tokens, and 1,024 slots after 16,384.
    """
    new, multiple = bucket(new_tokens), LONG_MULTIPLE
    if heads is not None:
        multiple *= 4 if heads <= 2 and prompt >= 32 * STEP else 2 if heads == 1 else 1
    return new if prompt < 2 * STEP else -(-new // multiple) * multiple
