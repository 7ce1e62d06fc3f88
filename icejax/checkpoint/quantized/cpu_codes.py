"""How narrow numbers stand on a CPU, where XLA widens most of them one by one, and all of a matrix wherever it needs a part."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from icejax.checkpoint.quantized.float4 import doubled
from icejax.checkpoint.quantized.layouts import QuantizedMatrix

HALF, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
BITS = np.arange(256, dtype=np.uint8).view(FP8).astype(HALF).view(np.uint16)  # of every number of fp8 in bfloat16


def for_cpu(tensor: np.ndarray | QuantizedMatrix) -> np.ndarray | QuantizedMatrix:
    """Returns a parameter in a form whose numbers a CPU widens fast (`ops.quantized.products.Grouped`): none of them changes.

    Codes of four bits take a byte, those of fp8 the two of a bfloat16, and matrices in bfloat16 become their bits.
    """
    if not isinstance(tensor, QuantizedMatrix):
        if tensor.dtype != HALF or tensor.ndim < 2:
            return tensor
        bits = tensor.view(np.uint16)[..., None, :, :]
        return QuantizedMatrix(bits, np.ones(bits.shape[:-1], np.float32), None)
    if tensor.codes.dtype == FP8:
        return tensor._replace(codes=BITS[tensor.codes.view(np.uint8)])
    return tensor._replace(codes=tensor.codes.astype(np.int8)) if tensor.codes.dtype == ml_dtypes.int4 else doubled(tensor)
