"""What oracles share: every token on the device, of which a step attends only to those that its exact scores rank highest.

They tell what a method of their kind and budget can reach at best; nothing is saved by them.
"""

from __future__ import annotations

import abc

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.bases.all_tokens import AllTokens, TokenState, appended
from icejax.cache.protocol import Heads, Outcome, View
from icejax.ops.attention.dense import EINSUM, Attended, masked_scores
from icejax.ops.slots import apart, joined


class Oracle(AllTokens):
    """What the oracles share: all but which tokens are attended to."""

    @abc.abstractmethod
    def weighed(self, scores: Float[Array, "B K G S"], newest: Int[Array, " B"]) -> Float[Array, "B K G S"]:
        """Returns the scores of the tokens to attend to, -inf for the others.

        Args:
            scores: those that softmax takes; -inf where there is no token.
            newest: slot of the newest token.
        """

    def decode(self, state: TokenState, heads: Heads, view: View) -> Outcome:
        seen, kv_heads = view.lengths.seen, heads.k.shape[2]
        state, mask = appended(state, heads, slot=seen, last=seen)
        scores = masked_scores(joined(heads.by_group()), state.k, mask[:, None], scoring=heads.scoring)
        with jax.named_scope("select"):
            scores = self.weighed(apart(scores, kv_heads), seen)
            chosen, scores = scores > -jnp.inf, joined(scores)
        with jax.named_scope("attend"):
            lse = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
            out = EINSUM("rgs,rsh->rgh", jnp.exp(scores - lse).astype(state.k.dtype), state.values)[..., : heads.v.shape[-1]]
        shape = heads.q.shape[:3]
        attended = Attended(out.astype(heads.q.dtype).reshape(*shape, -1), lse.reshape(shape))
        counts = chosen.sum(-1).mean((1, 2)), chosen.any(2).sum(-1).mean(1)
        return Outcome(state, attended, tokens=jnp.stack(counts))


class TokenOracle(Oracle):
    """An oracle whose tokens weigh what they do in exact attention."""

    @abc.abstractmethod
    def chosen(self, scores: Float[Array, "R G S"], newest: Int[Array, " R"]) -> Bool[Array, "R g S"]:
        """Returns the tokens to attend to, for all query heads or for each; what has no token may be chosen."""

    def weighed(self, scores: Float[Array, "B K G S"], newest: Int[Array, " B"]) -> Float[Array, "B K G S"]:
        chosen = apart(self.chosen(joined(scores), jnp.repeat(newest, scores.shape[1])), scores.shape[1])
        return jnp.where(chosen, scores, -jnp.inf)
