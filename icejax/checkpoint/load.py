"""Loads a checkpoint folder as a model on the device, one tensor at a time.

`icejax.api.generate` and `icejax.checkpoint.convert` call it. A matrix arrives as dtype[O, I], the matrices of all experts of a
layer as dtype[E, O, I]; codes arrive as `Grouped`, [..., G, O, g], on a CPU [..., O, G, g].
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from icejax.checkpoint import shares
from icejax.checkpoint.folder import resolve
from icejax.checkpoint.generation_config import end_tokens
from icejax.checkpoint.quantized.formats import EMBEDDING, HEAD
from icejax.checkpoint.quantized.layouts import QuantizedMatrix
from icejax.checkpoint.readers import huggingface
from icejax.checkpoint.tensors import Tensors, has_own_head, open_tensors
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer, one_of
from icejax.config import ModelConfig
from icejax.models import sharding
from icejax.models.decoder import CausalLM
from icejax.models.parts.latent_attention import BY_HEAD
from icejax.models.registry import family
from icejax.ops.experts.offloaded_experts import offload, table_bytes
from icejax.ops.quantized.products import Grouped
from icejax.runtime import devices
from icejax.runtime.host_reads.choose import fetch_backend
from icejax.runtime.host_reads.reader import Reader
from icejax.runtime.mesh import Mesh, read_mesh

DTYPES = ("float32", "bfloat16", "float16")  # of a loaded model
SLOWER = "on a CPU a product with bfloat16 weights takes 1.3 times as long as with float32 ones, for half of the memory"
LOG = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]  # key of the finished tensor, tensors finished, tensors in all


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose config has been read."""

    folder: Path
    config: ModelConfig

    def with_ends(self, token_ids: tuple[int, ...]) -> Checkpoint:
        """Returns the checkpoint with further tokens that end a text."""
        eos_ids = tuple(dict.fromkeys(self.config.eos_token_ids + token_ids))
        return dataclasses.replace(self, config=dataclasses.replace(self.config, eos_token_ids=eos_ids))


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Returns the checkpoint of a Hugging Face folder, an icejax folder or a hub id, which is downloaded where it is missing.

    Raises:
        InputError: the folder does not exist, or its config is invalid.
    """
    folder = resolve(source)
    config = read_config(folder)
    # Fine-tunes may store a head beside `tie_word_embeddings: true`; transformers uses it as well.
    if config.tie_word_embeddings and has_own_head(folder):
        config = dataclasses.replace(config, tie_word_embeddings=False)
    return Checkpoint(folder, config)


def read_config(folder: Path) -> ModelConfig:
    """Returns the config of a checkpoint folder; InputError for a field that is missing or unsupported."""
    raw = huggingface.read_json(folder / "config.json")
    config = family(raw).read_config(raw)
    return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + end_tokens(folder))))


def abstract(
    config: ModelConfig, dtype: str, mesh: Mesh | None = None
) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct], jax.tree_util.PyTreeDef]:
    """Returns a model without arrays: its graph, its parameters by Hugging Face key in leaf order, and the tree of its leaves.

    Raises:
        InputError: `dtype` is not one of DTYPES.
    """
    one_of("dtype", dtype, DTYPES)
    graph, state = nnx.split(nnx.eval_shape(lambda: CausalLM(config, dtype=dtype, mesh=mesh)))
    paths, tree = jax.tree_util.tree_flatten_with_path(state)
    named = {".".join(str(part.key) for part in path[:-1]): leaf for path, leaf in paths}
    return graph, named, tree


def load_model(
    source: str | Path | Checkpoint,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    experts_on_host: int | bool | None = None,
    mesh: str | int | None = None,
    progress: Progress | None = None,
) -> CausalLM:
    """Returns the model of a Hugging Face folder, an icejax folder, a hub id or an open checkpoint, on the default device.

    Tensors are cast to `dtype` and moved to the device one by one. Quantised matrices stay codes, and on a CPU bfloat16 ones
    stay bits, unless a step uses them head by head. Beside weights that stay in host memory, at most two tensors are in memory
    at once, each at most as large as the largest stored tensor or parameter. One parameter holds all experts of a layer, and a
    4-bit code takes one byte. Unpacking codes may take five bytes per number of a matrix. For a mesh the share of one device is
    read and moved after the other (`checkpoint.shares` lists the tensors).

    Args:
        dtype: float32, bfloat16 or float16; None: float32 on a CPU, whose bfloat16 products are slow, else the checkpoint's.
        quantize: int8, fp8 or int4: rounds the layers' matrices as they are read, int4 in groups of 128 columns, or fewer where
            128 does not divide a width, the others by rows. Embedding, norms, routers and head are not rounded. None: no matrix
            is rounded.
        experts_on_host: number of experts per layer on the device, while host memory holds all experts; True: half. Prefill
            fetches the experts of one layer after another, a decode step the experts that its tokens are routed to. None: all
            experts are on the device.
        mesh: `heads=N`, or N: the devices that share the KV heads, each with its part of the weights; `heads=N,tokens=M`: M
                devices to each KV head. None: one device.
        progress: called after every parameter.

    Raises:
        InputError: the folder, its config or its tensors are invalid; the message lists all faults.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    folder, config = checkpoint.folder, checkpoint.config
    dtype = dtype or ("float32" if devices.platform() == "cpu" else config.dtype)
    over = read_mesh(mesh)
    sharding.check_mesh(config, over)
    if experts_on_host:
        sharding.check_one_device(over, "experts_on_host")
    resident = _resident(config, experts_on_host)
    reader = Reader(fetch_backend()) if resident else None
    graph, parameters, tree = abstract(config, dtype, over)
    on_cpu, shapes = devices.platform() == "cpu", {key: p.shape for key, p in parameters.items()}
    # On a mesh a model may have more rows than the vocabulary.
    shapes |= {key: (config.vocab_size, *shapes[key][1:]) for key in (EMBEDDING, HEAD) if key in shapes}
    tensors = open_tensors(folder, config, shapes, quantize=quantize, as_codes=quantize is None)
    code_keys = {key for key, mapping in tensors.mappings.items() if not key.endswith(BY_HEAD) and tensors.alike(mapping)}
    _log_codes(tensors, code_keys)

    leaves, dtypes = {}, {key: leaf.dtype for key, leaf in parameters.items()}
    experts = [key for key in parameters if resident and of_experts(key)]
    options = dict(kept=code_keys, on_cpu=on_cpu)
    arriving = tensors.parameters(dtypes, **options) if over is None else _on_mesh(tensors, shapes, dtypes, over, **options)
    # No enumerate: it would hold a tensor while the next is read.
    for key, tensor in arriving:
        leaf = _to_device(tensor, by_row=on_cpu) if over is None else tensor
        del tensor  # else two tensors are in memory while the next is read
        gc.collect(0)  # JAX holds an array that has arrived until a collection
        if key in experts:
            if not any(other in leaves for other in experts):
                need = table_bytes(leaf) * len(experts)
                devices.check_room("experts need", need, advice="use fewer bits, as by --quantize int4")
            leaf = jax.block_until_ready(offload(leaf, resident=resident, read=reader))
        leaves[key] = leaf
        del leaf
        if progress is not None:
            progress(key, len(leaves), len(parameters))
    if on_cpu and dtype == "bfloat16":
        LOG.warning(SLOWER)
    return nnx.merge(graph, jax.tree.unflatten(tree, [leaves[key] for key in parameters]))


def _on_mesh(
    tensors: Tensors,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, np.dtype],
    mesh: Mesh,
    *,
    kept: Set[str],
    on_cpu: bool,
) -> Iterator[tuple[str, jax.Array | Grouped]]:
    """Yields each parameter's key and value on the devices of a mesh; options as of `Tensors.parameters`.

    Of a cut parameter each device's share is read by itself, where it can be.
    """
    groups = {key: shares.groups(tensors, key) if key in kept else 1 for key in shapes}
    for key, count in groups.items():
        sharding.check_groups(key, count, mesh)
    for key, shape in shapes.items():
        read = functools.partial(shares.read, tensors, key, dtype=dtypes[key], codes=key in kept, on_cpu=on_cpu)
        axis = sharding.cut_axis(key)
        if axis is not None and shares.are_readable(tensors, key, axis):
            share = functools.partial(_share, read, key, shape, mesh, by_row=on_cpu)
        else:
            whole = _grouped(read(None), by_row=on_cpu)
            share = functools.partial(sharding.share_of, key, whole, mesh)
            del whole
        yield key, sharding.put(key, shape, share, mesh, groups=groups[key])
        del share  # else its tensor is in memory while the next is read


def _share(read: Callable, key: str, shape: tuple[int, ...], mesh: Mesh, device: int, *, by_row: bool) -> np.ndarray | Grouped:
    return _grouped(read(sharding.box(key, shape, mesh, device)), by_row=by_row)


def _resident(config: ModelConfig, choice: int | bool | None) -> int | None:
    """Returns how many experts per layer are on the device; None: all."""
    if choice is None or choice is False:
        return None
    if config.experts is None:
        raise InputError(f"experts_on_host needs a model with experts, and this {config.model_type} has none: leave it out")
    if config.experts.count == 1:
        raise InputError("experts_on_host needs a model with several experts, and this one has 1: leave it out")
    return config.experts.count // 2 if choice is True else integer("experts_on_host", choice, most=config.experts.count - 1)


def of_experts(key: str) -> bool:
    """Says whether a parameter holds the matrices of all experts of a layer."""
    return key.endswith(".weight") and ".experts." in key


def _log_codes(tensors: Tensors, code_keys: set[str]) -> None:
    """Logs how many quantised matrices stay codes, and why the others do not."""
    quantised = {key for key, source in tensors.sources.items() if source.layout is not None}
    if tensors.quantised is not None:
        kept_keys = {stored_key for key in code_keys for stored_key in tensors.mappings[key].keys}
        others = len(quantised - kept_keys)
        why = "experts stored in different layouts, or matrices of latent attention that are used head by head"
        note = f", {others} are dequantised as they are read ({why})" if others else ""
        LOG.info("of %d matrices %s %d stay codes%s", len(quantised), tensors.quantised, len(quantised & kept_keys), note)


def _grouped(tensor: np.ndarray | QuantizedMatrix, *, by_row: bool) -> np.ndarray | Grouped:
    return Grouped(*tensor[:3], by_row=by_row) if isinstance(tensor, QuantizedMatrix) else tensor


def _to_device(tensor: np.ndarray | QuantizedMatrix, *, by_row: bool) -> jax.Array | Grouped:
    # Wait, so that one tensor at a time is in transfer: until it has arrived, it takes memory twice.
    return jax.tree.map(lambda x: jax.block_until_ready(jax.device_put(x)), _grouped(tensor, by_row=by_row))
