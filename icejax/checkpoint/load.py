"""A checkpoint folder -> a model on the device, tensor by tensor."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from icejax import memory
from icejax.checkpoint import huggingface
from icejax.checkpoint.float4 import FLOAT4
from icejax.checkpoint.folder import resolve
from icejax.checkpoint.layouts import Codes
from icejax.checkpoint.tensors import Tensors, opened
from icejax.config import ModelConfig
from icejax.errors import InputError
from icejax.models import CausalLM, family
from icejax.models.fields import Fields
from icejax.models.latent import BY_HEAD
from icejax.ops.quantized import Grouped

DTYPES = ("float32", "bfloat16", "float16")  # what a model may be in
TWICE = (2 * np.arange(16, dtype=np.uint8).view(FLOAT4).astype(np.float32)).astype(np.int8)  # a number of e2m1, by its bits
LOG = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]  # key just done, how many done, how many in all


def read_config(folder: Path) -> ModelConfig:
    """Returns the config of a checkpoint folder; InputError for a field that is missing, unknown or unsupported."""
    raw = huggingface.read_json(folder / "config.json")
    config = family(raw).read_config(raw)
    generation = folder / "generation_config.json"
    if generation.exists():
        more = Fields(huggingface.read_json(generation), generation.name).token_ids("eos_token_id")
        config = dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + more)))
    return config


def abstract(config: ModelConfig, dtype: str) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct], jax.tree_util.PyTreeDef]:
    """Returns a model without arrays: its graph, its parameters by Hugging Face key in leaf order, its leaves' tree."""
    graph, state = nnx.split(nnx.eval_shape(lambda: CausalLM(config, dtype=dtype)))
    paths, tree = jax.tree_util.tree_flatten_with_path(state)
    named = {".".join(str(part.key) for part in path[:-1]): leaf for path, leaf in paths}
    return graph, named, tree


def load_model(
    model: str | Path,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    codes: bool | None = None,
    progress: Progress | None = None,
) -> CausalLM:
    """Returns the model of a Hugging Face folder, an icejax folder or a hub id, on the default device.

    Tensors go one by one to `dtype` and the device, so host memory holds little beside the model itself.

    Args:
        dtype: float32, bfloat16 or float16; None: float32 on CPU, whose bf16 products are slow, else the checkpoint's.
        quantize: int8, fp8 or int4, to which the matrices of layers are rounded as they are read: int4 in groups of 128
            columns, the others by rows. Embedding, norms, routers and head stay as they are. None: nothing is rounded.
        codes: whether quantised matrices stay codes, instead of becoming `dtype`; None: unless on CPU, where products with
            codes are slower.
        progress: called after every tensor.

    Raises:
        InputError: the folder, its config or its tensors are not what they should be; the message tells all faults.
    """
    folder = resolve(model)
    config = read_config(folder)
    dtype = dtype or ("float32" if memory.platform() == "cpu" else config.dtype)
    if dtype not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    graph, parameters, tree = abstract(config, dtype)
    found = opened(folder, config, {key: p.shape for key, p in parameters.items()}, quantize=quantize)
    keep = memory.platform() != "cpu" if codes is None else codes
    coded = (stack for name, stack in found.stacks.items() if keep and not name.endswith(BY_HEAD) and found.alike(stack))
    kept = {key for stack in coded for key in stack.keys}
    why = "of experts in several forms, or taken head by head" if keep else "products with codes are slower on a CPU"
    _tell(found, kept, why=why)

    leaves = []
    for done, (key, stack) in enumerate(found.stacks.items(), start=1):
        tensor = stack.join(map(found.read, stack.keys), codes=stack.keys[0] in kept)
        leaves.append(_grouped(tensor) if isinstance(tensor, Codes) else _to_device(tensor, parameters[key].dtype))
        del tensor  # or it would be there beside the next one
        if progress is not None:
            progress(key, done, len(parameters))
    return nnx.merge(graph, jax.tree.unflatten(tree, leaves))


def _tell(found: Tensors, kept: set[str], *, why: str) -> None:
    """Tells how many quantised matrices stay codes, and why the others do not."""
    coded = {key for key, source in found.sources.items() if source.layout is not None}
    if found.quantised is not None:
        others = len(coded - kept)
        rest = f", {others} are dequantised as they are read ({why})" if others else ""
        LOG.info("of %d matrices %s %d stay codes%s", len(coded), found.quantised, len(coded & kept), rest)


def _grouped(matrix: Codes) -> Grouped:
    if matrix.codes.dtype == FLOAT4 and matrix.codes.ndim == 2:  # or XLA:GPU would make a copy of it in a wider dtype
        matrix = matrix._replace(codes=TWICE[matrix.codes.view(np.uint8)], scale=matrix.scale * np.float32(0.5))
    codes = matrix.codes.reshape(*matrix.scale.shape, -1).swapaxes(-3, -2)
    return Grouped(
        codes=_to_device(codes, jnp.dtype("int4") if matrix.bits == 4 else codes.dtype),
        scale=_to_device(matrix.scale.swapaxes(-2, -1), matrix.scale.dtype),
        zero=None if matrix.zero is None else _to_device(matrix.zero.swapaxes(-2, -1), matrix.zero.dtype),
    )


def _to_device(tensor: np.ndarray, dtype: np.dtype) -> jax.Array:
    # Waited for, so that one tensor at a time is on its way: each is there twice until it has arrived.
    return jax.block_until_ready(jax.device_put(tensor.astype(dtype, copy=False)))
