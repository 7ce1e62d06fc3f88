"""A checkpoint folder -> a model: every key consumed once, every parameter filled once, all faults told together."""

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
from icejax.checkpoint import formats, huggingface, orbax
from icejax.checkpoint.folder import ORBAX, resolve
from icejax.checkpoint.formats import EMBEDDING, HEAD
from icejax.checkpoint.layouts import FLOATS, Codes, Part
from icejax.checkpoint.stacked import Stack, stacks
from icejax.config import ModelConfig
from icejax.errors import InputError, listed
from icejax.models import CausalLM, family
from icejax.models.fields import Fields
from icejax.ops.quantized import Grouped

LOG = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]  # key just done, how many done, how many in all


def read_config(folder: Path) -> ModelConfig:
    """Returns the config of a checkpoint folder; InputError for a field that is missing, unknown or unsupported."""
    raw = huggingface.read_json(folder / "config.json")
    config = family(raw).read_config(raw)
    if formats.method(raw) is not None and (folder / ORBAX).is_dir():
        raise InputError(f"{folder} is an icejax folder, whose weights are not quantised: expected no quantization_config")
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


def made_of(folder: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Stack]:
    """Returns where every parameter stands in a Hugging Face folder whose config.json `folder` has."""
    return stacks(shapes, family(huggingface.read_json(folder / "config.json")).renamed)


def load_model(
    model: str | Path, *, dtype: str | None = None, codes: bool | None = None, progress: Progress | None = None
) -> CausalLM:
    """Returns the model of a Hugging Face folder, an icejax folder or a hub id, on the default device.

    Tensors go one by one to `dtype` and the device, so host memory holds little beside the model itself.

    Args:
        dtype: float32, bfloat16 or float16; None: float32 on CPU, whose bf16 products are slow, else the checkpoint's.
        codes: whether quantised matrices stay codes, instead of becoming `dtype`; None: unless on CPU, where products with
            codes are slower.
        progress: called after every tensor.

    Raises:
        InputError: the folder, its config or its tensors are not what they should be; the message tells all faults.
    """
    folder = resolve(model)
    config = read_config(folder)
    dtype = dtype or ("float32" if memory.platform() == "cpu" else config.dtype)
    if dtype not in orbax.DTYPES:
        raise InputError(f"dtype must be one of {', '.join(orbax.DTYPES)}, got {dtype!r}")
    graph, parameters, tree = abstract(config, dtype)
    if (folder / ORBAX).is_dir():
        dtypes = {key: p.dtype for key, p in parameters.items()}
        stored = orbax.read(folder / ORBAX, {key: p.shape for key, p in parameters.items()}, dtypes=dtypes)
        leaves = [stored[key] for key in parameters]
    else:
        read = tensors(folder, config, {key: p.shape for key, p in parameters.items()})
        keep = memory.platform() != "cpu" if codes is None else codes
        leaves_by_key, quantised = {}, 0
        for done, (key, tensor) in enumerate(read, start=1):
            if isinstance(tensor, Codes):
                quantised += 1
                leaves_by_key[key] = _grouped(tensor) if keep else _to_device(tensor.weights(), parameters[key].dtype)
            else:
                leaves_by_key[key] = _to_device(tensor, parameters[key].dtype)
            if progress is not None:
                progress(key, done, len(parameters))
        if quantised:
            became = "stay codes" if keep else f"became {dtype} as they were read: products with codes are slower on a CPU"
            method = formats.method(huggingface.read_json(folder / "config.json"))
            LOG.info("%d matrices quantised by %s %s", quantised, method, became)
        leaves = [leaves_by_key[key] for key in parameters]
    return nnx.merge(graph, jax.tree.unflatten(tree, leaves))


def tensors(folder: Path, config: ModelConfig, shapes: dict[str, tuple[int, ...]]):
    """Yields key and tensor of every parameter of a Hugging Face folder, one at a time, as stored or as codes.

    Raises:
        InputError: keys are missing, unknown, stored twice, of another shape or of a dtype that is not supported, before the
            first tensor is read; or a tensor of codes is not sound.
    """
    raw = huggingface.read_json(folder / "config.json")
    ignored, stacked = family(raw).ignored_keys(raw), made_of(folder, shapes)
    coded = formats.sources(raw, {key: source.shape for source in stacked.values() for key in source.keys})
    expected = {key: part for each in coded.values() for key, part in each.parts.items()}
    faults, where, dtypes = [], {}, {}
    for key, file, shape, stored in huggingface.keys(huggingface.shards(folder)):
        if ignored.fullmatch(key):
            continue
        if key in where:
            faults.append(f"{key} is stored twice")
        elif key in expected or (key == HEAD and config.tie_word_embeddings):
            faults += expected.get(key, Part(FLOATS, (shape,))).faults(key, shape, stored)
        else:
            faults.append(f"{key} is not a parameter of this model")
        where[key], dtypes[key] = file, stored
    faults += [f"{key} is missing" for key, part in expected.items() if part.needed and key not in where]
    for source in stacked.values():
        stored = sorted({dtypes[key] for key in source.keys if key in dtypes and coded[key].layout is None})
        if len(stored) > 1:
            faults.append(f"{source.keys[0]} to {source.keys[-1]} are stored in {' and '.join(stored)}: expected one dtype")
    if HEAD in where and HEAD not in expected and not faults:
        if not np.array_equal(*(huggingface.read_tensor(where[key], key) for key in (HEAD, EMBEDDING))):
            faults.append(f"{HEAD} differs from the embedding that config.json ties it to")
    if faults:
        method = formats.method(raw)
        told = "" if method is None else f" (weights quantised by {method})"
        raise InputError(f"{folder} does not fit its config.json{told}: {listed(faults)}")
    if any(coded[key].layout is not None for source in stacked.values() if source.stacked for key in source.keys):
        LOG.info("experts quantised by %s are dequantised as they are read: their products take no codes", formats.method(raw))

    def read(key: str) -> np.ndarray | Codes:
        parts = (part for part in coded[key].parts if part in where)
        return coded[key].read({part: huggingface.read_tensor(where[part], part) for part in parts})

    def parameter(source: Stack) -> np.ndarray | Codes:
        if not source.stacked:
            return read(source.keys[0])
        matrices = map(read, source.keys)  # of experts
        return source.join(each.weights() if isinstance(each, Codes) else each for each in matrices)

    return ((name, parameter(source)) for name, source in stacked.items())


def _grouped(matrix: Codes) -> Grouped:
    rows, groups = matrix.scale.shape
    codes = matrix.codes.reshape(rows, groups, -1).swapaxes(0, 1)
    zero = None if matrix.zero is None else _to_device(matrix.zero.T, jnp.dtype("int8"))
    kept = jnp.dtype("int4" if matrix.bits == 4 else codes.dtype.name)
    return Grouped(_to_device(codes, kept), _to_device(matrix.scale.T, jnp.dtype("float32")), zero)


def _to_device(tensor: np.ndarray, dtype: np.dtype) -> jax.Array:
    # Waited for, so that one tensor at a time is on its way: each is there twice until it has arrived.
    return jax.block_until_ready(jax.device_put(tensor.astype(dtype, copy=False)))
