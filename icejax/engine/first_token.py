"""The first token behind a text that has run: its logits, and the state to decode from."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from icejax.engine.counters import pack_token
from icejax.engine.decode_step import DecodeState, Step, choose_next
from icejax.engine.plan import Plan
from icejax.models.decoder import CausalLM
from icejax.runtime import devices


def choose_first(
    model: CausalLM, x: Float[Array, "B T D"], lengths: Int[Array, " B"], state: DecodeState, plan: Plan
) -> tuple[DecodeState, Step]:
    """Returns the state with the first token of every row, and that token as a step with no pages.

    Args:
        x: the last layer's output of right-padded texts.
        lengths: tokens of each row.
        state: that of the texts, of which no token has been chosen.
    """
    logits = _last_logits(model, x, lengths)
    # A step's results are bound to the device, as its pool is: so must the first state be, or the step is compiled twice.
    state = jax.device_put(_choose(logits, state, plan=plan), devices.device())
    return state, Step(pack_token(state.last_tokens), logits)


@jax.jit
def _last_logits(model: CausalLM, x: jax.Array, lengths: jax.Array) -> jax.Array:
    return model.logits(jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1))[:, 0]


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="state")
def _choose(logits: jax.Array, state: DecodeState, *, plan: Plan) -> DecodeState:
    return choose_next(logits, state, plan)
