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
from icejax.models.latent import BY_HEAD
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
    found = family(huggingface.read_json(folder / "config.json"))
    return stacks(shapes, found.renamed, fused=found.fused)


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
        keep = memory.platform() != "cpu" if codes is None else codes
        read = tensors(folder, config, {key: p.shape for key, p in parameters.items()}, codes=keep)
        leaves_by_key = {}
        for done, (key, tensor) in enumerate(read, start=1):
            coded = isinstance(tensor, Codes)
            leaves_by_key[key] = _grouped(tensor) if coded else _to_device(tensor, parameters[key].dtype)
            if progress is not None:
                progress(key, done, len(parameters))
        leaves = [leaves_by_key[key] for key in parameters]
    return nnx.merge(graph, jax.tree.unflatten(tree, leaves))


def tensors(folder: Path, config: ModelConfig, shapes: dict[str, tuple[int, ...]], *, codes: bool = False):
    """Yields key and tensor of every parameter of a Hugging Face folder, one at a time, as stored.

    A quantised matrix is f32, or with `codes` as it stands, unless it is of experts, which are stacked.

    Raises:
        InputError: keys are missing, unknown, stored twice, of another shape or of a dtype that is not supported, before the
            first tensor is read; or a tensor of codes is not sound.
    """
    raw = huggingface.read_json(folder / "config.json")
    ignored, stacked = family(raw).ignored_keys(raw), made_of(folder, shapes)
    coded = formats.sources(raw, {key: source.shape for source in stacked.values() for key in source.keys})
    expected = {key: part for each in coded.values() for key, part in each.parts.items()}
    faults, where, dtypes, passed = [], {}, {}, []
    for key, file, shape, stored in huggingface.keys(huggingface.shards(folder)):
        if ignored.fullmatch(key):
            passed.append(key)
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
    method = formats.method(raw)
    if faults:
        told = "" if method is None else f" (weights quantised by {method})"
        raise InputError(f"{folder} does not fit its config.json{told}: {listed(faults)}")
    if passed:
        LOG.info("%d tensors are of no parameter and are passed over: %s", len(passed), listed(passed))
    whole = [source.keys[0] for source in stacked.values() if not source.stacked]
    kept = [key for key in whole if codes and not key.endswith(BY_HEAD)]
    if method is not None:
        count, stay = (sum(coded[key].layout is not None for key in keys) for keys in (coded, kept))
        why = "products by expert or by head take no codes" if codes else "products with codes are slower on a CPU"
        rest = f", {count - stay} are dequantised as they are read ({why})" if stay < count else ""
        LOG.info("of %d matrices quantised by %s %d stay codes%s", count, method, stay, rest)

    def read(key: str) -> np.ndarray | Codes:
        parts = (part for part in coded[key].parts if part in where)
        found = coded[key].read({part: huggingface.read_tensor(where[part], part) for part in parts})
        return found.weights() if isinstance(found, Codes) and key not in kept else found

    return ((name, source.join(map(read, source.keys))) for name, source in stacked.items())


def _grouped(matrix: Codes) -> Grouped:
    rows, groups = matrix.scale.shape
    codes = matrix.codes.reshape(rows, groups, -1).swapaxes(0, 1)
    return Grouped(
        codes=_to_device(codes, jnp.dtype("int4") if matrix.bits == 4 else codes.dtype),
        scale=_to_device(matrix.scale.T, matrix.scale.dtype),
        zero=None if matrix.zero is None else _to_device(matrix.zero.T, matrix.zero.dtype),
    )


def _to_device(tensor: np.ndarray, dtype: np.dtype) -> jax.Array:
    # Waited for, so that one tensor at a time is on its way: each is there twice until it has arrived.
    return jax.block_until_ready(jax.device_put(tensor.astype(dtype, copy=False)))
