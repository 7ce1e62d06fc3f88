"""The first token of an answer: its logits from the last layer's output, and the state to decode from.

`prefill` and `extend` call it. In go [B, T, D], out come tokens i32[B] and logits f32[B, V].
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from icejax.engine.decode.counters import pack_token
from icejax.engine.decode.step import DecodeState, Step, choose_next, decode_cuts
from icejax.engine.plan import Plan
from icejax.models.decoder import CausalLM, Ends
from icejax.runtime import devices
from icejax.runtime.mesh import WHOLE, on_mesh


def choose_first(
    model: CausalLM, x: Float[Array, "B T D"], lengths: Int[Array, " B"], state: DecodeState, plan: Plan
) -> tuple[DecodeState, Step]:
    """Returns the state with the first token of every row, and a step whose counters hold that token alone.

    Donates `state`.

    Args:
        x: the last layer's output for right-padded texts.
        lengths: number of tokens of each row.
        state: the state after the texts, before any token was chosen.
    """
    return _committed(*_choose(model.ends, x, lengths, state, plan=plan), plan)


def choose_from(logits: Float[Array, "B V"], state: DecodeState, plan: Plan) -> tuple[DecodeState, Step]:
    """Returns what `choose_first` does, from the logits behind texts that are in the cache. Donates `state`."""
    return _committed(*_choose_from(logits, state, plan=plan), plan)


def _committed(state: DecodeState, step: Step, plan: Plan) -> tuple[DecodeState, Step]:
    """Returns the state committed to the device: a step's results are, and its program would compile twice.

    On a mesh all results of a program are.
    """
    return (state if plan.mesh is not None else jax.device_put(state, devices.device())), step


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="state")
def _choose_from(logits: jax.Array, state: DecodeState, *, plan: Plan) -> tuple[DecodeState, Step]:
    state = choose_next(logits, state, plan)
    return state, Step(pack_token(state.last_tokens), logits)


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="state")
def _choose(ends: Ends, x: jax.Array, lengths: jax.Array, state: DecodeState, *, plan: Plan) -> tuple[DecodeState, Step]:
    def run(ends: Ends, x: jax.Array, lengths: jax.Array, state: DecodeState) -> tuple[DecodeState, Step]:
        logits = ends.logits(jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1))[:, 0]
        state = choose_next(logits, state, plan)
        return state, Step(pack_token(state.last_tokens), logits)

    cuts = decode_cuts(plan)
    return on_mesh(plan.mesh, run, (ends, x, lengths, state), (WHOLE, WHOLE, WHOLE, cuts), (cuts, WHOLE))
