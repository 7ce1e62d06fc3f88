"""Sinks and window: the first and the newest tokens of a row, which stay on the device while the others are in pages.

With 4 sinks, a window of 8 slots and pages of 4, a prompt of 17 tokens, and s for a sink, w for the window, p for pages:

    position          0 1 2 3 4 5 6 7 8 9 ...      16 17 18 19 20
    after the prompt  s s s s p p p p p p p p p w w w  w            4 in the window, 4 slots free
    3 tokens later    s s s s p p p p p p p p p w w w  w  w  w  w   7 in the window
    4 tokens later    s s s s p p p p p p p p p p p p  p  w  w  w w  the window was full: its oldest 4 are a page now

A page leaves at the same step in all rows. Where a prompt is shorter than sinks and window, the window begins before the sinks
end, and its first slots are empty.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.protocol import Heads, Lengths
from icejax.cache.sizes import CacheSpec
from icejax.ops.slots import per_head, take

Planes = tuple[Float[Array, "B K T _"], ...]  # keys and values, or keys alone of a latent layer
Tokens = tuple[Planes, Bool[Array, "B T"]]  # on their way to pages, and which of them there are


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WindowState:
    """Keys (after RoPE) of sinks and window, and their values; of a latent layer keys alone, which hold the values.

    Attributes:
        first: position of the first token of each row that was ever in the window. Those before are sinks, of which a short
            prompt has fewer, or have been in pages since the row joined its batch.
        sinks: planes of the first tokens.
        newest: planes of the newest tokens, oldest first.
    """

    first: jax.Array  # i32[B]
    sinks: tuple[jax.Array, ...]  # dtype[B, K, sinks, H], and dtype[B, K, sinks, Hv]
    newest: tuple[jax.Array, ...]  # dtype[B, K, slots, H], and dtype[B, K, slots, Hv]


@dataclass(frozen=True)
class Window:
    """Where sinks and window stand.

    Attributes:
        sinks: first tokens kept on the device.
        slots: of the window.
        page_size: tokens that leave the window at once.
    """

    sinks: int
    slots: int
    page_size: int

    @property
    def fill(self) -> int:
        """Tokens in the window after a prompt and after every page that left."""
        return self.slots - self.page_size

    def init(self, spec: CacheSpec) -> WindowState:
        def empty(slots: int) -> tuple[jax.Array, ...]:
            return tuple(jnp.zeros((spec.batch_size, spec.num_kv_heads, slots, size), spec.dtype) for size in spec.planes)

        return WindowState(jnp.zeros(spec.batch_size, jnp.int32), empty(self.sinks), empty(self.slots))

    def start(self, lengths: Lengths) -> Int[Array, "B 1"]:
        """Position of the window's first slot; below the sinks' end for short prompts."""
        return (lengths.seen - lengths.clock % self.page_size)[:, None] - self.fill

    def positions(self, lengths: Lengths) -> Int[Array, "B {self.slots}"]:
        """Position of every slot of the window."""
        return self.start(lengths) + jnp.arange(self.slots)[None, :]

    def masks(
        self, state: WindowState, lengths: Lengths, *, seen: Int[Array, " B"]
    ) -> tuple[Bool[Array, "B {self.sinks}"], Bool[Array, "B {self.slots}"]]:
        """Returns which slots of the sinks and of the window hold a token when `seen` tokens have come."""
        recent, first = self.positions(lengths), state.first[:, None]
        return jnp.arange(self.sinks)[None, :] < first, (recent >= first) & (recent < seen[:, None])

    def after_prompt(self, planes: Planes, lengths: Lengths) -> tuple[WindowState, Tokens]:
        """Returns sinks and window of prompts, and what lies between."""
        prompt = lengths.seen[:, None]
        sinks, num_sinks = jnp.arange(self.sinks)[None, :], jnp.minimum(self.sinks, prompt)
        early = tuple(take(x, sinks, sinks < prompt) for x in planes)
        recent = self.positions(lengths)
        there = (recent >= num_sinks) & (recent < prompt)
        newest = tuple(take(x, recent, there) for x in planes)
        # A page of the window is left free, so that pages leave it at the same step in all rows.
        middle = jnp.arange(planes[0].shape[2])[None, :] + self.sinks
        valid = middle < self.start(lengths)
        return WindowState(num_sinks[:, 0], early, newest), (tuple(take(x, middle, valid) for x in planes), valid)

    def joining(self, state: WindowState, lengths: Lengths, clock: Int[Array, ""]) -> WindowState:
        """Returns the window of rows right after their prompts where that of a batch stands whose clock is at `clock`."""
        newest = tuple(jnp.roll(x, clock % self.page_size, axis=2) for x in state.newest)
        first = jnp.maximum(state.first, lengths.seen - self.fill)
        return replace(state, first=first, newest=newest)

    def append(self, state: WindowState, heads: Heads, lengths: Lengths) -> WindowState:
        """Returns the window with one more token."""
        slot = self.fill + lengths.clock % self.page_size
        pairs = zip(state.newest, heads.planes(len(state.newest)), strict=True)
        newest = tuple(jax.lax.dynamic_update_slice_in_dim(old, new, slot, axis=2) for old, new in pairs)
        return replace(state, newest=newest)

    def extended(self, state: WindowState, heads: Heads, lengths: Lengths) -> tuple[WindowState, Tokens]:
        """Returns the window after more text, and the tokens that leave it.

        The window and the new tokens stand behind one another, by position: the newest stay.
        """
        start, first, seen = self.start(lengths), state.first[:, None], lengths.seen[:, None]
        after = Lengths.of(lengths.seen + heads.lengths)

        def at(positions: jax.Array, valid: jax.Array) -> Planes:
            old = positions < seen
            return tuple(
                take(window, positions - start, valid & old) + take(x, positions - seen, valid & ~old)
                for window, x in zip(state.newest, heads.planes(len(state.newest)), strict=True)
            )

        recent = self.positions(after)
        newest = at(recent, (recent >= first) & (recent < after.seen[:, None]))
        leaving = jnp.maximum(start, first) + jnp.arange(heads.k.shape[1])[None, :]
        valid = leaving < self.start(after)
        return replace(state, newest=newest), (at(leaving, valid), valid)

    def oldest(self, state: WindowState, lengths: Lengths) -> tuple[Planes, Bool[Array, "B K p"]]:
        """Returns the page that leaves a full window, and which slots hold a token.

        Tokens first, empty slots last: the page of a prompt shorter than sinks and window begins with empty ones.
        """
        # The first slot holds the position just before those that will start the next window.
        p = self.page_size
        position = self.positions(lengths)[:, :p] - p
        count = jnp.minimum(p, p + position[:, :1] - state.first[:, None])  # the rest were never in the window
        slots = jnp.arange(p)[None, :]
        planes = tuple(take(x, slots + p - count, slots < count) for x in state.newest)
        return planes, per_head(slots < count, planes[0].shape[1])

    def without_oldest(self, state: WindowState) -> WindowState:
        """Returns the window after that page has left it."""
        p = self.page_size
        return replace(state, newest=tuple(jnp.roll(x, -p, axis=2).at[:, :, -p:].set(0) for x in state.newest))
