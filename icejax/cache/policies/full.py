"""The exact caches: every token on the device, or the newest tokens in a ring.

The registry offers `Full` as `--cache full`; `Ring` serves sliding-window layers. Slots are [B K, S, H].
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from icejax.cache.bases.all_tokens import (
    AllTokens,
    TokenState,
    attend_extended,
    decode_in_slot,
    empty_slots,
    slot_report,
    with_new_tokens,
)
from icejax.cache.protocol import CachePolicy, Heads, Lengths, Outcome, Report, View
from icejax.cache.sizes import CacheSpec
from icejax.ops.attention.dense import Attended
from icejax.ops.slots import by_head, merge_heads


@dataclass(frozen=True)
class Full(AllTokens):
    """Every token on the device, attended exactly: the reference for all other policies."""


def _ring_positions(seen: jax.Array, slots: int) -> jax.Array:
    """Returns the position of the token in each slot of a ring after `seen` i32[B] tokens, i32[B, slots]; below 0: empty.

    A token at position t stands in slot t % slots. With 4 slots:

        seen = 2    [0, 1, -2, -1]    slots 2 and 3 are empty
        seen = 6    [4, 5, 2, 3]      tokens 4 and 5 have replaced 0 and 1
    """
    newest = seen[:, None] - 1
    return newest - (newest - jnp.arange(slots)[None, :]) % slots


@dataclass(frozen=True)
class Ring(CachePolicy):
    """The newest `window` tokens in a ring, attended exactly: a sliding-window layer never attends to more."""

    window: int

    def init(self, spec: CacheSpec) -> TokenState:
        return empty_slots(spec, min(self.window, spec.capacity))

    def prefill(self, state: TokenState, heads: Heads, attended: Attended, view: View) -> Outcome:
        position = _ring_positions(heads.lengths, state.k.shape[1])
        index = jnp.maximum(position, 0)[:, :, None, None]
        filled = position[:, :, None, None] >= 0
        ring = state.each(lambda _, x: merge_heads(by_head(jnp.where(filled, jnp.take_along_axis(x, index, axis=1), 0))), heads)
        return Outcome(ring)

    def extend(self, state: TokenState, heads: Heads, view: View) -> Outcome:
        slots, seen = state.k.shape[1], view.lengths.seen
        before, after = (_ring_positions(n, slots) for n in (seen, seen + heads.lengths))
        attended = attend_extended(state, heads, view.lengths, position=before, window=self.window)
        return Outcome(with_new_tokens(state, heads, after - seen[:, None]), attended)

    def decode(self, state: TokenState, heads: Heads, view: View) -> Outcome:
        seen = view.lengths.seen
        return decode_in_slot(state, heads, slot=seen % state.k.shape[1], last=seen)

    def report(self, state: TokenState, lengths: Lengths) -> Report:
        return slot_report(state, lengths)
