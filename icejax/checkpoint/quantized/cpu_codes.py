"""Narrow numbers in the form that a CPU multiplies fast: int8 codes, or bfloat16 numbers as uint16 bits.

On a CPU XLA widens most other narrow dtypes number by number, and a whole matrix even where it needs only a part.
`icejax.checkpoint.tensor_mapping` calls it. `Grouped` reads the result.

Example: the fp8 code 0x3C is 1.5, and becomes 0x3FC0, the bits of 1.5 in bfloat16.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from icejax.checkpoint.quantized.float4 import doubled
from icejax.checkpoint.quantized.layouts import QuantizedMatrix

HALF, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
BITS = np.arange(256, dtype=np.uint8).view(FP8).astype(HALF).view(np.uint16)  # the bfloat16 bits of each fp8 code


def for_cpu(tensor: np.ndarray | QuantizedMatrix) -> np.ndarray | QuantizedMatrix:
    """Returns a parameter in a form whose numbers a CPU widens fast (`ops.quantized.products.Grouped`); no weight changes.

    Codes and scales come by rows. int4 and e2m1 codes become int8, fp8 codes become bfloat16 bits in uint16. A bfloat16 matrix
    [..., O, I] becomes its bits uint16[..., O, 1, I] with scales of 1. Other parameters stay.

    Args:
        tensor: an array, or codes with groups first, [G, O, g].
    """
    if not isinstance(tensor, QuantizedMatrix):
        if tensor.dtype != HALF or tensor.ndim < 2:
            return tensor
        bits = tensor.view(np.uint16)[..., None, :]
        return QuantizedMatrix(bits, np.ones(bits.shape[:-1], np.float32), None)
    narrow = np.int8 if tensor.codes.dtype == ml_dtypes.int4 else tensor.codes.dtype  # one copy: rows and dtype at once
    codes = np.ascontiguousarray(tensor.codes.swapaxes(0, 1), narrow)
    scale, zero = (None if x is None else np.ascontiguousarray(x.swapaxes(0, 1)) for x in (tensor.scale, tensor.zero))
    tensor = tensor._replace(codes=codes, scale=scale, zero=zero)
    return tensor._replace(codes=BITS[codes.view(np.uint8)]) if codes.dtype == FP8 else doubled(tensor)
