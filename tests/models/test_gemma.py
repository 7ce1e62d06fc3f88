"""Gemma beyond the fp32 logits of test_parity: bf16 rounding, context length, and caches of layers with two head sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm, Gemma3TextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

import icejax
import icejax.checkpoint
from icejax.cache.policies.full import Ring
from icejax.cache.registry import Clustered, Full
from icejax.engine.batch import empty_batch
from icejax.engine.plan import make_plan
from icejax.models.parts.linear import RMSNorm
from icejax.models.parts.vocabulary import Embedding
from icejax.models.registry import family
from icejax.session.session import Session
from tests.helpers import families
from tests.helpers.letters import Letters
from tests.helpers.policies import EXACT
from tests.helpers.run import follows

THEIRS = {"rounded": LlamaRMSNorm, "wide": Olmo2RMSNorm, "offset": Gemma3RMSNorm}
PLAIN = families.row("gemma3_text-plain")


def bfloat16(x) -> torch.Tensor:
    return torch.tensor(np.asarray(x, np.float32)).bfloat16()


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in EXACT if row.name in ("full", "clustered", "quest", "snapkv", "topk")], ids=str)
@torch.no_grad()
def test_layers_with_heads_of_two_sizes_follow_transformers(row, tmp_path):
    theirs = families.build(families.row("gemma4_text-experts"))
    tokens = families.tokens(213)
    expected = theirs(torch.tensor([tokens])).logits[0].numpy()
    ours = families.load(theirs, tmp_path)
    follows(ours, row.exact(len(tokens)), tokens, expected, prompt=133, decoded=20)


@pytest.mark.slow
def test_a_session_of_layers_with_heads_of_two_sizes_is_kept(tmp_path):
    model = families.load(families.build(families.row("gemma4_text-experts")), tmp_path / "model")
    session = Session(model, Letters(), cache=Clustered(budget=600), context_length=500)
    session.ask("a" * 150 + "bcd", max_new_tokens=20)
    session.save(tmp_path / "kept")
    loaded = Session.load(tmp_path / "kept", model, Letters())
    reply, loaded_reply = (x.ask("zyx" * 20, max_new_tokens=20) for x in (session, loaded))
    text = Letters().decode(session.token_ids[: 153 + 20 + 60])
    (expected,) = icejax.generate(model, Letters(), text, cache=Full(), max_new_tokens=20)
    assert reply.token_ids == loaded_reply.token_ids == expected.token_ids


def test_few_tokens_are_kept_in_rings_of_their_size(tmp_path):
    """A sliding layer whose window holds all tokens counts as full attention only if its heads are as large as there."""
    theirs = families.build(families.row("gemma4_text-experts"), sliding_window=512)
    plan = make_plan(families.load(theirs, tmp_path), Clustered(dense_layers=0), batch_size=2, prompt_tokens=10, new_tokens=10)
    assert plan.spec.capacity <= 512
    assert plan.pooled == (2,) and [type(policy) for policy in plan.policies[:2]] == [Ring, Ring]
    assert plan.spec_of(2) is plan.spec and (plan.spec.num_kv_heads, plan.spec.head_dim) == (1, 32)
    ring = jax.eval_shape(lambda: empty_batch(plan)).cache.layers[0]
    assert ring.k.shape == ring.v.shape == (2 * 2, 512, 16)


@pytest.mark.parametrize("kind", THEIRS)
def test_norms_round_where_transformers_does(kind):
    x, weight = (np.random.default_rng(i).standard_normal((40, 64)[i:]) * 3 for i in range(2))
    ours, theirs = RMSNorm(64, eps=1e-6, dtype="bfloat16", kind=kind), THEIRS[kind](64, eps=1e-6).bfloat16()
    ours.weight.set_value(jnp.asarray(weight, "bfloat16"))
    theirs.weight.data = bfloat16(weight)
    expected = theirs(bfloat16(x)).detach().float().numpy()
    actual = np.asarray(ours(jnp.asarray(x, "bfloat16")), np.float32)
    assert (actual == expected).mean() > 0.999  # sums in another order may round differently
    other_norms = (THEIRS[other](64, eps=1e-6).bfloat16() for other in THEIRS if other != kind)
    for other in other_norms:
        other.weight.data = theirs.weight.data
        assert (actual == other(bfloat16(x)).detach().float().numpy()).mean() < 0.95


def test_the_embedding_is_scaled_in_its_own_dtype():
    weight = np.random.default_rng(0).standard_normal((10, 1152))
    ours = Embedding(10, 1152, scale=1152**0.5, dtype="bfloat16")
    ours.weight.set_value(jnp.asarray(weight, "bfloat16"))
    theirs = Gemma3TextScaledWordEmbedding(10, 1152, None, embed_scale=1152**0.5).bfloat16()
    theirs.weight.data = bfloat16(weight)
    tokens = [[3, 1, 4]]
    np.testing.assert_array_equal(ours(jnp.asarray(tokens)).astype("float32"), theirs(torch.tensor(tokens)).detach().float())


def test_the_published_context_counts_the_factor_in():
    raw = dict(model_type="gemma3_text", hidden_size=64, intermediate_size=96, num_hidden_layers=7, query_pre_attn_scalar=168)
    config = family(raw).read_config(raw | dict(rope_scaling={"rope_type": "linear", "factor": 8.0}, sliding_window=1024))
    assert config.context_length == 131072
    assert [(x.window, x.rope.theta, x.rope.scaling is None, x.scale) for x in config.layers[4:]] == [
        (1024, 1e4, True, 168**-0.5), (None, 1e6, False, 168**-0.5), (1024, 1e4, True, 168**-0.5)
    ]  # fmt: skip
