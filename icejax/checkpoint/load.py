"""A checkpoint folder -> a model on the device, tensor by tensor."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from icejax.checkpoint.folder import resolve
from icejax.checkpoint.quantized.formats import HEAD
from icejax.checkpoint.quantized.layouts import QuantizedMatrix
from icejax.checkpoint.readers import huggingface
from icejax.checkpoint.tensors import Tensors, open_tensors, stored_tensors
from icejax.checks.errors import InputError, quoted
from icejax.checks.numbers import integer, one_of
from icejax.config import ModelConfig
from icejax.models.decoder import CausalLM
from icejax.models.hf.fields import Fields
from icejax.models.parts.latent_attention import BY_HEAD
from icejax.models.registry import family
from icejax.ops.experts.offloaded_experts import offload, table_bytes
from icejax.ops.quantized.products import Grouped
from icejax.runtime import devices
from icejax.runtime.host_reads.choose import fetch_backend
from icejax.runtime.host_reads.reader import Reader

DTYPES = ("float32", "bfloat16", "float16")  # what a model may be in
SLOWER = (  # `python -m bench.weights --shape llama-3.2-1b`, full cache
    "on a CPU narrow weights save memory, not time: a 1.2B model wrote 5.5 tokens per second in int8, 3.0 in bfloat16 and 5.6 "
    "in float32, in a batch of eight 18.8, 11.1 and 30.4"
)
# What generation_config.json may have on how tokens are chosen, which is the caller's to say.
CHOICES = """do_sample temperature top_k top_p min_p repetition_penalty no_repeat_ngram_size bad_words_ids suppress_tokens
    begin_suppress_tokens min_new_tokens""".split()
LOG = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]  # key just done, how many done, how many in all


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose config has been read."""

    folder: Path
    config: ModelConfig


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Returns the checkpoint of a Hugging Face folder, an icejax folder or a hub id, which is downloaded if need be.

    Raises:
        InputError: there is no such folder, or its config is not what it should be.
    """
    folder = resolve(source)
    return Checkpoint(folder, read_config(folder))


def read_config(folder: Path) -> ModelConfig:
    """Returns the config of a checkpoint folder; InputError for a field that is missing, unknown or unsupported."""
    raw = huggingface.read_json(folder / "config.json")
    of = family(raw)
    config = of.read_config(raw)
    # What text models in others say of their heads is not to be trusted: transformers looks for one, too.
    if len(of.forms) > 1 and config.tie_word_embeddings and any(key.endswith(HEAD) for key, _ in stored_tensors(folder)):
        config = dataclasses.replace(config, tie_word_embeddings=False)
    generation = folder / "generation_config.json"
    if os.path.lexists(generation):  # a link that leads nowhere is told
        wished = huggingface.read_json(generation)
        if said := [f"{name}={quoted(wished[name])}" for name in CHOICES if wished.get(name) is not None]:
            LOG.info("%s has %s, which is not used: options alone say how tokens are chosen", generation.name, ", ".join(said))
        more = Fields(wished, generation.name).token_ids("eos_token_id")
        config = dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + more)))
    return config


def abstract(config: ModelConfig, dtype: str) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct], jax.tree_util.PyTreeDef]:
    """Returns a model without arrays: its graph, its parameters by Hugging Face key in leaf order, its leaves' tree.

    Raises:
        InputError: a model cannot be in this dtype.
    """
    one_of("dtype", dtype, DTYPES)
    graph, state = nnx.split(nnx.eval_shape(lambda: CausalLM(config, dtype=dtype)))
    paths, tree = jax.tree_util.tree_flatten_with_path(state)
    named = {".".join(str(part.key) for part in path[:-1]): leaf for path, leaf in paths}
    return graph, named, tree


def load_model(
    source: str | Path | Checkpoint,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    codes: bool = True,
    experts_on_host: int | bool | None = None,
    progress: Progress | None = None,
) -> CausalLM:
    """Returns the model of a Hugging Face folder, an icejax folder, a hub id or an open checkpoint, on the default device.

    Tensors go one by one to `dtype` and the device. Beside the weights that are kept in it, host memory never holds more than
    two of the largest tensor. A stored tensor counts, and one of the model's: there those of all experts are
    one, and a code of four bits takes a byte. While codes are unpacked it may be five bytes a number of a matrix.

    Args:
        dtype: float32, bfloat16 or float16; None: float32 on CPU, whose bf16 products are slow, else the checkpoint's.
        quantize: int8, fp8 or int4, to which the matrices of layers are rounded as they are read: int4 in groups of 128
            columns, the others by rows. Embedding, norms, routers and head stay as they are. None: nothing is rounded.
        codes: whether quantised matrices stay codes, and on a CPU those in bfloat16 their bits, instead of arrays of `dtype`.
        experts_on_host: how many experts of each layer are on the device, while all of them are in host memory; True: half.
            Prefill brings each layer's in turn, a decode step those that its tokens take. None: all are on the device.
        progress: called after every tensor.

    Raises:
        InputError: the folder, its config or its tensors are not what they should be; the message tells all faults.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    folder, config = checkpoint.folder, checkpoint.config
    dtype = dtype or ("float32" if devices.platform() == "cpu" else config.dtype)
    resident = _resident(config, experts_on_host)
    reader = Reader(fetch_backend()) if resident else None
    graph, parameters, tree = abstract(config, dtype)
    found = open_tensors(folder, config, {key: p.shape for key, p in parameters.items()}, quantize=quantize)
    kept = {key for key, stack in found.mappings.items() if codes and not key.endswith(BY_HEAD) and found.alike(stack)}
    _tell(found, kept)
    on_cpu = devices.platform() == "cpu"

    leaves, dtypes = {}, {key: leaf.dtype for key, leaf in parameters.items()}
    experts = [key for key in parameters if resident and of_experts(key)]
    for key, tensor in found.parameters(dtypes, kept=kept, on_cpu=on_cpu):  # enumerate would hold one while the next is read
        leaf = _to_device(tensor)
        del tensor  # or it would be there beside the next one,
        gc.collect(0)  # as JAX holds what has arrived until a collection
        if key in experts:
            if not any(other in leaves for other in experts):
                need = table_bytes(leaf) * len(experts)
                devices.check_room("experts need", need, advice="use fewer bits, as by --quantize int4")
            leaf = jax.block_until_ready(offload(leaf, resident=resident, read=reader))
        leaves[key] = leaf
        del leaf
        if progress is not None:
            progress(key, len(leaves), len(parameters))
    if on_cpu and codes and (found.quantised is not None or dtype == "bfloat16"):
        LOG.warning(SLOWER)
    return nnx.merge(graph, jax.tree.unflatten(tree, [leaves[key] for key in parameters]))


def _resident(config: ModelConfig, asked: int | bool | None) -> int | None:
    """Returns how many experts of each layer are on the device; None: all."""
    if asked is None or asked is False:
        return None
    if config.experts is None:
        raise InputError(f"experts_on_host needs a model with experts, and this {config.model_type} has none: leave it out")
    if config.experts.count == 1:
        raise InputError("experts_on_host needs a model with several experts, and this one has 1: leave it out")
    return config.experts.count // 2 if asked is True else integer("experts_on_host", asked, most=config.experts.count - 1)


def of_experts(key: str) -> bool:
    """Says whether a parameter is a matrix of all experts of a layer."""
    return key.endswith(".weight") and ".experts." in key


def _tell(found: Tensors, kept: set[str]) -> None:
    """Tells how many quantised matrices stay codes, and why the others do not."""
    coded = {key for key, source in found.sources.items() if source.layout is not None}
    if found.quantised is not None:
        kept = {each for key in kept for each in found.mappings[key].keys}
        others = len(coded - kept)
        why = "of experts in several forms, or taken head by head" if kept else "codes=False"
        rest = f", {others} are dequantised as they are read ({why})" if others else ""
        LOG.info("of %d matrices %s %d stay codes%s", len(coded), found.quantised, len(coded & kept), rest)


def _to_device(tensor: np.ndarray | QuantizedMatrix) -> jax.Array | Grouped:
    if isinstance(tensor, QuantizedMatrix):
        return Grouped(*(None if x is None else _to_device(x) for x in (tensor.codes, tensor.scale, tensor.zero)))
    # Waited for, so that one tensor at a time is on its way: each is there twice until it has arrived.
    return jax.block_until_ready(jax.device_put(tensor))
