"""Parts of the cache protocol that no policy covers alone: layers that choose for others, extension token by token, reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import icejax
from icejax.cache.bases.selection import Selection
from icejax.cache.protocol import CachePolicy, Heads, Outcome, Shared, View
from icejax.cache.registry import Clustered, Full, Quest, Streaming, layer_policies, name_of
from icejax.config import RopeScaling
from icejax.engine import prefill as prefilling
from icejax.engine.decode.step import DecodePrograms
from icejax.engine.plan import make_plan, reports
from tests import tolerances
from tests.helpers import families
from tests.helpers.layer import Layer, draw
from tests.helpers.run import greedy, plan_for

PAGE, COUNT = 16, 3
PROMPT_PAGES = 19  # pages of a prompt of 300 tokens; the last one is partly in the window


@dataclass(frozen=True)
class Filter(Full):
    """Attends to every token, and chooses pages for the next layer by the size of their keys (OmniKV: by attention)."""

    count: int = COUNT

    def decode(self, state, heads: Heads, view: View) -> Outcome:
        outcome = super().decode(state, heads, view)
        size = jnp.square(outcome.state.k).sum(-1)  # B K, S
        pages = size.reshape(len(heads.q), heads.k.shape[2], -1, PAGE).sum(-1)
        return replace(outcome, shared=Shared(choice=jax.lax.top_k(pages[..., :PROMPT_PAGES], self.count)[1]))


@dataclass(frozen=True)
class Filtered(Quest):
    """Attends to the pages that the layer before it chose."""

    follows = True
    per_query_head = False

    def find(self, heads: Heads, index, view: View) -> Selection:
        ids = view.shared.choice
        held = jnp.take_along_axis(index.count, jnp.minimum(ids, index.count.shape[2] - 1), axis=2)
        return Selection(ids, jnp.where(ids < index.count.shape[2], held, 0))


@dataclass(frozen=True)
class InTurns(CachePolicy):
    """Every second layer chooses for the one after it."""

    leader: Filter = field(default_factory=Filter)
    follower: Filtered = field(default_factory=lambda: Filtered(budget=PAGE * (COUNT + 1) + 1, dense_layers=0))

    def for_layers(self, full: Sequence[int], *, of: int) -> list[CachePolicy]:
        return [self.follower if rank % 2 else self.leader for rank in range(len(full))]

    init = prefill = decode = report = None  # never called: each layer has its own policy


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return families.load(families.build(families.row("llama-gqa"), num_hidden_layers=4), tmp_path_factory.mktemp("model"))


def test_a_layer_chooses_for_the_one_after_it(model):
    prompt = families.tokens(300)
    plan = plan_for(model, InTurns(), [prompt], 40)
    assert plan.pooled == (1, 3)
    state, _, pool = prefilling.prefill(model, [prompt], plan)
    decoding = DecodePrograms(model, plan)
    for _ in range(20):
        state, _, pool = decoding.step(state, pool)
        for layer in plan.pooled:
            keys = np.asarray(state.cache.layers[layer - 1].k)
            sizes = np.square(keys).sum(-1).reshape(1, -1, keys.shape[1] // PAGE, PAGE).sum(-1)[..., :PROMPT_PAGES]
            expected = np.sort(np.argsort(-sizes, axis=-1, kind="stable")[..., :COUNT])
            np.testing.assert_array_equal(np.sort(np.asarray(state.cache.layers[layer].ids)), expected)


@pytest.mark.slow
def test_a_choice_of_all_pages_is_the_full_cache(model):
    prompts = [families.tokens(300), families.tokens(90)]
    expected = greedy(model, Full(), prompts, 40)
    policy = InTurns(Filter(count=PROMPT_PAGES), Filtered(budget=PAGE * (PROMPT_PAGES + 1) + 1, dense_layers=0))
    actual = greedy(model, policy, prompts, 15)  # before the first page of decoded tokens is flushed
    np.testing.assert_array_equal(actual[0], expected[0][:, :15])
    np.testing.assert_allclose(actual[1], expected[1][:15], rtol=0, atol=tolerances.LOGITS)


class TokenByToken(Streaming):
    """Streaming with the protocol's default `extend`."""

    extend = CachePolicy.extend


def test_more_text_is_by_default_taken_token_by_token():
    lengths, new = (250, 9, 100), (30, 7, 50)
    prompt, decoded = draw(lengths, 64)
    layers = [Layer(policy, lengths, *prompt) for policy in (Streaming(budget=400), TokenByToken(budget=400))]
    text = [np.full((3, 256, *x.shape[2:]), np.nan, np.float32) for x in decoded]
    for x, part in zip(decoded, text, strict=True):
        for row, count in enumerate(new):
            part[row, :count] = x[:count, row]
    expected, actual = (layer.extend(*text, new) for layer in layers)
    for row, count in enumerate(new):
        np.testing.assert_allclose(actual[row, :count], expected[row, :count], rtol=0, atol=tolerances.EXACT)
    for x, y in zip(*(jax.tree.leaves(layer.state) for layer in layers), strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_registry_names_policies_and_presets():
    names = ("clustered", "icecache", "icecache-reuse", "quest", "streaming")
    paper = dict(rerank=False, tail=False, balance=False, score="mean", group="interleave")
    policies = (Clustered(), Clustered(budget=64, **paper), Clustered(**paper, reuse=3), Quest(), Streaming(budget=100))
    assert [name_of(policy) for policy in policies] == list(names)
    assert name_of(InTurns()) is None and name_of(Clustered(**paper, reuse=2)) == "icecache"


def test_layers_have_policies_of_their_own(model):
    policy = Clustered(dense_layers=1, reuse=2)
    policies = layer_policies(policy, replace(model.config, num_hidden_layers=4), capacity=600)
    assert [type(layer_policy).__name__ for layer_policy in policies] == ["Full", "Clustered", "ClusteredFollower", "Clustered"]
    sliding = replace(model.config, layer_types=("full_attention", "sliding_attention") * 2, sliding_window=64)
    policies = layer_policies(Quest(), sliding, capacity=600)
    assert [type(layer_policy).__name__ for layer_policy in policies] == ["Quest", "Ring", "Quest", "Ring"]


def test_layers_must_keep_pages_of_one_kind(model):
    policy = InTurns(Quest(page_size=8), Quest(page_size=16))
    with pytest.raises(icejax.InputError, match=r"^layers must keep pages of one kind, got .*: choose one policy for them$"):
        plan_for(model, policy, [[1] * 300], 10)


def test_unrotatable_keys_are_told_before_anything_runs(model):
    scaling = RopeScaling(rope_type="dynamic", factor=2.0, original_max_position_embeddings=100)
    model.config, config = replace(model.config, rope_scaling=scaling), model.config
    try:
        with pytest.raises(icejax.InputError, match="got rope type 'dynamic'"):
            make_plan(model, Streaming(), batch_size=1, prompt_tokens=300, new_tokens=10)
        make_plan(model, Streaming(reassign=False), batch_size=1, prompt_tokens=300, new_tokens=10)
    finally:
        model.config = config


@pytest.mark.slow
def test_a_report_counts_tokens_and_bytes(model):
    """Slots on the device, summed over KV heads, and the bytes that describe them; in a ragged batch."""
    prompts = [families.tokens(300), families.tokens(20)]
    heads = model.config.num_key_value_heads
    for policy, slots in ((Full(), [302, 22]), (Streaming(budget=64), [64, 22]), (Quest(budget=64), [2, 2])):
        plan = plan_for(model, policy, prompts, 10)
        state, _, pool = prefilling.prefill(model, prompts, plan)
        decoding = DecodePrograms(model, plan)
        for _ in range(2):
            state, _, pool = decoding.step(state, pool)
        report = policy.report(state.cache.layers[0], state.cache.lengths)
        np.testing.assert_array_equal(report.slots, heads * np.asarray(slots))
        assert [layer_report.digest_bytes for layer_report in reports(plan, state.cache)] == [report.digest_bytes] * 4
        digests = [x for x in jax.tree.leaves(state.cache.layers[0]) if x.shape[-1:] != (model.config.head_dim,)]
        assert policy == Quest(budget=64) or report.digest_bytes == sum(x.nbytes for x in digests)
