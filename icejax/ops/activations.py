"""The inner activations of gated MLPs (arXiv 2002.05202): for the decoder's MLP and for experts, on gates [..., F]."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.config import ExpertForm

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True)}


def gated(gate: Float[Array, "*R F"], up: Float[Array, "*R F"], *, form: ExpertForm) -> Float[Array, "*R F"]:
    """Returns the activated gate times `up`: the input of an expert's down projection.

    With a limit this is gpt-oss's clamped SwiGLU: `gate` and `up` are clamped, and 1 is added to `up`.
    """
    if form.limit is None:
        return ACTIVATIONS[form.act](gate) * up
    gate, up = jnp.minimum(gate, form.limit), jnp.clip(up, -form.limit, form.limit)
    return gate * jax.nn.sigmoid(form.alpha * gate) * (up + 1.0)
