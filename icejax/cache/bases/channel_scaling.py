"""Policies whose keys are kept with channels of like size, so that distances between them mean something."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.cache.bases.retrieval import PagedState, Retrieval
from icejax.cache.protocol import Heads, Lengths, Outcome, Report, View
from icejax.cache.sizes import CacheSpec
from icejax.ops.attention.dense import Attended
from icejax.ops.pages.channel_scaling import factors_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BalancedState(PagedState):
    """What the device keeps of a layer.

    Attributes:
        factors: by which the channels of keys were multiplied, powers of two, made of a row's first text; None: by none.
    """

    factors: jax.Array | None  # f32[B, K, H]


class Balanced(Retrieval):
    """A policy that sees keys and queries with channels of like size.

    Attributes:
        balance: whether channels in which keys are far larger than queries, or far smaller, are brought to like size: it
            changes no attention but what is near to what; not of latent layers, whose keys hold values.
    """

    balance: bool = True

    def init(self, spec: CacheSpec) -> BalancedState:
        ones = jnp.ones((spec.batch_size, spec.num_kv_heads, spec.head_dim))
        factors = ones if self.balance and not spec.latent else None
        return BalancedState(**vars(super().init(spec)), factors=factors)

    def prefill(self, state: BalancedState, heads: Heads, attended: Attended, view: View) -> Outcome:
        if state.factors is not None:
            state = replace(state, factors=factors_of(heads.q, heads.k, heads.new))
        return super().prefill(state, balanced(heads, state.factors), attended, view)

    def decode(self, state: BalancedState, heads: Heads, view: View) -> Outcome:
        if view.guess is not None:
            view = replace(view, guess=lambda guess=view.guess: balanced(replace(heads, q=guess()), state.factors).q)
        return super().decode(state, balanced(heads, state.factors), view)

    def extend(self, state: BalancedState, heads: Heads, view: View) -> Outcome:
        return super().extend(state, balanced(heads, state.factors), view)

    def report(self, state: BalancedState, lengths: Lengths) -> Report:
        report = super().report(state, lengths)
        return replace(report, digest_bytes=report.digest_bytes + sum(x.nbytes for x in jax.tree.leaves(state.factors)))


def balanced(heads: Heads, factors: Float[Array, "B K H"] | None) -> Heads:
    """Returns the heads with keys multiplied by factors, and queries divided by them."""
    if factors is None:
        return heads
    factors = factors[:, None].astype(heads.k.dtype)
    q = heads.q.reshape(*heads.k.shape[:3], -1, heads.k.shape[-1]) / factors[:, :, :, None]
    return replace(heads, q=q.reshape(heads.q.shape), k=heads.k * factors)
