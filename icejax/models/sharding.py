"""How a model is cut for a mesh: which axis of each weight, which share of its config, and which models can be cut.

`q`, `k`, `v`, `gate` and `up` are cut by output channels, `o` and `down` by input channels, so that a device's products are
those of its own heads and inner channels, and a sum over the devices ends each half of a layer. The matrices of every expert
are cut likewise. All other weights are whole on every device: embedding, output head, norms, routers, and the biases behind the
sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from icejax.checks.errors import InputError
from icejax.config import ModelConfig
from icejax.models.parts.experts import ExpertStack
from icejax.models.parts.linear import Linear
from icejax.ops.quantized.products import Grouped
from icejax.runtime.mesh import AXIS, WHOLE, Mesh, cut

BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_INPUT = ("o_proj", "down_proj")


def weight_cut(key: str) -> PartitionSpec:
    """Returns the cut of a parameter, by its Hugging Face key."""
    module, name = ("", *key.split("."))[-2:]
    first = 1 if ".experts." in key else 0  # a parameter holds the matrices of all experts
    if module in BY_OUTPUT or name == "sinks":
        return cut(first)
    return cut(first + 1) if module in BY_INPUT and name == "weight" else WHOLE


def weight_cuts(key: str, weight: Any) -> Any:
    """Returns the cuts of a parameter's arrays: of the parameter, or of the codes, scales and zeros of a quantised one."""
    if not isinstance(weight, Grouped):
        return weight_cut(key)
    dense_cut, first = weight_cut(key), weight.codes.ndim - 3
    rows, columns = (first, first + 1) if weight.by_row else (first + 1, first)
    if dense_cut == WHOLE:
        return jax.tree.map(lambda _: WHOLE, weight)
    if dense_cut == cut(first):
        return jax.tree.map(lambda _: cut(rows), weight)
    if weight.scale.shape[columns] > 1:
        return jax.tree.map(lambda _: cut(columns), weight)
    return replace(jax.tree.map(lambda _: WHOLE, weight), codes=cut(first + 2))  # every device has the scale of a whole row


def put(key: str, weight: Any, mesh: Mesh) -> Any:
    """Returns a parameter, an array or a `Grouped` of NumPy's, on the devices of a mesh.

    Raises:
        InputError: groups of a quantised matrix's columns would be cut.
    """
    cuts = weight_cuts(key, weight)
    for x, array_cut in zip(jax.tree.leaves(weight), jax.tree.leaves(cuts), strict=True):
        for size, part in zip(x.shape, array_cut, strict=False):
            if part is not None and size % mesh.heads:
                raise InputError(
                    f"mesh {AXIS}={mesh.heads} does not divide the {size} groups of columns of {key}: use fewer devices"
                )
    return jax.block_until_ready(jax.tree.map(lambda x, array_cut: mesh.put(x, array_cut), weight, cuts))


def module_cuts(module: Any) -> Any:
    """Returns the cuts of the weights of a module, or of its state, in its structure."""
    options = dict(is_leaf=lambda x: isinstance(x, Grouped))
    return jax.tree_util.tree_map_with_path(lambda path, weight: weight_cuts(_key(path), weight), module, **options)


def _key(path: Sequence[Any]) -> str:
    return ".".join(str(getattr(part, "name", getattr(part, "key", ""))) for part in path[:-1])  # the last is the array


def share(config: ModelConfig, mesh: Mesh | None) -> ModelConfig:
    """Returns the config of what one device of a mesh has: fewer heads of the same size."""
    if mesh is None:
        return config
    sliding = config.sliding_key_value_heads
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // mesh.heads,
        num_key_value_heads=config.num_key_value_heads // mesh.heads,
        sliding_key_value_heads=None if sliding is None else sliding // mesh.heads,
    )


def check_mesh(config: ModelConfig, mesh: Mesh | None) -> None:
    """Raises InputError if a model cannot be cut for a mesh."""
    if mesh is None:
        return
    kinds = {
        "experts beside an MLP": config.experts is not None and config.experts.beside,
        "biases of experts": config.experts is not None and config.experts.form.biased,
        "latent attention": config.latent is not None,
        "norms over all heads": config.qk_norm == "all",
        "LongRoPE": config.short_context is not None,
    }
    for kind, present in kinds.items():
        if present:
            raise InputError(f"a model with {kind}, as this {config.model_type}, runs on one device: leave mesh out")
    sizes = (*(layer.kv_heads for layer in config.layers), *_inner_sizes(config))
    fitting = [count for count in range(1, min(sizes) + 1) if all(size % count == 0 for size in sizes)]
    if mesh.heads not in fitting:
        heads = " and ".join(map(str, sorted({layer.kv_heads for layer in config.layers})))
        listed, inner = ", ".join(map(str, fitting)), " and ".join(map(str, _inner_sizes(config)))
        raise InputError(
            f"mesh {AXIS}={mesh.heads} does not divide the model's {heads} KV heads and its MLPs' {inner} channels: "
            f"N must be one of {listed}"
        )


def _inner_sizes(config: ModelConfig) -> tuple[int, ...]:
    """Returns the inner sizes of the MLPs of all layers."""
    mixtures = [layer.experts for layer in config.layers if layer.experts is not None]
    sizes = {size for mixture in mixtures for size in (mixture.size, mixture.shared) if size}
    if len(mixtures) < len(config.layers):
        sizes.add(config.intermediate_size)
    return tuple(sorted(sizes))


def spread(layers: Iterable[nnx.Module], mesh: Mesh | None) -> None:
    """Makes decoder layers those of a mesh: modules whose input channels are cut then sum over its devices."""
    for layer in layers:
        layer.mesh = mesh
        for path, module in nnx.iter_modules(layer):
            if path and path[-1] in (*BY_INPUT, "experts") and isinstance(module, Linear | ExpertStack):
                module.summed_over = mesh


def check_one_device(mesh: Mesh | None, what: str) -> None:
    """Raises InputError, which begins with `what`, if there is a mesh."""
    if mesh is not None:
        raise InputError(f"{what} runs on one device: leave mesh out")
