"""Tensor edits in a checkpoint folder, comparison of two models' arrays, and runs of the converters."""

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from icejax.checkpoint.readers import huggingface
from icejax.commands import convert as converting


def edit(folder, change) -> None:
    """Applies `change` to the dict of all tensors of `folder`, and writes them as one unsharded file."""
    tensors = {}
    for shard in folder.glob("*.safetensors"):
        tensors |= load_file(shard)
        shard.unlink()
    (folder / huggingface.INDEX).unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def same_arrays(a, b) -> bool:
    """Returns whether two pytrees have equal arrays."""
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def convert(name: str, arguments: list[str]) -> int:
    """Runs `python -m convert.NAME`."""
    return converting.main(arguments, name=f"convert.{name}", to=name.rpartition("_")[2])
