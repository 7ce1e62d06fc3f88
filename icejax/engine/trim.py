"""Trim: the last tokens of a cache of one row are forgotten, so that another text can follow the earlier ones.

`Session` calls it when a chat template rewrites the end of a conversation. A cache without pages can end at any token. Pages
hold tokens by similarity, so a cache with pages ends at a joint: all tokens before it are sinks or in pages before its page.

Example: a prompt of 1,000 tokens leaves 16 in the window; its joint is token 984. A chat that differs from token 990 on goes
back to 984, and 6 tokens are computed again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from icejax.cache.protocol import KVCache, Lengths
from icejax.engine.decode.state import DecodeState, decode_cuts
from icejax.engine.plan import Plan
from icejax.runtime.mesh import WHOLE, on_mesh


@dataclass(frozen=True)
class Joint:
    """A place at which a cache of one row can end.

    Attributes:
        tokens: number of tokens before it.
        page: the pool page that the next text fills; 0 without a pool.
    """

    tokens: int
    page: int


def is_joint(value: Any) -> bool:
    """Says whether a value from a file is the fields of a joint."""
    return isinstance(value, list) and [type(number) for number in value] == [int, int] and min(value) >= 0


def joint_of(plan: Plan, cache: KVCache) -> Joint | None:
    """Returns the joint before the tokens in the window now; None without a pool, or if the first text left sinks empty."""
    if not plan.pooled:
        return None
    layer = plan.pooled[0]
    layout, first = plan.policies[layer].window_layout, int(cache.layers[layer].window.first[0])
    # Behind a cache that was trimmed a short text does not fill the window: the tokens before `first` are in pages.
    start = max(int(layout.start(cache.lengths)[0, 0]), first)
    return Joint(start, int(cache.lengths.next_page)) if first >= layout.sinks else None


def fits(plan: Plan, cache: KVCache, joint: Joint) -> bool:
    """Says whether the sinks and the pages before a joint hold as many tokens as the joint has before it."""
    if not plan.pooled or joint.page > int(cache.lengths.next_page):
        return False
    policy, state = plan.policies[plan.pooled[0]], cache.layers[plan.pooled[0]]
    counts = np.asarray(policy.counts(state))[0, :, : joint.page].sum(-1)
    return bool((policy.window_layout.sinks + counts == joint.tokens).all())


def last_joint(plan: Plan, joints: Sequence[Joint], *, same: int, seen: int) -> Joint | None:
    """Returns the last joint within the first `same` tokens of a cache of `seen` tokens; None: it has to be computed again.

    Args:
        joints: joints of the cache so far, in order.
    """
    if not all(policy.can_trim(seen) for policy in plan.policies):
        return None
    if not plan.pooled:
        return Joint(same, 0) if same else None
    return max((joint for joint in joints if joint.tokens <= same), key=lambda joint: joint.tokens, default=None)


def trim(state: DecodeState, plan: Plan, joint: Joint) -> DecodeState:
    """Returns the state with the tokens before a joint alone. Donates `state`; the pool stays as it is."""
    return _trim(state, jnp.asarray([joint.tokens], jnp.int32), jnp.int32(joint.page), plan=plan)


@functools.partial(jax.jit, static_argnames="plan", donate_argnums=0)
def _trim(state: DecodeState, tokens: Int[Array, " B"], page: Int[Array, ""], *, plan: Plan) -> DecodeState:
    def trimmed(state: DecodeState, tokens: jax.Array, page: jax.Array) -> DecodeState:
        pairs = zip(plan.policies, state.cache.layers, strict=True)
        layers = tuple(policy.trimmed(layer, tokens, page) for policy, layer in pairs)
        return replace(state, cache=KVCache(layers, Lengths.of(tokens, page), state.cache.table))

    cuts = decode_cuts(plan)
    return on_mesh(plan.mesh, trimmed, (state, tokens, page), (cuts, WHOLE, WHOLE), cuts)
