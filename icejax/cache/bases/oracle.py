"""Base of the oracles: every token stays on the device, and a step attends only to the tokens with the best exact scores.

An oracle bounds what a method of its kind and budget can reach; it saves neither memory nor time. `policies/topk.py` and its
siblings build on it. Scores are f32[B, K, G, S].
"""

from __future__ import annotations

import abc

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.bases.all_tokens import AllTokens, TokenState, appended
from icejax.cache.protocol import Heads, Outcome, View
from icejax.ops.attention.dense import EINSUM, Attended, masked_scores
from icejax.ops.slots import merge_heads, split_heads


class Oracle(AllTokens):
    """Scores every token exactly; a subclass chooses the tokens to attend to."""

    @abc.abstractmethod
    def weighed(self, scores: Float[Array, "B K G S"], newest: Int[Array, " B"]) -> Float[Array, "B K G S"]:
        """Returns the scores of the tokens to attend to, and -inf for all others.

        Args:
            scores: fp32 scores before softmax; -inf for an empty slot.
            newest: slot of the newest token.
        """

    def decode(self, state: TokenState, heads: Heads, view: View) -> Outcome:
        seen, kv_heads = view.lengths.seen, heads.k.shape[2]
        state, mask = appended(state, heads, slot=seen, last=seen)
        scores = masked_scores(merge_heads(heads.by_group()), state.k, mask[:, None], scoring=heads.scoring)
        with jax.named_scope("select"):
            scores = self.weighed(split_heads(scores, kv_heads), seen)
            chosen, scores = scores > -jnp.inf, merge_heads(scores)
        with jax.named_scope("attend"):
            lse = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
            out = EINSUM("rgs,rsh->rgh", jnp.exp(scores - lse).astype(state.k.dtype), state.values)[..., : heads.v.shape[-1]]
        shape = heads.q.shape[:3]
        attended = Attended(out.astype(heads.q.dtype).reshape(*shape, -1), lse.reshape(shape))
        counts = chosen.sum(-1).mean((1, 2)), chosen.any(2).sum(-1).mean(1)
        return Outcome(state, attended, tokens=jnp.stack(counts))


class TokenOracle(Oracle):
    """An oracle whose chosen tokens keep their exact scores."""

    @abc.abstractmethod
    def chosen(self, scores: Float[Array, "R G S"], newest: Int[Array, " R"]) -> Bool[Array, "R g S"]:
        """Returns the mask of the tokens to attend to; g is 1 or G. Empty slots may be in it: their scores are -inf."""

    def weighed(self, scores: Float[Array, "B K G S"], newest: Int[Array, " B"]) -> Float[Array, "B K G S"]:
        chosen = split_heads(self.chosen(merge_heads(scores), jnp.repeat(newest, scores.shape[1])), scores.shape[1])
        return jnp.where(chosen, scores, -jnp.inf)
