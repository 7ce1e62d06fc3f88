"""Arrays without the zeros at their ends: a row's arrays have room for the longest text, and a cached prefix fills a part.

`prefix_cache` crops arrays and `start` makes them whole. Example: an array [2, 512, 64] whose rows from 40 on are 0 becomes its
first 40 rows, [2, 40, 64].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Cropped(NamedTuple):
    """An array without the zeros at the end of each axis.

    Attributes:
        shape: the shape of the whole array.
        part: a copy of what is left.
    """

    shape: tuple[int, ...]
    part: np.ndarray


def crop(x: np.ndarray) -> Cropped:
    """Returns an array without the zeros at the end of each axis."""
    bits = x.view(np.uint16) if x.dtype.itemsize == 2 else x  # to compare bf16 takes NumPy four times as long
    nonzero, ends = bits != 0, []
    for axis in range(x.ndim):
        places = np.flatnonzero(nonzero.any(tuple(other for other in range(x.ndim) if other != axis)))
        ends.append(slice(0, int(places[-1]) + 1 if len(places) else 0))
    return Cropped(x.shape, np.array(x[tuple(ends)], copy=True))


def whole(x: Cropped) -> np.ndarray:
    """Returns the whole array."""
    array = np.zeros(x.shape, x.part.dtype)
    array[tuple(slice(0, size) for size in x.part.shape)] = x.part
    return array
