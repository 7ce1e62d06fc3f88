"""The full cache in KIVI's codes (`--cache kivi`): keys by channel, values by token, and the newest tokens as they are.

Key codes are u8[B K, S / 32, 4 bits H], groups of 32 tokens; value codes are u8[B K, S, 4 bits C], C groups of 32 channels. A
step decodes some slots at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from icejax.cache.bases.all_tokens import TokenState
from icejax.cache.bases.ring import ring_positions, with_new_tokens
from icejax.cache.protocol import CachePolicy, Heads, Lengths, Outcome, Report, View
from icejax.cache.sizes import CacheSpec
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer, one_of
from icejax.ops.attention.dense import BLOCK, Attended, attend_all, attend_blocks, causal_with_lse, merge_by_lse
from icejax.ops.group_codes import DECODED, GROUP, decode_evenly, encode_evenly, grouped, groups_of
from icejax.ops.slots import append_text, per_head, split_heads

BITS = (2, 4)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Codes:
    """Codes of keys by groups of tokens, of values by token: a number is about `least + code * step` of its group."""

    codes: jax.Array  # u8[B K, S / 32, 4 bits H] or u8[B K, S, 4 bits C]
    least: jax.Array  # f16[B K, S / 32, H] or f16[B K, S, C]
    step: jax.Array  # f16[B K, S / 32, H] or f16[B K, S, C]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KiviState:
    """All tokens in codes, and the newest ones in a ring; a latent layer keeps keys alone, whose first channels are the values.

    A token's value gets its codes at once, keys get theirs when the ring has a whole run of `residual` tokens. From then on the
    ring holds such a key as its codes stand for it.
    """

    k: Codes
    v: Codes | None
    ring: TokenState


@dataclass(frozen=True)
class Kivi(CachePolicy):
    """KIVI (arXiv 2402.02750): all tokens on the device in 4 or 2 bits, the newest ones in the model's dtype.

    Keys have a least number and a step for each channel of 32 tokens in a row, values for each token and 32 channels. As in the
    published code, values of the newest `residual` tokens are exact; keys are coded `residual` at a time, so that as many are
    exact as the text's length leaves over when divided by `residual`. A prompt's attention is exact, here and in that code. A
    later text, which that code does not have, attends to itself exactly and to earlier text by its codes.

    The published code refuses values that 32 channels do not divide, and takes fp16 models; here the last group is filled up,
    and codes have fp16 offsets and steps in every dtype. Sliding-window layers are exact.

    Attributes:
        bits: bits of a code: 4 or 2.
        residual: newest tokens in the model's dtype, a multiple of 32.

    Raises:
        InputError: an option is out of range.
    """

    bits: int = 4
    residual: int = 128
    by_head = True

    def __post_init__(self) -> None:
        one_of("bits", self.bits, BITS)
        integer("residual", self.residual, least=GROUP)
        if self.residual % GROUP:
            raise InputError(f"residual must be a multiple of {GROUP}, got {self.residual}")

    def init(self, spec: CacheSpec) -> KiviState:
        rows, groups, size = spec.batch_size * spec.num_kv_heads, groups_of(spec.capacity), GROUP * self.bits // 8

        def empty(slots: int, count: int) -> Codes:
            least = jnp.zeros((rows, slots, count), jnp.float16)
            return Codes(jnp.zeros((rows, slots, size * count), jnp.uint8), least, least)

        ring = [jnp.zeros((rows, self.residual, channels), spec.dtype) for channels in spec.planes]
        v = None if spec.latent else empty(groups * GROUP, groups_of(spec.value_dim))
        return KiviState(empty(groups, spec.head_dim), v, TokenState(ring[0], None if spec.latent else ring[1]))

    def prefill(self, state: KiviState, heads: Heads, attended: Attended, view: View) -> Outcome:
        return Outcome(self._with_new(state, heads, view.lengths.seen))

    def extend(self, state: KiviState, heads: Heads, view: View) -> Outcome:
        attended = self._attend(state, heads, view.lengths.seen, together=BLOCK)
        return Outcome(self._with_new(state, heads, view.lengths.seen), attended)

    def decode(self, state: KiviState, heads: Heads, view: View) -> Outcome:
        seen = view.lengths.seen
        out, lse = self._attend(state, heads, seen, together=DECODED)
        tokens = (seen + 1).astype(jnp.float32)
        attended = Attended(out.astype(heads.q.dtype), lse)
        return Outcome(self._with_new(state, heads, seen), attended, tokens=jnp.stack([tokens, tokens]))

    def can_trim(self, tokens: int) -> bool:
        return tokens < self.residual  # later tokens have replaced earlier ones, or their keys have codes

    def trimmed(self, state: KiviState, tokens: Int[Array, " B"], page: Int[Array, ""]) -> KiviState:
        return state

    def report(self, state: KiviState, lengths: Lengths) -> Report:
        heads, slots = len(state.k.least) // len(lengths.origin), state.k.least.shape[1] * GROUP
        return Report(None, heads * lengths.seen, heads * slots, 0)

    def _attend(self, state: KiviState, heads: Heads, seen: Int[Array, " B"], *, together: int) -> Attended:
        """Returns the attention of new tokens to each other, to the ring, and to the codes of all tokens before the ring."""
        kv_heads, value_dim, sizes = heads.k.shape[2], heads.v.shape[-1], dict(lengths=heads.lengths, scoring=heads.scoring)

        def read(start: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
            def part(codes: Codes, first: jax.Array, slots: int) -> Codes:
                return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, slots, axis=1), codes)

            keys = split_heads(self._decoded_keys(part(state.k, start // GROUP, count // GROUP)), kv_heads)
            if state.v is None:
                return keys, keys[..., :value_dim]
            return keys, split_heads(self._decoded_values(part(state.v, start, count), value_dim), kv_heads)

        with jax.named_scope("attend"):
            # A new token always sees a key, itself, so that this attention comes first in the merge.
            new = causal_with_lse(heads.q, heads.k, heads.v, window=None, **sizes)
            in_ring = per_head(ring_positions(seen, self.residual) >= 0, kv_heads)
            ring = (split_heads(x, kv_heads) for x in (state.ring.k, state.ring.values[..., :value_dim]))
            near = attend_all(heads.q, *ring, in_ring, scoring=heads.scoring)
            below, slots = jnp.maximum(seen - self.residual, 0), state.k.least.shape[1] * GROUP
            sizes |= dict(kv_heads=kv_heads, slots=slots, value_dim=value_dim)
            coded = attend_blocks(heads.q, read, seen=seen, below=below, block=together, **sizes)
            return Attended(*merge_by_lse(*merge_by_lse(*new, *near), *coded))

    def _with_new(self, state: KiviState, heads: Heads, seen: Int[Array, " B"]) -> KiviState:
        """Returns the state with new tokens; keys get codes as soon as their run of `residual` tokens is complete.

        Example: residual 128, 100 tokens and 40 new ones: the first 128 keys get codes, and 12 keys stay as they are.
        """
        count, run = heads.lengths, self.residual
        first = seen // run * run  # the first token whose key has no codes
        keys = _keys_of_run(state.ring.k, heads.k, seen - first, count)
        complete = (seen + count) // run * run - first
        with jax.named_scope("append"):
            groups = keys.reshape(len(keys), -1, GROUP, *keys.shape[2:]).swapaxes(2, 3)  # B, groups, K, 32, H
            new = Codes(*encode_evenly(groups, self.bits, axis=3))
            new = Codes(new.codes.reshape(*new.codes.shape[:3], -1), new.least, new.step)
            k = jax.tree.map(lambda old, x: append_text(old, x, first // GROUP, complete // GROUP), state.k, new)
            decoded = self._decoded_keys(jax.tree.map(lambda x: x.swapaxes(1, 2), new)).swapaxes(1, 2)
            is_coded = jnp.arange(keys.shape[1])[None, :] < complete[:, None]
            keys = jnp.where(is_coded[:, :, None, None], decoded, keys)
            position = ring_positions(seen + count, run)
            ring_k = with_new_tokens(state.ring.k, keys, position - first[:, None])
            if state.v is None:
                return KiviState(k, None, TokenState(ring_k, None))
            new = Codes(*encode_evenly(grouped(heads.v), self.bits))
            new = Codes(new.codes.reshape(*new.codes.shape[:3], -1), new.least, new.step)
            v = jax.tree.map(lambda old, x: append_text(old, x, seen, count), state.v, new)
            ring_v = with_new_tokens(state.ring.v, heads.v, position - seen[:, None])
        return KiviState(k, v, TokenState(ring_k, ring_v))

    def _decoded_keys(self, keys: Codes) -> Float[Array, "*R S H"]:
        """Returns the keys of groups [..., S / 32, n]."""
        codes = keys.codes.reshape(*keys.least.shape[:-1], -1, keys.least.shape[-1])
        x = decode_evenly(codes, keys.least, keys.step, self.bits, axis=-2)
        return x.reshape(*x.shape[:-3], -1, x.shape[-1])

    def _decoded_values(self, values: Codes, size: int) -> Float[Array, "R S H"]:
        x = decode_evenly(values.codes.reshape(*values.least.shape, -1), values.least, values.step, self.bits)
        return x.reshape(*x.shape[:-2], -1)[..., :size]


def _keys_of_run(
    ring: Float[Array, "R S H"], new: Float[Array, "B T K H"], held: Int[Array, " B"], count: Int[Array, " B"]
) -> Float[Array, "B W K H"]:
    """Returns the keys without codes, in order: the first `held` of the ring, `count` new ones, and 0 up to whole groups.

    Args:
        held: keys in the ring without codes, fewer than its slots. The first of them is in its first slot.
    """
    slots, kv_heads = ring.shape[1], new.shape[2]
    width = groups_of(slots - 1 + new.shape[1]) * GROUP
    index = jnp.arange(width)[None, :, None, None]
    old = split_heads(jnp.take(ring, jnp.arange(width) % slots, axis=1), kv_heads).swapaxes(1, 2)
    at = index - held[:, None, None, None]
    keys = jnp.take_along_axis(new, jnp.clip(at, 0, new.shape[1] - 1), axis=1)
    return jnp.where(at < 0, old, jnp.where(at < count[:, None, None, None], keys, 0))
