"""The exact caches: every token on the device, or the newest ones in a ring."""

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
from icejax.ops.slots import by_head, joined


@dataclass(frozen=True)
class Full(AllTokens):
    """Every token on the device, attended exactly: what all other policies are measured against."""


def _newest_of(seen: jax.Array, slots: int) -> jax.Array:
    """Returns the position of the newest of `seen` [B] tokens that every slot of a ring holds; below 0: none."""
    newest = seen[:, None] - 1
    return newest - (newest - jnp.arange(slots)[None, :]) % slots


@dataclass(frozen=True)
class Ring(CachePolicy):
    """The newest `window` tokens in a ring: all that a sliding-window layer ever sees, exactly."""

    window: int

    def init(self, spec: CacheSpec) -> TokenState:
        return empty_slots(spec, min(self.window, spec.capacity))

    def prefill(self, state: TokenState, heads: Heads, attended: Attended, view: View) -> Outcome:
        position = _newest_of(heads.lengths, state.k.shape[1])
        index = jnp.maximum(position, 0)[:, :, None, None]
        there = position[:, :, None, None] >= 0
        kept = state.each(lambda _, x: joined(by_head(jnp.where(there, jnp.take_along_axis(x, index, axis=1), 0))), heads)
        return Outcome(kept)

    def extend(self, state: TokenState, heads: Heads, view: View) -> Outcome:
        slots, seen = state.k.shape[1], view.lengths.seen
        before, after = (_newest_of(n, slots) for n in (seen, seen + heads.lengths))
        attended = attend_extended(state, heads, view.lengths, position=before, window=self.window)
        return Outcome(with_new_tokens(state, heads, after - seen[:, None]), attended)

    def decode(self, state: TokenState, heads: Heads, view: View) -> Outcome:
        seen = view.lengths.seen
        return decode_in_slot(state, heads, slot=seen % state.k.shape[1], last=seen)

    def report(self, state: TokenState, lengths: Lengths) -> Report:
        return slot_report(state, lengths)
