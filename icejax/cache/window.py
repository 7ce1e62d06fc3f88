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

from icejax.cache.policy import CacheSpec, Heads, Lengths
from icejax.cache.slots import by_head, per_head, take

# Keys, values and which of them are tokens, on their way to pages.
Tokens = tuple[Float[Array, "B K T H"], Float[Array, "B K T H"], Bool[Array, "B T"]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WindowState:
    """Keys (after RoPE) and values of sinks and window.

    Attributes:
        first: position of the first token of each row that was ever in the window. Those before are sinks, of which a short
            prompt has fewer, or have been in pages since the row joined its batch.
        sinks_k, sinks_v: the first tokens.
        window_k, window_v: the newest tokens, oldest first.
    """

    first: jax.Array  # i32[B]
    sinks_k: jax.Array  # dtype[B, K, sinks, H]
    sinks_v: jax.Array
    window_k: jax.Array  # dtype[B, K, slots, H]
    window_v: jax.Array


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
        heads = (spec.batch_size, spec.num_kv_heads)
        sinks, window = (jnp.zeros((*heads, n, spec.head_dim), spec.dtype) for n in (self.sinks, self.slots))
        return WindowState(jnp.zeros(spec.batch_size, jnp.int32), sinks, sinks, window, window)

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

    def after_prompt(
        self, k: Float[Array, "B K T H"], v: Float[Array, "B K T H"], lengths: Lengths
    ) -> tuple[WindowState, Tokens]:
        """Returns sinks and window of prompts, and what lies between."""
        prompt = lengths.seen[:, None]
        sinks, num_sinks = jnp.arange(self.sinks)[None, :], jnp.minimum(self.sinks, prompt)
        sinks_k, sinks_v = (take(x, sinks, sinks < prompt) for x in (k, v))
        recent = self.positions(lengths)
        there = (recent >= num_sinks) & (recent < prompt)
        window_k, window_v = (take(x, recent, there) for x in (k, v))
        # A page of the window is left free, so that pages leave it at the same step in all rows.
        middle = jnp.arange(k.shape[2])[None, :] + self.sinks
        valid = middle < self.start(lengths)
        state = WindowState(num_sinks[:, 0], sinks_k, sinks_v, window_k, window_v)
        return state, (take(k, middle, valid), take(v, middle, valid), valid)

    def joining(self, state: WindowState, lengths: Lengths, clock: Int[Array, ""]) -> WindowState:
        """Returns the window of rows right after their prompts where that of a batch stands whose clock is at `clock`."""
        k, v = (jnp.roll(x, clock % self.page_size, axis=2) for x in (state.window_k, state.window_v))
        first = jnp.maximum(state.first, lengths.seen - self.fill)
        return replace(state, first=first, window_k=k, window_v=v)

    def append(self, state: WindowState, heads: Heads, lengths: Lengths) -> WindowState:
        """Returns the window with one more token."""
        slot = self.fill + lengths.clock % self.page_size
        k, v = (
            jax.lax.dynamic_update_slice_in_dim(old, by_head(new), slot, axis=2)
            for old, new in ((state.window_k, heads.k), (state.window_v, heads.v))
        )
        return replace(state, window_k=k, window_v=v)

    def extended(self, state: WindowState, heads: Heads, lengths: Lengths) -> tuple[WindowState, Tokens]:
        """Returns the window after more text, and the tokens that leave it.

        The window and the new tokens stand behind one another, by position: the newest stay.
        """
        start, first, seen = self.start(lengths), state.first[:, None], lengths.seen[:, None]
        after = Lengths.of(lengths.seen + heads.new)

        def at(positions: jax.Array, valid: jax.Array):
            old = positions < seen
            return (
                take(window, positions - start, valid & old) + take(by_head(x), positions - seen, valid & ~old)
                for window, x in ((state.window_k, heads.k), (state.window_v, heads.v))
            )

        recent = self.positions(after)
        window_k, window_v = at(recent, (recent >= first) & (recent < after.seen[:, None]))
        leaving = jnp.maximum(start, first) + jnp.arange(heads.k.shape[1])[None, :]
        valid = leaving < self.start(after)
        return replace(state, window_k=window_k, window_v=window_v), (*at(leaving, valid), valid)

    def oldest(
        self, state: WindowState, lengths: Lengths
    ) -> tuple[Float[Array, "B K p H"], Float[Array, "B K p H"], Bool[Array, "B K p"]]:
        """Returns keys and values of the page that leaves a full window, and which slots hold a token.

        Tokens first, empty slots last: the page of a prompt shorter than sinks and window begins with empty ones.
        """
        # The first slot holds the position just before those that will start the next window.
        p = self.page_size
        position = self.positions(lengths)[:, :p] - p
        count = jnp.minimum(p, p + position[:, :1] - state.first[:, None])  # the rest were never in the window
        slots = jnp.arange(p)[None, :]
        k, v = (take(x, slots + p - count, slots < count) for x in (state.window_k, state.window_v))
        return k, v, per_head(slots < count, k.shape[1])

    def without_oldest(self, state: WindowState) -> WindowState:
        """Returns the window after that page has left it."""
        p = self.page_size
        k, v = (jnp.roll(x, -p, axis=2).at[:, :, -p:].set(0) for x in (state.window_k, state.window_v))
        return replace(state, window_k=k, window_v=v)
