"""The numbers of a GGUF tensor: floats as they are stored, codes of all types dequantised to float32 by the `gguf` package.

`icejax.checkpoint.gguf.folder` and `icejax.checkpoint.readers.gguf` call it.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from icejax.checkpoint import aligned, boxes
from icejax.checkpoint.boxes import Box
from icejax.checkpoint.gguf.metadata import Tensor
from icejax.checks.errors import InputError, input_error_from

FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
CODES = frozenset(  # the types that the package dequantises
    """Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS TQ1_0
    TQ2_0 MXFP4 NVFP4""".split()
)
PIECE = 2**18  # numbers dequantised at once: more take longer, and the package's function takes several times their memory


def read_numbers(tensor: Tensor, *, expert: int | None = None, heads: int = 0, box: Box | None = None) -> np.ndarray:
    """Returns the numbers of a tensor in its float type, or codes dequantised to float32; arguments as in `read_stored`.

    Of codes, the box may begin and end within blocks.
    """
    if tensor.type in FLOATS:
        return read_stored(tensor, expert=expert, heads=heads, box=box)
    box = boxes.whole(tensor.shape if expert is None else tensor.shape[1:]) if box is None else box
    block, columns = block_numbers(tensor.type), box[-1]
    around = (*box[:-1], slice(columns.start // block * block, -(-columns.stop // block) * block))
    rows = read_stored(tensor, expert=expert, heads=heads, box=around)
    numbers = _dequantised(rows.reshape(-1), tensor.type).reshape(boxes.sizes(around))
    return numbers if around == box else numbers[boxes.within(box, around)]


def block_numbers(kind: str) -> int:
    """Returns how many numbers a block of a type holds."""
    return GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]


def read_stored(tensor: Tensor, *, expert: int | None = None, heads: int = 0, box: Box | None = None) -> np.ndarray:
    """Returns a tensor as it is stored: numbers of its float type, or the bytes of its blocks, u8[..., bytes of a row].

    Args:
        expert: reads its matrix alone from a tensor [E, ...]; None: the whole tensor.
        heads: number of heads whose interleaved rows are put in order; 0: none.
        box: the numbers to read, in whole blocks; None: all. Where rows of heads are interleaved, the heads that it cuts are
            read whole.

    Raises:
        InputError: the file cannot be read, or has become shorter since its header was read.
    """
    shape, start, size = tensor.shape, tensor.start, tensor.size
    if expert is not None:
        size //= shape[0]
        shape, start = shape[1:], start + expert * size
    dtype = FLOATS.get(tensor.type, np.dtype(np.uint8))
    width = size // math.prod(shape[:-1]) // dtype.itemsize  # of a row, in its stored units
    head, asked = shape[0] // heads if heads else 1, slice(None)
    if box is not None and heads:
        outer = slice(box[0].start // head * head, -(-box[0].stop // head) * head)
        asked, box = slice(box[0].start - outer.start, box[0].stop - outer.start), (outer, *box[1:])
    if box is not None:
        box = (*box[:-1], slice(*(bound * width // shape[-1] for bound in (box[-1].start, box[-1].stop))))
    with input_error_from(f"{tensor.file} cannot be read"), tensor.file.open("rb", buffering=0) as stream:
        try:
            rows = boxes.read(stream, start, (*shape[:-1], width), dtype, box)
        except EOFError:
            raise InputError(f"{tensor.file} has become shorter while it was read: fetch it again") from None
    if heads:
        rows = rows.reshape(len(rows) // head, head // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)[asked]
    return rows


def _dequantised(stored: np.ndarray, kind: str) -> np.ndarray:
    """Returns the numbers f32[N] of blocks of codes u8[bytes], in pieces of `PIECE` numbers."""
    kind = GGMLQuantizationType[kind]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = stored.reshape(-1, block_bytes)
    numbers, step = aligned.empty((len(blocks), block), np.dtype(np.float32)), max(PIECE // block, 1)
    with np.errstate(all="ignore"):  # scales may be anything
        for i in range(0, len(blocks), step):
            # As one row: the package goes 16 rows at a time, several times slower.
            numbers[i : i + step] = quants.dequantize(blocks[i : i + step].reshape(1, -1), kind).reshape(-1, block)
    return numbers
