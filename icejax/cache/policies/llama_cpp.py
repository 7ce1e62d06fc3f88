"""The full cache in llama.cpp's quantised formats (`--cache q8_0` and `q4_0`), which its `-ctk` and `-ctv` choose.

A block is 32 channels of one token: codes [B K, S, C * bytes] and a scale f16[B K, S, C], C blocks of a head. A step decodes
some slots at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from icejax.cache.bases.all_tokens import slot_report
from icejax.cache.protocol import CachePolicy, Heads, Lengths, Outcome, Report, View
from icejax.cache.sizes import CacheSpec
from icejax.ops import group_codes
from icejax.ops.attention.dense import BLOCK, Attended, attend_blocks
from icejax.ops.group_codes import DECODED, GROUP
from icejax.ops.slots import append, append_text, first_slots, split_heads

SMALLEST_TURN = 64  # channels of llama.cpp's smallest rotation


@dataclass(frozen=True)
class Format:
    """A format of blocks: functions that encode and decode the last axis, and the dtype and number of a block's codes."""

    encode: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    decode: Callable[[jax.Array, jax.Array], jax.Array]
    dtype: str
    codes: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """Keys or values in blocks; blocks without a token are 0."""

    codes: jax.Array  # i8[B K, S, 32 C] or u8[B K, S, 16 C]
    scale: jax.Array  # f16[B K, S, C]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockState:
    """Keys (after RoPE) and values of every slot; a latent layer keeps keys alone, whose first channels are the values."""

    k: Blocks
    v: Blocks | None


@dataclass(frozen=True)
class LlamaCpp(CachePolicy):
    """All tokens on the device in blocks of 32 channels, as llama.cpp's cache with `-ctk` and `-ctv` has them.

    Codes and scales are ggml's, bit for bit (`ggml-quants.c`). Decoded tokens and later texts attend to codes, their own
    included. A prompt's attention is exact here; llama.cpp writes the cache first and attends to codes from the first token on.
    llama.cpp refuses heads that 32 does not divide, keeps sliding-window layers in codes too, and some of its kernels round
    queries to 8 bits; here the last block of a head is filled up, sliding-window layers are exact, and queries are as they are.

    Attributes:
        rotate: whether a Hadamard rotation makes channels alike before they are coded, as in llama.cpp since April 2026 (pull
            request 21038) for heads that 64 divides: keys by the largest power of two that divides their channels, values by
            64. Latent layers are never rotated. False is llama.cpp with LLAMA_ATTN_ROT_DISABLE=1, or an earlier one.
    """

    rotate: bool = True

    by_head = True
    format: ClassVar[Format]

    def init(self, spec: CacheSpec) -> BlockState:
        def empty(size: int) -> Blocks:
            rows, groups = (spec.batch_size * spec.num_kv_heads, spec.capacity), group_codes.groups_of(size)
            codes = jnp.zeros((*rows, groups * self.format.codes), self.format.dtype)
            return Blocks(codes, jnp.zeros((*rows, groups), jnp.float16))

        k, *v = map(empty, spec.planes)
        return BlockState(k, v[0] if v else None)

    def prefill(self, state: BlockState, heads: Heads, attended: Attended, view: View) -> Outcome:
        return Outcome(self._with_text(state, heads, view.lengths.seen))

    def extend(self, state: BlockState, heads: Heads, view: View) -> Outcome:
        state = self._with_text(state, heads, view.lengths.seen)
        return Outcome(state, self._attend(state, heads, view, together=BLOCK))

    def decode(self, state: BlockState, heads: Heads, view: View) -> Outcome:
        seen = view.lengths.seen
        state = self._with(state, heads, lambda old, x: append(old, x[:, 0], seen))
        out, lse = self._attend(state, heads, view, together=DECODED)
        tokens = (seen + 1).astype(jnp.float32)
        return Outcome(state, Attended(out.astype(heads.q.dtype), lse), tokens=jnp.stack([tokens, tokens]))

    def can_trim(self, tokens: int) -> bool:
        return True

    def trimmed(self, state: BlockState, tokens: Int[Array, " B"], page: Int[Array, ""]) -> BlockState:
        return jax.tree.map(lambda x: first_slots(x, tokens), state)

    def report(self, state: BlockState, lengths: Lengths) -> Report:
        return slot_report(state.k.scale, lengths)

    def _with_text(self, state: BlockState, heads: Heads, seen: Int[Array, " B"]) -> BlockState:
        return self._with(state, heads, lambda old, x: append_text(old, x, seen, heads.lengths))

    def _with(self, state: BlockState, heads: Heads, write: Callable[[jax.Array, jax.Array], jax.Array]) -> BlockState:
        """Returns the state with new tokens: `write` takes codes or scales [B K, S, n] and those of the new tokens."""
        latent = state.v is None
        with jax.named_scope("append"):
            k = self._encoded(self._turned_key(heads.k, latent=latent))
            v = None if latent else self._encoded(self._turned_value(heads.v, latent=False))
            return jax.tree.map(write, state, BlockState(k, v))

    def _attend(self, state: BlockState, heads: Heads, view: View, *, together: int) -> Attended:
        kv_heads, latent = heads.k.shape[2], state.v is None

        def read(start: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
            part = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, count, axis=1), state)
            k = split_heads(self._decoded(part.k, heads.k.shape[-1]), kv_heads)
            value_dim = heads.v.shape[-1]
            return k, k[..., :value_dim] if latent else split_heads(self._decoded(part.v, value_dim), kv_heads)

        with jax.named_scope("attend"):
            out, lse = attend_blocks(
                self._turned_key(heads.q, latent=latent),
                read,
                kv_heads=kv_heads,
                slots=state.k.scale.shape[1],
                value_dim=heads.v.shape[-1],
                seen=view.lengths.seen,
                lengths=heads.lengths,
                scoring=heads.scoring,
                block=together,
            )
            return Attended(self._turned_value(out, latent=latent), lse)

    def _encoded(self, x: Float[Array, "B T K H"]) -> Blocks:
        codes, scale = self.format.encode(group_codes.grouped(x))
        return Blocks(codes.reshape(*codes.shape[:-2], -1), scale)

    def _decoded(self, blocks: Blocks, size: int) -> Float[Array, "R S H"]:
        codes = blocks.codes.reshape(*blocks.scale.shape, -1)
        x = self.format.decode(codes, blocks.scale)
        return x.reshape(*x.shape[:-2], -1)[..., :size]

    def _turned_key(self, x: Float[Array, "B T N H"], *, latent: bool) -> Float[Array, "B T N H"]:
        """Returns keys or queries as the cache has them."""
        size = x.shape[-1]
        return self._turned(x, size & -size, latent=latent)  # the largest power of two that divides the channels

    def _turned_value(self, x: Float[Array, "B T N H"], *, latent: bool) -> Float[Array, "B T N H"]:
        """Returns values as the cache has them, or outputs as the model has them: the rotation is its own inverse."""
        return self._turned(x, SMALLEST_TURN, latent=latent)

    def _turned(self, x: Float[Array, "B T N H"], by: int, *, latent: bool) -> Float[Array, "B T N H"]:
        rotates = self.rotate and not latent and x.shape[-1] % SMALLEST_TURN == 0
        return group_codes.hadamard(x, by) if rotates else x


@dataclass(frozen=True)
class Q8_0(LlamaCpp):
    """The full cache in 8.5 bits per number, as llama.cpp's `-ctk q8_0 -ctv q8_0` keeps it: 34 bytes per 32 channels."""

    format: ClassVar[Format] = Format(group_codes.encode_q8_0, group_codes.decode_q8_0, "int8", GROUP)


@dataclass(frozen=True)
class Q4_0(LlamaCpp):
    """The full cache in 4.5 bits per number, as llama.cpp's `-ctk q4_0 -ctv q4_0` keeps it: 18 bytes per 32 channels."""

    format: ClassVar[Format] = Format(group_codes.encode_q4_0, group_codes.decode_q4_0, "uint8", GROUP // 2)
