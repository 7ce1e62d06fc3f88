"""One model over several devices: each has a share of the KV heads, and runs the programs of one device on its share.

`on_mesh` runs a function of arrays in `jax.shard_map`, so that models and cache policies see the arrays of one device alone. No
other module has collectives. They are sums after the embedding and after the output and down projections (`hidden_total`), sums
of squares in norms over all heads and of a step's counters (`total`), a gather of a prompt's hidden states before the query,
key, value and MLP projections and before the logits (`every_token`), and a gather of the logits (`gathered`).

Example: 8 KV heads and 32 query heads on 4 devices. Device 1 has the KV heads 2 and 3, the query heads 8 to 15 that read them,
a quarter of the inner channels of every MLP, and a quarter of the pool, which holds the pages of these KV heads. Of a prompt's
hidden states it has those of the tokens 1, 5, 9, ... (arXiv 2205.05198, section 4.2.2, with tokens in turn). On 16 devices,
`heads=8,tokens=2`, devices 2 and 3 both have KV head 1; of its query heads device 2 has 4 and 5, device 3 has 6 and 7.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from icejax.checks.errors import InputError, quoted
from icejax.checks.numbers import integer
from icejax.runtime import devices, processes

AXIS = "heads"
FORM = rf"{AXIS}=(?P<heads>[0-9]{{1,9}})(,tokens=(?P<tokens>[0-9]{{1,9}}))?"  # of `--mesh`
WHOLE = PartitionSpec()  # of an array that every device has whole, or that differs from device to device and never leaves them
MULTIPLE = 16  # divides the padded length of every prompt and text, and the tokens of every unit of a prefill


def cut(axis: int) -> PartitionSpec:
    """Returns the cut of an array along one axis."""
    return PartitionSpec(*(None,) * axis, AXIS)


@dataclass(frozen=True)
class Mesh:
    """The first devices of the platform, in order; of several processes each has equally many, which only it can read.

    Attributes:
        heads: number of parts of the KV heads.
        tokens: number of devices, in a row, that have the same part. They share its query heads and a prompt's tokens.
    """

    heads: int
    tokens: int = 1

    def __str__(self) -> str:
        return f"heads={self.heads}" + (f",tokens={self.tokens}" if self.tokens > 1 else "")

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.heads * self.tokens

    @property
    def devices(self) -> jax.sharding.Mesh:
        """The mesh as JAX takes it."""
        return _mesh(self.size)

    def sharding(self, array_cut: PartitionSpec = WHOLE, *, on_host: bool = False) -> NamedSharding:
        """Returns the sharding of an array with a cut, on the devices or in host memory that programs read."""
        return devices.cut_sharding(self.devices, array_cut, on_host=on_host)

    def zeros_on_host(self, shape: tuple[int, ...], dtype: np.dtype, array_cut: PartitionSpec) -> jax.Array:
        """Returns an array of zeros in host memory, of which no more than a device's share is made at a time."""
        sharding = self.sharding(array_cut, on_host=True)
        part = np.zeros(sharding.shard_shape(shape), dtype)
        return jax.make_array_from_callback(shape, sharding, lambda _: part)

    def copies(self, x: np.ndarray, array_cut: PartitionSpec, count: int) -> jax.Array:
        """Returns the array of which `count` devices in a row have the same part of `x` as their share."""
        shape, parts = list(x.shape), [x] * (self.size // count)
        if array_cut:
            axis = len(array_cut) - 1
            shape[axis], parts = shape[axis] * count, np.split(x, len(parts), axis)
        shares = [jax.device_put(parts[i // count], x, may_alias=False) for i, x in enumerate(self.devices.devices.flat)]
        return jax.make_array_from_single_device_arrays(tuple(shape), self.sharding(array_cut), shares)


@functools.cache
def _mesh(count: int) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.asarray(devices.first(count)), (AXIS,))


def read_mesh(mesh: str | int | None) -> Mesh | None:
    """Returns the mesh of `--mesh`, or of a number of devices; None for one device.

    Raises:
        InputError: it is neither form, JAX has fewer devices, or the processes would not have equally many.
    """
    if mesh is None:
        return None
    given = re.fullmatch(FORM, mesh if isinstance(mesh, str) else f"{AXIS}={mesh}")
    if given is None:
        raise InputError(
            f"mesh must be {AXIS}=N, for N devices that share the KV heads, or {AXIS}=N,tokens=M, for M devices to each KV "
            f"head, got {quoted(mesh)}"
        )
    numbers = {name: integer(f"mesh {name}", int(number or 1), most=2**16) for name, number in given.groupdict().items()}
    made, there = Mesh(**numbers), len(devices.first())
    if made.size > there:
        cpu = devices.platform() == "cpu"
        advice = f"set XLA_FLAGS=--xla_force_host_platform_device_count={made.size}" if cpu else "use fewer"
        raise InputError(f"mesh {made} needs {made.size} devices and JAX finds {there}: {advice}")
    if made.size % processes.count():
        raise InputError(
            f"mesh {made} is over {processes.count()} processes: its devices must be a multiple of {processes.count()}"
        )
    return None if made.size == 1 else made


def size(mesh: Mesh | None) -> int:
    """Returns the number of devices."""
    return 1 if mesh is None else mesh.size


def holders(mesh: Mesh | None, *, latent: bool) -> int:
    """Returns the number of devices, in a row, that hold copies of the same KV heads, or of a latent layer's one key."""
    if mesh is None:
        return 1
    return mesh.size if latent else mesh.tokens


def processes_of(mesh: Mesh | None) -> int:
    """Returns the number of processes that share the devices."""
    return 1 if mesh is None else processes.count()


def check_one_process(mesh: Mesh | None, what: str) -> None:
    """Raises InputError if several processes share the devices."""
    if processes_of(mesh) > 1:
        raise InputError(f"{what} runs in one process: leave its group")


def home(mesh: Mesh | None, cuts: Any = WHOLE) -> Any:
    """Returns where arrays with these cuts go, for `jax.device_put`: the device, or the shardings over the mesh."""
    return devices.device() if mesh is None else jax.tree.map(mesh.sharding, cuts)


def placed(mesh: Mesh | None, arrays: Any, cuts: Any = WHOLE) -> Any:
    """Returns arrays at `home`; random keys too, which `jax.device_put` takes to the devices of one process alone."""
    if processes_of(mesh) == 1:
        return jax.device_put(arrays, home(mesh, cuts))
    return jax.jit(_same, out_shardings=(home(mesh, cuts),))(arrays)[0]


def fetched(mesh: Mesh | None, x: jax.Array) -> np.ndarray:
    """Returns an array that devices share; of several processes each gets all of it, over its devices."""
    return np.asarray(x if processes_of(mesh) == 1 else placed(mesh, x))


def _same(*arrays: Any) -> Any:
    return arrays


def total(mesh: Mesh | None, x: jax.Array) -> jax.Array:
    """Returns the sum over the devices of a mesh, inside `on_mesh`; `x` on one device."""
    if mesh is None:
        return x
    with jax.named_scope("total"):
        return lax.psum(x, AXIS)


def once(mesh: Mesh | None, x: jax.Array) -> jax.Array:
    """Returns what every device has whole so that `total` counts it once: zeros on all devices but the first."""
    return x if mesh is None else jnp.where(place() == 0, x, jnp.zeros((), x.dtype))


def stream_parts(mesh: Mesh | None) -> int:
    """Returns the number of devices that share the tokens of a prompt's hidden states; 1: each device has all tokens."""
    return 1 if mesh is None or MULTIPLE % mesh.size else mesh.size


def stream_cut(mesh: Mesh | None) -> PartitionSpec:
    """Returns the cut of a prompt's hidden states [B, T / n, n D], of whose rows of n tokens each device has one token.

    Reshaped to [B, T, D] they are in the order of the tokens. n is `stream_parts`.
    """
    return WHOLE if stream_parts(mesh) == 1 else cut(2)


def hidden_total(mesh: Mesh | None, x: jax.Array) -> jax.Array:
    """Returns the sum over the devices of hidden states [B, T, D], inside `on_mesh`: of a prompt each device's own tokens.

    One token, of a decode step, is whole on every device. Several are [B, T / n, D], with n of `stream_parts`.
    """
    parts = stream_parts(mesh)
    if parts == 1 or x.shape[1] == 1:
        return total(mesh, x)
    with jax.named_scope("total"):
        return lax.psum_scatter(_in_rows(x, parts), AXIS, scatter_dimension=2, tiled=True)


def every_token(x: jax.Array, count: int) -> jax.Array:
    """Returns [B, count, D] of all tokens from hidden states of a device's own, or from all, inside `on_mesh`."""
    if x.shape[1] == count:
        return x
    with jax.named_scope("gathered"):
        return lax.all_gather(x, AXIS, axis=2, tiled=True).reshape(len(x), count, -1)


def own_tokens(x: jax.Array, count: int) -> jax.Array:
    """Returns [B, count, D] of a device's own tokens, or of all, from [B, T, D] of all tokens, inside `on_mesh`."""
    if x.shape[1] == count:
        return x
    return lax.dynamic_slice_in_dim(_in_rows(x, x.shape[1] // count), place() * x.shape[2], x.shape[2], axis=2)


def _in_rows(x: jax.Array, parts: int) -> jax.Array:
    return x.reshape(len(x), -1, parts * x.shape[2])


def gathered(mesh: Mesh | None, x: jax.Array, count: int) -> jax.Array:
    """Returns the first `count` entries of the last axis, of which each device of a mesh has a part; inside `on_mesh`."""
    if mesh is None:
        return x
    with jax.named_scope("gathered"):
        return lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True)[..., :count]


def place() -> jax.Array:
    """Returns the place of a device in its mesh, i32, inside `on_mesh`."""
    return lax.axis_index(AXIS)


def rounded_up(count: int, mesh: Mesh | None) -> int:
    """Returns the least number of rows, at least `count`, that the devices divide."""
    return -(-count // size(mesh)) * size(mesh)


def part(mesh: Mesh | None, x: jax.Array, count: int) -> jax.Array:
    """Returns the device's `count` elements of an array that every device has whole, inside `on_mesh`.

    Where the array has fewer than the devices together, as many devices in a row have the same ones.
    """
    if mesh is None:
        return x
    return lax.dynamic_slice_in_dim(x, place() // (mesh.size * count // len(x)) * count, count)


def on_mesh(mesh: Mesh | None, function: Callable, arrays: tuple, cuts: tuple, results: Any = None) -> Any:
    """Returns `function(*arrays)`, computed by every device of the mesh from its shares; on one device from the arrays.

    Args:
        function: takes shares and returns shares.
        arrays: pytrees of arrays, under jit.
        cuts: how the arrays are cut; a cut counts for the whole subtree at its place.
        results: cuts of what the function returns. None: an array is cut along the axis in which a device's share differs from
            what the function returns for the whole arrays, so it must not call `total`.
    """
    if mesh is None:
        return function(*arrays)
    results = result_cuts(mesh, function, arrays, cuts) if results is None else results
    return jax.shard_map(function, mesh=mesh.devices, in_specs=cuts, out_specs=results, check_vma=False)(*arrays)


def result_cuts(mesh: Mesh, function: Callable, arrays: tuple, cuts: tuple) -> Any:
    """Returns the cuts of what `function` returns, by its shapes for the whole arrays and for the shares of one device."""
    shapes = jax.eval_shape(lambda *x: x, *arrays)
    shares = jax.tree.map(functools.partial(_share, mesh.size), jax.tree.broadcast(cuts, shapes), shapes)
    return cuts_between(jax.eval_shape(function, *shapes), jax.eval_shape(function, *shares))


def cuts_between(wholes: Any, shares: Any) -> Any:
    """Returns the cuts that make the `shares` of one device from whole arrays, from the shapes of both."""
    return jax.tree.map(_cut_between, wholes, shares)


def _cut_between(whole: jax.ShapeDtypeStruct, share: jax.ShapeDtypeStruct) -> PartitionSpec:
    axes = [axis for axis, sizes in enumerate(zip(whole.shape, share.shape, strict=True)) if sizes[0] != sizes[1]]
    if len(axes) > 1:
        raise ValueError(f"a share of an array is cut along one axis, got {share.shape} of {whole.shape}")
    return cut(axes[0]) if axes else WHOLE


def _share(count: int, array_cut: PartitionSpec, whole: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    parts = (*array_cut, *(None,) * (len(whole.shape) - len(array_cut)))
    shape = (size if part is None else size // count for size, part in zip(whole.shape, parts, strict=True))
    return jax.ShapeDtypeStruct(tuple(shape), whole.dtype)
