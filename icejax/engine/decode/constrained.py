"""The choice of tokens under grammars: it is made again, with masks, from the logits of the step before. `Run` calls it.

A step chooses its tokens without masks, so that the next layers need not wait for the host: a mask depends on the token
before, which the host reads while the device computes the logits. A batch without grammars runs no program of this module.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt32

from icejax.engine.decode.choice import choose_next
from icejax.engine.decode.counters import with_tokens
from icejax.engine.decode.state import DecodeState, Step
from icejax.engine.plan import Plan


def constrained(
    state: DecodeState, step: Step, masks: UInt32[np.ndarray, "B W"], rows: Bool[np.ndarray, " B"], plan: Plan
) -> tuple[DecodeState, Step]:
    """Returns the state and the step with the tokens of `rows` chosen again, as the step draws them. Donates `state`.

    Args:
        masks: the tokens that may be chosen, as in `Matcher.mask`.
    """
    layers = state.cache.layers  # the program needs the rest alone
    rest, step = _constrained(state.without_layers(), step, masks, rows, plan=plan)
    return rest.with_layers(layers), step


@functools.partial(jax.jit, static_argnames="plan", donate_argnums=0)
def _constrained(state: DecodeState, step: Step, masks: jax.Array, rows: jax.Array, *, plan: Plan) -> tuple[DecodeState, Step]:
    penalties = None if state.penalties is None else state.penalties.before(step.tokens)
    # Rows without a grammar count as ended for the choice: they repeat their token.
    before = dataclasses.replace(state, done=~rows, penalties=penalties)
    chosen = choose_next(step.logits, before, plan.eos_token_ids, allowed=unpacked(masks, step.logits.shape[1]))
    done = jnp.where(rows, chosen.done, state.done)
    step = dataclasses.replace(step, counters=with_tokens(step.counters, chosen.last_tokens))
    return dataclasses.replace(chosen, done=done), step


def unpacked(masks: UInt32[Array, "B W"], vocabulary: int) -> Bool[Array, "B V"]:
    """Returns the bits of the numbers, from the lowest of each, as one flag per token."""
    bits = masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]
    return (bits & 1).astype(bool).reshape(len(masks), -1)[:, :vocabulary]
