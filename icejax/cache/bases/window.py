"""Sinks and window: the first and the newest tokens of a row, which stay on the device; the tokens between are in pages.

Called by `Retrieval`; keys and values are planes [B, K, T, H]. A prompt of 17 tokens with 4 sinks (s), a window of 8 slots (w)
and pages of 4 tokens (p):

    position          0 1 2 3 4 5 6 7 8 9 ...      16 17 18 19 20
    after the prompt  s s s s p p p p p p p p p w w w  w            4 in the window, 4 slots free
    3 tokens later    s s s s p p p p p p p p p w w w  w  w  w  w   7 in the window
    4 tokens later    s s s s p p p p p p p p p p p p  p  w  w  w w  the window was full: its oldest 4 are a page now

Pages leave the window at the same step in all rows. If a prompt is shorter than sinks and window, the window begins before the
sinks end, and its first slots are empty.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.protocol import Heads, Lengths
from icejax.cache.sizes import CacheSpec, pages_leaving
from icejax.ops.slots import per_head, take

Planes = tuple[Float[Array, "B K T _"], ...]  # keys and values; in a latent layer keys alone
Tokens = tuple[Planes, Bool[Array, "B T"]]  # tokens that go to pages, and the mask of the tokens that exist


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WindowState:
    """Keys (after RoPE) and values of sinks and window; in a latent layer keys alone, whose first channels are the values.

    Attributes:
        first: position of each row's first token that was ever in the window. Tokens before it are sinks (a short prompt has
            fewer) or were in pages when the row joined its batch.
        sinks: planes of the first tokens.
        newest: planes of the newest tokens, oldest first.
    """

    first: jax.Array  # i32[B]
    sinks: tuple[jax.Array, ...]  # dtype[B, K, sinks, H], and dtype[B, K, sinks, Hv]
    newest: tuple[jax.Array, ...]  # dtype[B, K, slots, H], and dtype[B, K, slots, Hv]


@dataclass(frozen=True)
class Window:
    """Positions of sinks and window, and how tokens move through them.

    Attributes:
        sinks: first tokens kept on the device.
        slots: slots of the window, `page_size` of which are free after a prompt.
        page_size: tokens that leave the window at once.
    """

    sinks: int
    slots: int
    page_size: int

    @property
    def fill(self) -> int:
        """Tokens in the window right after a prompt, and whenever a page has left it."""
        return self.slots - self.page_size

    def init(self, spec: CacheSpec) -> WindowState:
        def empty(slots: int) -> tuple[jax.Array, ...]:
            return tuple(jnp.zeros((spec.batch_size, spec.num_kv_heads, slots, size), spec.dtype) for size in spec.planes)

        return WindowState(jnp.zeros(spec.batch_size, jnp.int32), empty(self.sinks), empty(self.slots))

    def start(self, lengths: Lengths) -> Int[Array, "B 1"]:
        """Position of the window's first slot; before the end of the sinks for short prompts."""
        return (lengths.seen - lengths.clock % self.page_size)[:, None] - self.fill

    def positions(self, lengths: Lengths) -> Int[Array, "B {self.slots}"]:
        """Position of every slot of the window."""
        return self.start(lengths) + jnp.arange(self.slots)[None, :]

    def masks(
        self, state: WindowState, lengths: Lengths, *, seen: Int[Array, " B"]
    ) -> tuple[Bool[Array, "B {self.sinks}"], Bool[Array, "B {self.slots}"]]:
        """Returns the masks of the sinks and of the window slots that hold a token after `seen` tokens."""
        recent, first = self.positions(lengths), state.first[:, None]
        return jnp.arange(self.sinks)[None, :] < first, (recent >= first) & (recent < seen[:, None])

    def after_prompt(self, planes: Planes, lengths: Lengths) -> tuple[WindowState, Tokens]:
        """Returns sinks and window of prompts, and the tokens between them, which go to pages."""
        prompt = lengths.seen[:, None]
        sinks, num_sinks = jnp.arange(self.sinks)[None, :], jnp.minimum(self.sinks, prompt)
        early = tuple(take(x, sinks, sinks < prompt) for x in planes)
        recent = self.positions(lengths)
        in_window = (recent >= num_sinks) & (recent < prompt)
        newest = tuple(take(x, recent, in_window) for x in planes)
        # One page of the window stays free, so that pages leave it at the same step in all rows.
        middle = jnp.arange(planes[0].shape[2])[None, :] + self.sinks
        valid = middle < self.start(lengths)
        return WindowState(num_sinks[:, 0], early, newest), (tuple(take(x, middle, valid) for x in planes), valid)

    def joining(self, state: WindowState, lengths: Lengths, clock: Int[Array, ""]) -> WindowState:
        """Returns freshly prefilled windows rolled to the phase of a batch whose clock is at `clock`."""
        newest = tuple(jnp.roll(x, clock % self.page_size, axis=2) for x in state.newest)
        first = jnp.maximum(state.first, lengths.seen - self.fill)
        return replace(state, first=first, newest=newest)

    def append(self, state: WindowState, heads: Heads, lengths: Lengths) -> WindowState:
        """Returns the window with a decoded token."""
        slot = self.fill + lengths.clock % self.page_size
        pairs = zip(state.newest, heads.planes(len(state.newest)), strict=True)
        newest = tuple(jax.lax.dynamic_update_slice_in_dim(old, new, slot, axis=2) for old, new in pairs)
        return replace(state, newest=newest)

    def extended(self, state: WindowState, heads: Heads, lengths: Lengths) -> tuple[WindowState, Tokens]:
        """Returns the window after new text, and the tokens that leave it.

        Window and new tokens are read as one run of positions, of which the newest stay.
        """
        start, first, seen = self.start(lengths), state.first[:, None], lengths.seen[:, None]
        after = Lengths.of(lengths.seen + heads.lengths)

        def tokens_at(positions: jax.Array, valid: jax.Array) -> Planes:
            old = positions < seen
            return tuple(
                take(window, positions - start, valid & old) + take(x, positions - seen, valid & ~old)
                for window, x in zip(state.newest, heads.planes(len(state.newest)), strict=True)
            )

        recent = self.positions(after)
        newest = tokens_at(recent, (recent >= first) & (recent < after.seen[:, None]))
        most = pages_leaving(heads.k.shape[1], self.page_size) * self.page_size
        leaving = jnp.maximum(start, first) + jnp.arange(most)[None, :]
        valid = leaving < self.start(after)
        return replace(state, newest=newest), (tokens_at(leaving, valid), valid)

    def oldest(self, state: WindowState, lengths: Lengths) -> tuple[Planes, Bool[Array, "B K p"]]:
        """Returns the page that leaves a full window, and the mask of its tokens; empty slots come last.

        A prompt of 6 tokens and 4 more, with 4 sinks, a window of 8 slots and pages of 4 (- is an empty slot):

            window    - - 4 5 6 7 8 9    the sinks hold 0 to 3
            page      4 5 - -            leaves the window, which then begins at 6
        """
        # The page ends just before the position at which the next window starts.
        p = self.page_size
        position = self.positions(lengths)[:, :p] - p
        count = jnp.minimum(p, p + position[:, :1] - state.first[:, None])  # tokens before `first` were never in the window
        slots = jnp.arange(p)[None, :]
        planes = tuple(take(x, slots + p - count, slots < count) for x in state.newest)
        return planes, per_head(slots < count, planes[0].shape[1])

    def without_oldest(self, state: WindowState) -> WindowState:
        """Returns the window after the page from `oldest` has left it."""
        p = self.page_size
        return replace(state, newest=tuple(jnp.roll(x, -p, axis=2).at[:, :, -p:].set(0) for x in state.newest))
