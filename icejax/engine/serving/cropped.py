"""Arrays without the zeros at their ends: a row's arrays have room for the longest text, and a cached prefix fills a part.

`prefix_cache` takes a row's arrays to host memory and `start` brings them back. Example: an array [2, 512, 64] whose rows from
40 on are 0 becomes its first 40 rows, [2, 40, 64].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from icejax.engine.plan import Plan
from icejax.engine.snapshot.row_arrays import array_out, arrays_in, empty_cache
from icejax.runtime.mesh import processes_of


class Cropped(NamedTuple):
    """An array without the zeros at the end of each axis.

    Attributes:
        shape: the shape of the whole array.
        part: a copy of the tokens that stay.
    """

    shape: tuple[int, ...]
    part: np.ndarray


class Shares(NamedTuple):
    """What this process's devices have of an array that several processes share.

    Attributes:
        shape, sharding: those of the whole array.
        parts: each device's share.
    """

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    parts: tuple[tuple[jax.Device, Cropped], ...]


def layers_out(layers: tuple[Any, ...], plan: Plan) -> tuple[Any, ...]:
    """Returns the arrays of a row's layers, cropped and in host memory: whole, or a process's shares of them."""
    if processes_of(plan.mesh) > 1:
        return jax.tree.map(_shares, layers)
    return jax.tree.map(lambda *x: crop(array_out(*x, plan)), layers, empty_cache(plan).layers)


def layers_in(stored: tuple[Any, ...], plan: Plan) -> tuple[Any, ...]:
    """Returns what `layers_out` has taken, on the devices."""
    if processes_of(plan.mesh) > 1:
        return jax.tree.map(_joined, stored, is_leaf=lambda x: isinstance(x, Shares))
    return arrays_in(jax.tree.map(whole, stored, is_leaf=lambda x: isinstance(x, Cropped)), plan, plan.cuts.layers)


def _shares(x: jax.Array) -> Shares:
    return Shares(x.shape, x.sharding, tuple((share.device, crop(np.asarray(share.data))) for share in x.addressable_shards))


def _joined(x: Shares) -> jax.Array:
    # No aliasing: on CPU an array over numpy's memory could not be written in place.
    shares = [jax.device_put(whole(part), device, may_alias=False) for device, part in x.parts]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shares)


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
