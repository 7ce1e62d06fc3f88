"""What a policy says that a step reads, against the arrays of its state and what the benches count as fetched."""

import jax
import pytest
from flax import nnx

from bench.steps.shapes import raw_config
from bench.steps.sizes import fetched_bytes, fetched_per_step, nbytes
from icejax.cache.registry import Clustered, Full, Quest
from icejax.engine.plan import make_plan
from icejax.models.decoder import CausalLM
from icejax.models.registry import family
from icejax.ops.pages import tree


@pytest.fixture(scope="module")
def model():
    raw = raw_config("attention")
    return nnx.eval_shape(lambda: CausalLM(family(raw).read_config(raw), dtype="bfloat16"))


def plan_of(model, policy, tokens):
    return make_plan(model, policy, batch_size=2, prompt_tokens=tokens, new_tokens=256, platform="cpu")


def state_of(plan):
    return jax.eval_shape(lambda: plan.policies[0].init(plan.spec))


def test_a_full_cache_is_read_whole(model):
    plan = plan_of(model, Full(), 4096)
    reads = plan.policies[0].step_reads(plan.spec)
    assert (reads.device, reads.host) == (2 * 8 * 2 * 128 * 2 * (4096 + 256), 0)


@pytest.mark.parametrize("policy", [Clustered(), Clustered(keys_first=False), Quest()], ids=["keys-first", "pages", "quest"])
def test_what_is_fetched_is_what_the_benches_count(model, policy):
    plan = plan_of(model, policy, 4096)
    kind, heads = plan.policies[0], 2 * 8
    expected = heads * fetched_per_step(kind, plan.pool.pages, plan) * fetched_bytes(plan)
    assert kind.step_reads(plan.spec).host == pytest.approx(expected, rel=1e-3)


def test_of_a_tree_the_opened_nodes_are_read(model):
    """Up to 36,864 tokens all digests are read; beyond, the highest level and the opened nodes below it."""
    short, long = (plan_of(model, Clustered(), tokens) for tokens in (16384, 131072))
    [pages] = state_of(short).index.levels
    assert short.policies[0].step_reads(short.spec).device == nbytes(pages)
    pages, nodes = state_of(long).index.levels
    opened = 88 * tree.FAN_OUT
    expected = nbytes(nodes) + nbytes(pages) * opened // pages.count.shape[-1]
    assert long.policies[0].step_reads(long.spec).device == expected < nbytes((pages, nodes)) / 3
