"""Diagnosis of NaN or infinite logits: finds the first weight, or the first layer's output, that is not finite.

The decode loop calls it before it raises.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from icejax.engine.buckets import bucket
from icejax.engine.first_token import logits_behind
from icejax.engine.layers import embed, run_exact, run_layers
from icejax.models.decoder import CausalLM, DecoderLayer
from icejax.models.sharding import module_cuts
from icejax.ops.experts.offloaded_experts import is_offloaded, with_experts_on_device
from icejax.runtime.mesh import WHOLE, every_token, on_mesh, stream_cut, stream_parts


def not_finite(model: CausalLM, tokens: Sequence[int]) -> str:
    """Returns one line that says why the logits after `tokens`, a prompt with its answer so far, are not finite.

    Costs a pass over the weights and, if all weights are finite, a second prefill.
    """
    paths = jax.tree.leaves_with_path(nnx.state(model), is_leaf=is_offloaded)
    weights = {
        jax.tree_util.keystr(path, simple=True, separator=".").replace(".value", "").replace(".codes", ""): leaf
        for path, leaf in paths
    }
    for name in sorted(weights, key=lambda name: name.startswith("lm_head")):  # the head is checked last, as it runs last
        for part in jax.tree.leaves(with_experts_on_device(weights[name])):
            part = lax.bitcast_convert_type(part, jnp.bfloat16) if part.dtype == jnp.uint16 else part
            if not jnp.isfinite(part).all():
                return f"{name} holds {'NaN' if jnp.isnan(part).any() else 'an infinity'}: fetch the checkpoint again"
    advice = "its weights and its config.json do not fit" if model.dtype == "float32" else "try --dtype float32"
    padded = np.zeros((1, bucket(len(tokens))), np.int32)
    padded[0, : len(tokens)] = tokens
    lengths = jnp.asarray([len(tokens)], jnp.int32)
    outputs = run_layers(
        model,
        embed(model, jnp.asarray(padded)),
        lambda layer, x, _: _output(with_experts_on_device(layer), x, lengths),
    )
    for i, output in enumerate(outputs):
        if not np.asarray(output[1])[:, : len(tokens)].all():
            return f"the output of layer {i} is not finite in {model.dtype}: {advice}"
    if not jnp.isfinite(logits_behind(model.ends, output[0], lengths)).all():
        return f"every layer's output is finite in {model.dtype}, the final norm's or the head's is not: {advice}"
    return f"a second prefill in {model.dtype} gives finite logits: try --cache full"


@functools.partial(jax.jit, donate_argnames="x")
def _output(layer: DecoderLayer, x: jax.Array, lengths: jax.Array):
    """Returns the layer's output, and of each token i32[1, T, 1], whether that is finite."""

    def run(layer: DecoderLayer, x: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, _ = run_exact(layer, x, lengths)
        finite = jnp.isfinite(x).all(-1, keepdims=True).astype(jnp.int32)
        return x, every_token(finite, finite.shape[1] * stream_parts(layer.mesh))

    stream = stream_cut(layer.mesh)
    return on_mesh(layer.mesh, run, (layer, x, lengths), (module_cuts(layer), stream, WHOLE), (stream, WHOLE)) + (None,)
