"""The first token of an answer: its logits from the last layer's output, and the state to decode from.

`prefill` and `extend` call it. In go [B, T, D], out come tokens i32[B] and logits f32[B, V].
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int

from icejax.engine.decode.choice import chosen
from icejax.engine.decode.counters import pack_nothing
from icejax.engine.decode.state import DecodeState, Step
from icejax.engine.plan import Plan
from icejax.models.decoder import CausalLM
from icejax.models.parts.vocabulary import Ends
from icejax.runtime import devices
from icejax.runtime.mesh import WHOLE, placed, stream_cut


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
    # Two programs: one for each padded length, and one for each kind of sampling options.
    return choose_from(logits_behind(model.ends, x, lengths), state, plan)


def choose_from(logits: Float[Array, "B V"], state: DecodeState, plan: Plan) -> tuple[DecodeState, Step]:
    """Returns what `choose_first` does, from the logits after texts that are in the cache. Donates `state`."""
    # A step's results are committed, so what comes first must be too, or programs compile twice. On a mesh it is.
    if plan.mesh is None:
        logits, state = jax.device_put((logits, state), devices.device())
    return chosen(state, Step(placed(plan.mesh, pack_nothing(len(logits))), logits), plan)


@jax.jit
def logits_behind(ends: Ends, x: jax.Array, lengths: Int[Array, " B"]) -> Float[Array, "B V"]:
    """Returns the logits of the last token of each row, from the last layer's output as `layers.embed` cuts it."""
    return ends.on_devices(Ends.logits_behind, x, lengths, cuts=(stream_cut(ends.mesh), WHOLE))
