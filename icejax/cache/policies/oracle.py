"""What oracles share: every token on the device, of which a step attends only to those that its exact scores rank highest.

They tell what a method of their kind and budget can reach at best; nothing is saved by them.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.policies.full import Full, TokenState, appended, behind_dense
from icejax.cache.policy import CachePolicy, Heads, Lengths, Outcome, Report, View
from icejax.cache.slots import apart, joined
from icejax.cache.spec import CacheSpec
from icejax.ops.attention import EINSUM, Attended, masked_scores


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OracleState:
    """Keys and values of every token, and how many a query head attended to in the newest step, the mean over heads."""

    tokens: TokenState
    attended: jax.Array  # f32[B]


class Oracle(Full):
    """What the oracles share: all but which tokens are chosen."""

    dense_layers: int | None

    @abc.abstractmethod
    def chosen(self, scores: Float[Array, "R G S"], newest: Int[Array, " R"]) -> Bool[Array, "R g S"]:
        """Returns the tokens to attend to, for all query heads or for each; what has no token may be chosen.

        Args:
            scores: those that softmax takes; -inf where there is no token.
            newest: slot of the newest token.
        """

    def for_layers(self, full: Sequence[int], *, of: int) -> list[CachePolicy]:
        return behind_dense(self, full, dense=self.dense_layers, of=of)

    def init(self, spec: CacheSpec) -> OracleState:
        return OracleState(super().init(spec), jnp.zeros(spec.batch_size))

    def prefill(self, state: OracleState, heads: Heads, attended: Attended, view: View) -> Outcome:
        found = super().prefill(state.tokens, heads, attended, view)
        return replace(found, state=replace(state, tokens=found.state))

    def extend(self, state: OracleState, heads: Heads, view: View) -> Outcome:
        found = super().extend(state.tokens, heads, view)
        return replace(found, state=replace(state, tokens=found.state))

    def decode(self, state: OracleState, heads: Heads, view: View) -> Outcome:
        seen, kv_heads = view.lengths.seen, heads.k.shape[2]
        tokens, mask = appended(state.tokens, heads, slot=seen, last=seen)
        scores = masked_scores(joined(heads.by_group()), tokens.k, mask[:, None], scoring=heads.scoring)
        with jax.named_scope("select"):
            scores = jnp.where(self.chosen(scores, jnp.repeat(seen, kv_heads)), scores, -jnp.inf)
            used = (scores > -jnp.inf).sum(-1, dtype=jnp.float32)
        with jax.named_scope("attend"):
            lse = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
            out = EINSUM("rgs,rsh->rgh", jnp.exp(scores - lse).astype(tokens.v.dtype), tokens.v)
        shape = heads.q.shape[:3]
        attended = Attended(out.astype(heads.q.dtype).reshape(*shape, -1), lse.reshape(shape))
        return Outcome(OracleState(tokens, apart(used, kv_heads).mean((1, 2))), attended)

    def report(self, state: OracleState, lengths: Lengths) -> Report:
        return replace(super().report(state.tokens, lengths), attended=state.attended)


def ranks(worth: Float[Array, "*R n"]) -> Int[Array, "*R n"]:
    """Returns how many values of a row come before each, the largest first; of equal ones the first comes first."""
    return jnp.argsort(jnp.argsort(-worth, axis=-1, stable=True), axis=-1)
