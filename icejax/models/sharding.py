"""How a model is cut for a mesh: which axis of each weight, which share of its config, and which models can be cut.

`q`, `k`, `v`, `gate` and `up` are cut by output channels, `o` and `down` by input channels, so that a device's products are
those of its own heads and inner channels, and a sum over the devices ends each half of a layer. The matrices of every expert
are cut likewise, and the projections of latent attention that have heads; embedding and output head are cut by rows of the
vocabulary. With `tokens=M`, M devices hold the same rows of `k` and `v`. All other weights are whole on every device: norms,
routers, and the biases after the sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from icejax.checks.errors import InputError
from icejax.config import ModelConfig
from icejax.models.parts.experts import ExpertStack
from icejax.models.parts.linear import Linear
from icejax.ops.quantized.products import Grouped
from icejax.runtime.mesh import AXIS, WHOLE, Mesh, cut

BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj", "embed_tokens", "lm_head")
BY_INPUT = ("o_proj", "down_proj")
OF_KV_HEADS = ("k_proj", "v_proj")


def weight_cut(key: str) -> PartitionSpec:
    """Returns the cut of a parameter, by its Hugging Face key."""
    module, name = ("", *key.split("."))[-2:]
    first = 1 if ".experts." in key else 0  # a parameter holds the matrices of all experts
    if module in BY_OUTPUT or name in ("sinks", "head"):  # `head` as in `Ends`
        return cut(first)
    return cut(first + 1) if module in BY_INPUT and name == "weight" else WHOLE


def cut_axis(key: str) -> int | None:
    """Returns the axis along which a parameter is cut, by its Hugging Face key; None: every device has it whole."""
    array_cut = weight_cut(key)
    return len(array_cut) - 1 if array_cut else None


def weight_cuts(key: str, weight: Any, *, groups: int | None = None) -> Any:
    """Returns the cuts of a parameter's arrays: of the parameter, or of the codes, scales and zeros of a quantised one.

    `groups` is the number of groups of a whole row, where `weight` is a device's share; None: `weight` is whole.
    """
    if not isinstance(weight, Grouped):
        return weight_cut(key)
    dense_cut, first = weight_cut(key), weight.codes.ndim - 3
    rows, columns = (first, first + 1) if weight.by_row else (first + 1, first)
    if dense_cut == WHOLE:
        return jax.tree.map(lambda _: WHOLE, weight)
    if dense_cut == cut(first):
        return jax.tree.map(lambda _: cut(rows), weight)
    if (weight.scale.shape[columns] if groups is None else groups) > 1:
        return jax.tree.map(lambda _: cut(columns), weight)
    return replace(jax.tree.map(lambda _: WHOLE, weight), codes=cut(first + 2))  # every device has the scale of a whole row


def check_groups(key: str, groups: int, mesh: Mesh) -> None:
    """Raises InputError if a mesh would cut groups of a quantised matrix's columns, of which each row has `groups`."""
    if key.split(".")[-2] in BY_INPUT and groups > 1 and groups % mesh.size:
        raise InputError(f"mesh {mesh} does not divide the {groups} groups of columns of {key}: use fewer devices")


def box(key: str, shape: tuple[int, ...], mesh: Mesh, device: int) -> tuple[slice, ...]:
    """Returns the part of a parameter that a device of a mesh has, by its place in the mesh."""
    axis = cut_axis(key)
    return tuple(_stretch(key, size, mesh, device) if i == axis else slice(0, size) for i, size in enumerate(shape))


def _stretch(key: str, size: int, mesh: Mesh, device: int) -> slice:
    copies = mesh.tokens if key.split(".")[-2] in OF_KV_HEADS else 1
    step, place = -(-size // (mesh.size // copies)), device // copies  # the vocabulary may have fewer rows for the last devices
    return slice(min(step * place, size), min(step * (place + 1), size))


def share_of(key: str, weight: Any, mesh: Mesh, device: int) -> Any:
    """Returns a device's share of a whole parameter, an array or a `Grouped` of NumPy's."""

    def of(x: np.ndarray, array_cut: PartitionSpec) -> np.ndarray:
        axis = len(array_cut) - 1
        return x[(*(slice(None),) * axis, _stretch(key, x.shape[axis], mesh, device))] if array_cut else x

    return jax.tree.map(of, weight, weight_cuts(key, weight))


def put(key: str, shape: tuple[int, ...], share: Callable[[int], Any], mesh: Mesh, *, groups: int = 1) -> Any:
    """Returns a parameter on the devices of a mesh; of those of this process, one share at a time is in host memory.

    Args:
        shape: shape of the parameter as it is stored: zeros fill a vocabulary that the devices do not divide.
        share: returns what a device has, an array or a `Grouped` of NumPy's, by its place in the mesh.
        groups: the number of groups of a whole row of a `Grouped`.
    """
    placed = []
    for i, device in enumerate(mesh.devices.devices.flat):
        if device.process_index == jax.process_index():
            weight = share(i)
            cuts = weight_cuts(key, weight, groups=groups)
            first, own = ([axis.stop - axis.start for axis in box(key, shape, mesh, j)] for j in (0, i))
            weight = jax.tree.map(functools.partial(_filled, sum(first) - sum(own)), weight, cuts)
            placed.append(jax.block_until_ready(jax.device_put(weight, device)))

    def joined(array_cut: PartitionSpec, *parts: jax.Array) -> jax.Array:
        sizes = [size * mesh.size if axis == len(array_cut) - 1 else size for axis, size in enumerate(parts[0].shape)]
        return jax.make_array_from_single_device_arrays(tuple(sizes), mesh.sharding(array_cut), list(parts))

    return jax.tree.map(joined, cuts, *placed)


def _filled(missing: int, x: np.ndarray, array_cut: PartitionSpec) -> np.ndarray:
    """Returns a share with `missing` zeros more along the axis that is cut."""
    if not missing or not array_cut:
        return x
    axis = len(array_cut) - 1
    return np.concatenate([x, np.zeros((*x.shape[:axis], missing, *x.shape[axis + 1 :]), x.dtype)], axis=axis)


def module_cuts(module: Any) -> Any:
    """Returns the cuts of the weights of a module, or of its state, in its structure."""
    options = dict(is_leaf=lambda x: isinstance(x, Grouped))
    return jax.tree_util.tree_map_with_path(lambda path, weight: weight_cuts(_key(path), weight), module, **options)


def _key(path: Sequence[Any]) -> str:
    return ".".join(str(getattr(part, "name", getattr(part, "key", ""))) for part in path[:-1])  # the last is the array


def weights_of(model: nnx.Module, mesh: Mesh | None) -> Iterator[tuple[str, jax.Array]]:
    """Yields the arrays of a model by path, of KV heads that several devices have without the copies."""
    state = nnx.state(model)
    cuts = jax.tree.leaves(module_cuts(state), is_leaf=lambda x: isinstance(x, PartitionSpec))
    for (path, x), array_cut in zip(jax.tree.leaves_with_path(state), cuts, strict=True):
        key = jax.tree_util.keystr(path, simple=True, separator=".")
        copied = mesh is not None and mesh.tokens > 1 and not set(OF_KV_HEADS).isdisjoint(key.split("."))
        if copied and array_cut:
            before, after = x.shape[: len(array_cut) - 1], x.shape[len(array_cut) :]
            parts = x.reshape(*before, mesh.heads, mesh.tokens, -1, *after)
            x = lax.index_in_dim(parts, 0, len(array_cut), keepdims=False).reshape(*before, -1, *after)
        yield key, x


def share(config: ModelConfig, mesh: Mesh | None) -> ModelConfig:
    """Returns the config of what one device of a mesh has: fewer heads of the same size; of latent attention its one key."""
    if mesh is None:
        return config
    sliding = config.sliding_key_value_heads
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // mesh.size,
        num_key_value_heads=1 if config.latent is not None else config.num_key_value_heads // mesh.heads,
        sliding_key_value_heads=None if sliding is None else sliding // mesh.heads,
    )


def check_mesh(config: ModelConfig, mesh: Mesh | None) -> None:
    """Raises InputError if a model cannot be cut for a mesh."""
    if mesh is None:
        return
    kind, counts = "KV", sorted({layer.kv_heads for layer in config.layers})
    if config.latent is not None:  # every device has the one key
        kind, counts = "query", [config.num_attention_heads]
    fitting = _divisors(*counts, *_inner_sizes(config))
    if mesh.heads not in fitting:
        heads, inner = (" and ".join(map(str, x)) for x in (counts, _inner_sizes(config)))
        listed = ", ".join(map(str, fitting))
        raise InputError(
            f"mesh {AXIS}={mesh.heads} does not divide the model's {heads} {kind} heads and its MLPs' {inner} channels: "
            f"N must be one of {listed}"
        )
    if mesh.tokens > 1:
        _check_tokens(config, mesh, counts)


def _check_tokens(config: ModelConfig, mesh: Mesh, counts: list[int]) -> None:
    """Raises InputError if several devices cannot share a KV head; `counts` are the numbers of KV heads of layers."""
    if config.latent is not None or len(counts) > 1:
        why = "latent attention has no KV heads" if config.latent is not None else "its layers have unlike numbers of KV heads"
        raise InputError(f"mesh {mesh}: tokens=M is not for this model, because {why}: leave tokens out")
    if counts != [mesh.heads]:
        raise InputError(
            f"mesh {mesh}: tokens=M is for one KV head to a device, and the model has {counts[0]}: give heads={counts[0]}"
        )
    readers = config.num_attention_heads // mesh.heads
    fitting = _divisors(readers, *(size // mesh.heads for size in _inner_sizes(config)))
    if mesh.tokens not in fitting:
        inner = " and ".join(map(str, _inner_sizes(config)))
        raise InputError(
            f"mesh {mesh} does not divide the {readers} query heads of a KV head and the MLPs' {inner} channels: "
            f"M must be one of {', '.join(map(str, fitting))}"
        )


def _divisors(*sizes: int) -> list[int]:
    return [count for count in range(1, min(sizes) + 1) if all(size % count == 0 for size in sizes)]


def _inner_sizes(config: ModelConfig) -> tuple[int, ...]:
    """Returns the inner sizes of the MLPs of all layers."""
    mixtures = [layer.experts for layer in config.layers if layer.experts is not None]
    sizes = {size for mixture in mixtures for size in (mixture.size, mixture.shared) if size}
    if any(layer.experts is None or layer.experts.beside for layer in config.layers):
        sizes.add(config.intermediate_size)
    return tuple(sorted(sizes))


def spread(layers: Iterable[nnx.Module], mesh: Mesh | None) -> None:
    """Makes decoder layers those of a mesh: modules that read cut channels then sum over its devices."""
    for layer in layers:
        layer.mesh = mesh
        for path, module in nnx.iter_modules(layer):
            name = path[-1] if path else None
            if name in (*BY_INPUT, "experts") and isinstance(module, Linear | ExpertStack):
                module.summed_over = mesh
            elif name in ("q_norm", "k_norm") and layer.self_attn.config.qk_norm == "all":
                module.summed_over = mesh


def check_one_device(mesh: Mesh | None, what: str) -> None:
    """Raises InputError, which begins with `what`, if there is a mesh."""
    if mesh is not None:
        raise InputError(f"{what} runs on one device: leave mesh out")
