"""The ends of a model: the token embedding before its layers, the final norm and the output head after them.

On a mesh each device has a part of the rows of embedding and head. An embedding is then the sum over the devices, of which one
has the token's row and the others zeros. Logits are gathered. Rows of zeros fill a vocabulary that the devices do not divide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from icejax.models.parts.chunks import by_chunks
from icejax.models.sharding import module_cuts
from icejax.ops.quantized.products import Grouped, product, rows
from icejax.runtime.mesh import WHOLE, Mesh, every_token, gathered, hidden_total, on_mesh, place, stream_parts


class Embedding(nnx.Module):
    """The token embedding, multiplied by `scale` in its dtype.

    Attributes:
        mesh: the devices that each have a part of the rows; None: one device has all.
    """

    def __init__(self, vocab_size: int, features: int, *, scale: float, dtype: str, mesh: Mesh | None = None) -> None:
        self.weight = nnx.Param(jnp.zeros((vocab_size, features), dtype))
        self.scale, self.dtype, self.mesh = scale, dtype, mesh

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B t D"]:
        """Returns the embeddings, on a mesh of the device's own tokens, as `hidden_total` does."""
        if self.mesh is None:
            x = rows(self.weight.get_value(), tokens, self.dtype)
        else:
            x = by_chunks(self._from_parts, tokens)
        return x if self.scale == 1.0 else x * jnp.asarray(self.scale, x.dtype)

    def _from_parts(self, tokens: jax.Array) -> jax.Array:
        weight = self.weight.get_value()
        count = weight.scale.shape[0 if weight.by_row else 1] if isinstance(weight, Grouped) else len(weight)
        places = tokens - place() * count
        here = (places >= 0) & (places < count)
        own = rows(weight, jnp.where(here, places, 0), self.dtype)
        return hidden_total(self.mesh, jnp.where(here[..., None], own, jnp.zeros((), own.dtype)))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["embed_tokens", "norm", "head"],
    meta_fields=["final_logit_softcapping", "vocab_size", "mesh"],
)
@dataclass(frozen=True)
class Ends:
    """A model without its layers: what comes before the first one and after the last one.

    Attributes:
        head: the matrix of the output head.
        final_logit_softcapping, vocab_size: as in `ModelConfig`.
        mesh: as in `CausalLM`.
    """

    embed_tokens: Embedding
    norm: nnx.Module
    head: nnx.Param
    final_logit_softcapping: float | None
    vocab_size: int
    mesh: Mesh | None

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B t D"]:
        """Returns the first layer's input, on a mesh of the device's own tokens, as `hidden_total` does."""
        return self.embed_tokens(tokens)

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Returns the fp32 logits of the last layer's output."""
        logits, cap = (
            gathered(self.mesh, product(self.norm(x), self.head.get_value()), self.vocab_size),
            self.final_logit_softcapping,
        )
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def logits_behind(self, x: Float[Array, "B t D"], lengths: Int[Array, " B"]) -> Float[Array, "B V"]:
        """Returns the logits of the last token of each row.

        Args:
            x: the last layer's output for right-padded texts, on a mesh of the device's own tokens.
            lengths: number of tokens of each row.
        """
        last, parts = lengths[:, None, None] - 1, stream_parts(self.mesh)
        near = every_token(jnp.take_along_axis(x, last // parts, axis=1), parts)
        return self.logits(jnp.take_along_axis(near, last % parts, axis=1))[:, 0]

    def on_devices(
        self, function: Callable[..., jax.Array], *arrays: jax.Array, cuts: tuple = (WHOLE,), result: PartitionSpec = WHOLE
    ) -> jax.Array:
        """Returns `function(ends, *arrays)`, where the caller is not on a mesh's devices itself; `cuts` are of the arrays."""
        return on_mesh(self.mesh, function, (self, *arrays), (module_cuts(self), *cuts), result)
