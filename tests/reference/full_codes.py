"""llama.cpp's and KIVI's quantised full caches in plain numpy, one row at a time: heads [K, H], attention in float64."""

from __future__ import annotations

import numpy as np

GROUP = 32


def q8_0(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the codes i8[..., C, 32] and scales f16[..., C] of `quantize_row_q8_0_ref` in ggml-quants.c."""
    x = groups(x)
    scale = np.abs(x).max(-1) / np.float32(127)
    ratio = x * inverse(scale)[..., None]
    codes = np.sign(ratio) * np.floor(np.abs(ratio.astype(np.float64)) + 0.5)  # roundf: halves away from 0
    return codes.astype(np.int8), scale.astype(np.float16)


def q4_0(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the codes i8[..., C, 32], from -8 to 7, and scales f16[..., C] of `quantize_row_q4_0_ref`."""
    x = groups(x)
    scale = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], axis=-1)[..., 0] / np.float32(-8)
    codes = np.minimum(np.trunc(x * inverse(scale)[..., None] + np.float32(8.5)), 15)
    return codes.astype(np.int8) - np.int8(8), scale.astype(np.float16)


def evenly(x: np.ndarray, bits: int) -> np.ndarray:
    """Returns numbers [..., 32] as KIVI's `quant_and_pack_kcache` stands for them, with fp16 offsets and steps."""
    least, most = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    step = (most - least) / np.float32(2**bits - 1)
    codes = np.clip(np.round((x - least) / np.where(step == 0, 1, step)), 0, 2**bits - 1)
    return codes * step.astype(np.float16).astype(np.float64) + least.astype(np.float16).astype(np.float64)


def groups(x: np.ndarray) -> np.ndarray:
    """Returns the last axis in groups of 32, the last of them filled up with its last number."""
    missing = -x.shape[-1] % GROUP
    x = np.concatenate([x, np.repeat(x[..., -1:], missing, axis=-1)], axis=-1).astype(np.float32)
    return x.reshape(*x.shape[:-1], -1, GROUP)


def inverse(scale: np.ndarray) -> np.ndarray:
    return np.where(scale == 0, 0, np.float32(1) / np.where(scale == 0, 1, scale)).astype(np.float32)


def turned(x: np.ndarray, by: int) -> np.ndarray:
    """Returns channels turned by Sylvester's matrix, `by` at a time."""
    matrix = np.ones((1, 1))
    while len(matrix) < by:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return (x.reshape(*x.shape[:-1], -1, by) @ (matrix / by**0.5)).reshape(x.shape)


def attention(q: np.ndarray, keys: list[np.ndarray], values: list[np.ndarray]) -> np.ndarray:
    """Returns the output [N, Hv] of queries [N, H] over keys [K, H] and values [K, Hv] of tokens, in float64."""
    k, v = np.stack(keys).astype(np.float64), np.stack(values).astype(np.float64)
    out = []
    for head, query in enumerate(q.astype(np.float64)):
        kv = head * k.shape[1] // len(q)
        scores = k[:, kv] @ query * q.shape[1] ** -0.5
        weights = np.exp(scores - scores.max())
        out.append(weights @ v[:, kv] / weights.sum())
    return np.stack(out)


class LlamaCpp:
    """llama.cpp's cache: every key and value is rotated, and coded at once.

    Args:
        encode: `q8_0` or `q4_0`.
        turn: channels of the rotation of keys and of values; None: no rotation.
    """

    def __init__(self, encode, turn: tuple[int, int] | None, k: np.ndarray, v: np.ndarray) -> None:
        self.encode, self.turn, self.keys, self.values = encode, turn, [], []
        self.extend(k, v)

    def extend(self, k: np.ndarray, v: np.ndarray) -> None:
        for key, value in zip(k, v, strict=True):
            if self.turn:
                key, value = turned(key, self.turn[0]), turned(value, self.turn[1])
            for kept, x in ((self.keys, key), (self.values, value)):
                codes, scale = self.encode(x)
                decoded = codes * scale[..., None].astype(np.float64)
                kept.append(decoded.reshape(len(x), -1)[:, : x.shape[-1]])

    def attend(self, q: np.ndarray) -> np.ndarray:
        if not self.turn:
            return attention(q, self.keys, self.values)
        return turned(attention(turned(q, self.turn[0]), self.keys, self.values), self.turn[1])


class Kivi:
    """KIVI's cache as `models/llama_kivi.py` keeps it: coded and full lists, which a step moves tokens between."""

    def __init__(self, bits: int, residual: int, k: np.ndarray, v: np.ndarray) -> None:
        self.bits, self.residual = bits, residual
        coded = len(k) - len(k) % residual
        self.coded_keys, self.full_keys = self.by_channel(k[:coded]), list(k[coded:])
        coded = max(len(v) - residual, 0)
        self.coded_values, self.full_values = [self.by_token(x) for x in v[:coded]], list(v[coded:])

    def by_channel(self, keys) -> list[np.ndarray]:
        runs = [np.stack(keys[i : i + GROUP], axis=-1) for i in range(0, len(keys), GROUP)]  # K, H, 32
        return [token for run in runs for token in np.moveaxis(evenly(run, self.bits), -1, 0)]

    def by_token(self, value: np.ndarray) -> np.ndarray:
        return evenly(groups(value), self.bits).reshape(len(value), -1)[:, : value.shape[-1]]

    def step(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Appends a token and returns its attention, which comes before any new codes."""
        self.full_keys.append(k)
        self.full_values.append(v)
        out = attention(q, self.coded_keys + self.full_keys, self.coded_values + self.full_values)
        if len(self.full_keys) == self.residual:
            self.coded_keys, self.full_keys = self.coded_keys + self.by_channel(self.full_keys), []
        if len(self.full_values) > self.residual:
            self.coded_values.append(self.by_token(self.full_values.pop(0)))
        return out

    def extend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Appends a text, which attends to itself exactly, and returns the attention of its last token."""
        out = attention(q[-1], self.coded_keys + self.full_keys + list(k), self.coded_values + self.full_values + list(v))
        self.full_keys, self.full_values = self.full_keys + list(k), self.full_values + list(v)
        coded = len(self.full_keys) - len(self.full_keys) % self.residual
        self.coded_keys, self.full_keys = self.coded_keys + self.by_channel(self.full_keys[:coded]), self.full_keys[coded:]
        coded = max(len(self.full_values) - self.residual, 0)
        self.coded_values += [self.by_token(x) for x in self.full_values[:coded]]
        self.full_values = self.full_values[coded:]
        return out
