"""Codes of 4 or 8 bits in 32-bit words, the lowest bits first; `layouts` and `float4` call it.

Example: the word 0x76543210 holds the 4-bit numbers 0 1 2 3 4 5 6 7.
"""

from __future__ import annotations

import math

import numpy as np


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Returns the numbers of `bits` bits (4 or 8) in words i32[..., W], the lowest first: u8[..., 32 / bits W]."""
    packed = np.ascontiguousarray(words, "<i4").view(np.uint8)
    return nibbles(packed) if bits == 4 else packed.copy()


def nibbles(packed: np.ndarray) -> np.ndarray:
    """Returns the 4-bit numbers in bytes u8[..., C], the lower nibble first: u8[..., 2 C]."""
    numbers = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=numbers[..., 0])
    np.right_shift(packed, 4, out=numbers[..., 1])
    return numbers.reshape(*packed.shape[:-1], -1)


def pack(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Returns numbers u8[R, C] packed in words i32[R, W], as `unpack` reads them; unused bits of the last word are 0."""
    if missing := -numbers.shape[1] % (32 // bits):
        numbers = np.pad(numbers, ((0, 0), (0, missing)))
    if bits == 4:
        numbers = numbers[:, ::2] | numbers[:, 1::2] << 4
    return np.ascontiguousarray(numbers).view("<i4")


def signed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Returns unsigned codes or zero points less 2^(bits - 1), as int8: weights do not change if both are shifted."""
    codes -= np.uint8(2 ** (bits - 1))
    return codes.view(np.int8)


def word_count(count: int, bits: int) -> int:
    """Returns how many 32-bit words hold `count` numbers of `bits` bits."""
    return math.ceil(count * bits / 32)
