"""How a model is cut for a mesh: which axis of each weight, which share of its config, and which models can be cut.

`q`, `k`, `v`, `gate` and `up` are cut by output channels, `o` and `down` by input channels, so that a device's products are
those of its own heads and inner channels, and a sum over the devices ends each half of a layer. All other weights are whole on
every device: embedding, output head, norms, and the biases behind the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from icejax.checks.errors import InputError
from icejax.config import ModelConfig
from icejax.ops.quantized.products import Grouped
from icejax.runtime.mesh import AXIS, WHOLE, Mesh, cut

BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_INPUT = ("o_proj", "down_proj")


def weight_cut(key: str) -> PartitionSpec:
    """Returns the cut of a parameter, by its Hugging Face key."""
    *_, module, name = key.split(".")
    if module in BY_OUTPUT or name == "sinks":
        return cut(0)
    return cut(1) if module in BY_INPUT and name == "weight" else WHOLE


def weight_cuts(key: str, weight: Any) -> Any:
    """Returns the cuts of a parameter's arrays: of the parameter, or of the codes, scales and zeros of a quantised one."""
    if not isinstance(weight, Grouped):
        return weight_cut(key)
    whole_cut, groups = weight_cut(key), weight.scale.shape[1 if weight.by_row else 0]
    if whole_cut == WHOLE:
        return jax.tree.map(lambda _: WHOLE, weight)
    rows, columns = (0, 1) if weight.by_row else (1, 0)
    if whole_cut == cut(0):
        return jax.tree.map(lambda _: cut(rows), weight)
    if groups > 1:
        return jax.tree.map(lambda _: cut(columns), weight)
    return replace(jax.tree.map(lambda _: WHOLE, weight), codes=cut(2))  # one scale for a whole row, which every device has


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
    return jax.block_until_ready(jax.tree.map(lambda x, array_cut: jax.device_put(x, mesh.sharding(array_cut)), weight, cuts))


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
        "experts": config.experts is not None,
        "latent attention": config.latent is not None,
        "norms over all heads": config.qk_norm == "all",
        "LongRoPE": config.short_context is not None,
    }
    for kind, present in kinds.items():
        if present:
            raise InputError(f"a model with {kind}, as this {config.model_type}, runs on one device: leave mesh out")
    sizes = (*(layer.kv_heads for layer in config.layers), config.intermediate_size)
    fitting = [count for count in range(1, min(sizes) + 1) if all(size % count == 0 for size in sizes)]
    if mesh.heads not in fitting:
        heads = " and ".join(map(str, sorted({layer.kv_heads for layer in config.layers})))
        listed = ", ".join(map(str, fitting))
        raise InputError(
            f"mesh {AXIS}={mesh.heads} does not divide the model's {heads} KV heads and its MLP's {config.intermediate_size} "
            f"channels: N must be one of {listed}"
        )


def check_one_device(mesh: Mesh | None, what: str) -> None:
    """Raises InputError, which begins with `what`, if there is a mesh."""
    if mesh is not None:
        raise InputError(f"{what} runs on one device: leave mesh out")
