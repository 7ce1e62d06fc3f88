"""Arrays that JAX on a CPU takes over without a copy: their memory begins at a multiple of 64 bytes.

The readers and `icejax.checkpoint.tensor_mapping` make tensors in them. They must not change once JAX has them.
"""

from __future__ import annotations

import math

import numpy as np

ALIGNMENT = 64  # bytes, as XLA:CPU requires of its arrays


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an aligned array without values."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns an array in another dtype, row after row in memory; the array itself if it is so already."""
    if x.dtype == dtype and x.flags.c_contiguous:
        return x
    result = empty(x.shape, dtype)
    np.copyto(result, x, casting="unsafe")
    return result
