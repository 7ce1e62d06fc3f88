"""The choice of the next token of each row from logits f32[B, V]: of a step, and of a prompt's first token.

It is a program of its own for each kind of options: greedy rows, rows that draw, rows with penalties, and rows with both.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from icejax.engine.decode.counters import NOT_FINITE, with_tokens
from icejax.engine.decode.state import DecodeState, Step
from icejax.engine.plan import Plan
from icejax.engine.sampling import choose, fold_in
from icejax.runtime.mesh import WHOLE, Mesh, on_mesh


def chosen(state: DecodeState, step: Step, plan: Plan) -> tuple[DecodeState, Step]:
    """Returns the state and the step with the next tokens, chosen from the step's logits. Donates all but the logits."""
    layers = state.cache.layers  # the program needs the rest alone
    rest, counters = _chosen(state.without_layers(), step.counters, step.logits, ends=plan.eos_token_ids, mesh=plan.mesh)
    return rest.with_layers(layers), Step(counters, step.logits)


@functools.partial(jax.jit, static_argnames=("ends", "mesh"), donate_argnames=("state", "counters"))
def _chosen(
    state: DecodeState, counters: Int[Array, "8 B"], logits: Float[Array, "B V"], *, ends: tuple[int, ...], mesh: Mesh | None
) -> tuple[DecodeState, Int[Array, "8 B"]]:
    def run(state: DecodeState, counters: jax.Array, logits: jax.Array) -> tuple[DecodeState, jax.Array]:
        state = choose_next(logits, state, ends)
        return state, with_tokens(counters, state.last_tokens)

    return on_mesh(mesh, run, (state, counters, logits), (WHOLE,) * 3, WHOLE)


def choose_next(
    logits: jax.Array, state: DecodeState, ends: tuple[int, ...], *, allowed: jax.Array | None = None
) -> DecodeState:
    """Returns the state with the next token of every row that has not ended, chosen from logits f32[B, V].

    Args:
        ends: the tokens that end a row.
        allowed: the tokens that may be chosen, bool[B, V]; None: all.
    """
    keys, penalties = fold_in(state.key, state.cache.lengths.seen - state.draw_origin), state.penalties
    candidates = logits if penalties is None else penalties.apply(logits)
    tokens = choose(candidates if allowed is None else jnp.where(allowed, candidates, -jnp.inf), state.sampling, keys=keys)
    # -1 as an index means the last token of the vocabulary; the decode loop raises before that matters.
    tokens = jnp.where(jnp.isfinite(logits).all(-1), tokens, NOT_FINITE)
    tokens = jnp.where(state.done, state.last_tokens, tokens)
    ended = jnp.isin(tokens, jnp.asarray(ends, jnp.int32)) if ends else jnp.zeros_like(state.done)
    penalties = None if penalties is None else penalties.after(tokens)
    return dataclasses.replace(state, last_tokens=tokens, done=state.done | ended, penalties=penalties)
