"""A model of multi-head latent attention (arXiv 2405.04434): a text attends with heads of its own, a cache keeps one latent."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from icejax import inference
from icejax.cache import Clustered, Full, Quest, SnapKV
from icejax.decoding import Decoding
from icejax.models.decoder import DecoderLayer, Entered
from icejax.ops.attention import EINSUM
from icejax.ops.rope import cos_sin, rotate
from icejax.walk import exact, walk
from tests import families, tolerances
from tests.run import jitted, plan_for

LATENT, TURNED, PLAIN = 16, 8, 12  # channels of the latent; of a head with RoPE, and without
PROMPT, DECODED, EXTENDED = 133, 20, 40
TOTAL = PROMPT + 2 * DECODED + EXTENDED


class LatentLayer(DecoderLayer):
    """Keeps of a token its latent, which is its value too, and a key with RoPE for all heads."""

    def __init__(self, layer: DecoderLayer, config, rng: np.random.Generator) -> None:
        for name, part in vars(layer).items():
            if not name.startswith("_pytree"):
                setattr(self, name, part)
        self.config = dataclasses.replace(
            layer.config, scale=(PLAIN + TURNED) ** -0.5, rope=dataclasses.replace(layer.config.rope, size=TURNED)
        )
        heads = config.num_attention_heads

        def matrix(*shape: int) -> nnx.Param:
            return nnx.Param(jnp.asarray(rng.standard_normal(shape) * shape[0] ** -0.5, jnp.float32))

        self.queries = matrix(config.hidden_size, heads, PLAIN + TURNED)
        self.latent = matrix(config.hidden_size, 1, LATENT + TURNED)
        self.keys, self.values = matrix(LATENT, heads, PLAIN), matrix(LATENT, heads, config.head_dim)

    def enter(self, x, positions, seen) -> Entered:
        x = self.input_layernorm(x)
        q, kept = (EINSUM("btd,dnh->btnh", x, matrix[...]) for matrix in (self.queries, self.latent))
        cos, sin = cos_sin(positions, seen, rope=self.config.rope)
        turned, key = (rotate(x[..., -TURNED:], cos, sin) for x in (q, kept))
        latent, q = kept[..., :LATENT], q[..., :PLAIN]
        k, v = (EINSUM("btkc,cnh->btnh", latent, matrix[...]) for matrix in (self.keys, self.values))
        keys = jnp.concatenate([k, jnp.broadcast_to(key, turned.shape)], axis=-1)
        absorbed = jnp.concatenate([EINSUM("btnh,cnh->btnc", q, self.keys[...]), turned], axis=-1)
        expanded = jnp.concatenate([q, turned], axis=-1), keys, v
        return Entered(absorbed, jnp.concatenate([latent, key], axis=-1), latent, expanded)

    def leave(self, x, attended, *, expanded=False):
        heads = attended.out if expanded else EINSUM("btnc,cnh->btnh", attended.out, self.values[...])
        return super().leave(x, attended._replace(out=heads))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    found = families.load(families.build(families.row("llama-gqa")), tmp_path_factory.mktemp("model"))
    rng = np.random.default_rng(0)
    found.model.layers = nnx.List([LatentLayer(layer, found.config, rng) for layer in found.model.layers])
    return found


def expanded_logits(model, tokens) -> np.ndarray:
    """Returns the logits [T, V] of a text that attends with heads of its own, and keeps nothing."""

    def run(layer, x, _):
        return *exact(layer, x, jnp.asarray([len(tokens)])), None

    def logits(tokens):
        *_, (x, _) = walk(model, model.model.embed_tokens(tokens), run)
        return model.logits(x)[0]

    return np.asarray(jitted(logits, jnp.asarray([tokens])))


@pytest.mark.parametrize(
    "policy",
    [
        Full(),
        Clustered(budget=TOTAL, compact_every=32),
        Quest(budget=2 * TOTAL),
        SnapKV(budget=TOTAL),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_decoding_the_latent_equals_attending_with_expanded_heads(model, policy):
    tokens = families.tokens(TOTAL)
    expected = expanded_logits(model, tokens)
    plan = plan_for(model, policy, [tokens[:PROMPT]], 1000)
    sizes = dict(num_kv_heads=1, head_dim=LATENT + TURNED, value_dim=LATENT, latent=True)
    plan = dataclasses.replace(plan, spec=dataclasses.replace(plan.spec, **sizes))
    decoding = Decoding(model, plan)
    state, step, pool = inference.prefill(model, [tokens[:PROMPT]], plan)
    at = PROMPT
    for more in (EXTENDED, 0):
        for token in tokens[at : at + DECODED]:
            np.testing.assert_allclose(step.logits[0], expected[at - 1], rtol=0, atol=tolerances.LOGITS)
            state = dataclasses.replace(state, last_tokens=jnp.asarray([token], jnp.int32))
            state, step, pool = decoding.step(state, pool)
            at += 1
        if more:
            state, step, pool = inference.extend(model, tokens[at : at + more], plan, state, pool)
            decoding.clock, at = 0, at + more
    np.testing.assert_allclose(step.logits[0], expected[-1], rtol=0, atol=tolerances.LOGITS)
