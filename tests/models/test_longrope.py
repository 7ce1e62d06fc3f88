"""LongRoPE: a text takes its factors by its own length, and its keys again where it outgrows the original context of 64."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from flax import nnx

import icejax
from icejax.cache.registry import Clustered, ExpectedAttention, Full, Streaming
from icejax.engine.decode.step import WholeStep
from icejax.engine.plan import make_plan
from icejax.engine.prefill import prefill
from icejax.evaluation.attention_map import Explanation
from icejax.models.decoder import CausalLM
from tests import tolerances
from tests.helpers import families
from tests.helpers.letters import Letters

PAGES = Clustered(budget=2048, page_size=8, compact_every=32, dense_layers=0)  # a budget for all tokens
LENGTHS = ((30, 20), (30, 60), (64, 20), (63, 2), (63, 3), (65, 20), (100, 20))  # tokens of the prompt and of the answer
CACHES = pytest.mark.parametrize("cache", [Full(), pytest.param(PAGES, marks=pytest.mark.slow)], ids=["full", "clustered"])
SAMPLING = icejax.Sampling(temperature=0.8, top_k=20, repetition_penalty=1.3, frequency_penalty=0.4)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    theirs = families.build(families.row("phi3-long"), num_hidden_layers=2)
    return theirs, families.load(theirs, tmp_path_factory.mktemp("model"))


def prompt_of(length: int) -> list[int]:
    return families.tokens(length, seed=length)


def transformers_text(theirs, ids: list[int], count: int) -> tuple[int, ...]:
    with torch.no_grad():
        return tuple(theirs.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)[0, len(ids) :].tolist())


@pytest.mark.parametrize("length, count", LENGTHS)
def test_a_row_alone_equals_transformers(models, length, count):
    theirs, ours = models
    ids, options = prompt_of(length), dict(max_new_tokens=count)
    (reply,) = icejax.generate(ours, Letters(), [ids], cache=Full(), logprobs=0, **options)
    assert reply.token_ids == transformers_text(theirs, ids, count)
    with torch.no_grad():
        out = theirs.generate(torch.tensor([ids]), do_sample=False, output_logits=True, return_dict_in_generate=True, **options)
    expected = torch.stack(out.logits)[:, 0].log_softmax(-1).max(-1).values
    actual = [token.chosen.logprob for token in reply.logprobs]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerances.LOGITS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cache",
    [Full(), PAGES, Streaming(budget=2048), ExpectedAttention(budget=2048)],
    ids=["full", "clustered", "streaming", "expected-attention"],
)
def test_rows_of_a_batch_equal_transformers_row_by_row(models, cache):
    theirs, ours = models
    prompts = [prompt_of(n) for n in (20, 100, 64, 40)]
    replies = icejax.generate(ours, Letters(), prompts, cache=cache, max_new_tokens=60)
    assert [reply.token_ids for reply in replies] == [transformers_text(theirs, ids, 60) for ids in prompts]


def test_the_long_factors_matter(models):
    """A model whose keys all have the short factors writes another text."""
    theirs, ours = models
    (short,) = icejax.generate(with_context(ours, 512), Letters(), [prompt_of(30)], cache=Full(), max_new_tokens=60)
    expected = transformers_text(theirs, prompt_of(30), 60)
    assert short.token_ids[:35] == expected[:35] and short.token_ids != expected


def with_context(model: CausalLM, context: int) -> CausalLM:
    """Returns the model with its short factors for all texts, and another original context."""
    scaling = model.config.rope_scaling
    scaling = dataclasses.replace(scaling, factors=scaling.short_factors, original_max_position_embeddings=context)
    config = dataclasses.replace(model.config, rope_scaling=scaling)
    graph = nnx.graphdef(nnx.eval_shape(lambda: CausalLM(config, dtype=model.dtype)))
    return nnx.merge(graph, nnx.state(model))


@pytest.mark.slow
@CACHES
def test_nothing_else_shows_where_keys_are_made_anew(models, cache):
    """With one set of factors a row that is prefilled again continues as one that is not: draws, penalty, stream, logprobs."""
    requests = [
        icejax.Request(prompt=prompt_of(30), sampling=SAMPLING),
        icejax.Request(prompt=prompt_of(50), max_new_tokens=33),
        icejax.Request(prompt=prompt_of(40), sampling=dataclasses.replace(SAMPLING, temperature=0.0)),
        icejax.Request(prompt=prompt_of(64), sampling=SAMPLING),
    ]
    streams = [
        list(icejax.stream_generate(model, Letters(), requests, cache=cache, max_new_tokens=50, seed=7, logprobs=2))
        for model in (with_context(models[1], 64), with_context(models[1], 512))
    ]
    for actual, expected in zip(*streams, strict=True):
        assert (actual.row, actual.text, actual.token_ids) == (expected.row, expected.text, expected.token_ids)
        assert (actual.finish_reason, actual.new_tokens) == (expected.finish_reason, expected.new_tokens)
        pairs = [[token.logprob for x in p.logprobs for token in (x.chosen, *x.top)] for p in (actual, expected)]
        np.testing.assert_allclose(*pairs, rtol=0, atol=tolerances.LOGITS)


def test_a_stop_string_ends_an_answer_across_the_new_keys(models):
    _, ours = models
    (whole,) = icejax.generate(ours, Letters(), [prompt_of(40)], cache=Full(), max_new_tokens=40)
    stop = whole.text[23:26]  # the answer's token 25 is the text's token 65
    (reply,) = icejax.generate(ours, Letters(), [prompt_of(40)], cache=Full(), max_new_tokens=40, stop=stop)
    assert reply.text == whole.text[: whole.text.index(stop)] and reply.finish_reason == "stop"


@CACHES
@pytest.mark.parametrize("rows", [1, 2])
def test_the_decode_step_compiles_once(models, cache, rows):
    _, ours = models
    prompts = [prompt_of(n) for n in (41, 43)[:rows]]
    icejax.generate(ours, Letters(), prompts, cache=cache, max_new_tokens=57)
    plan = make_plan(ours, cache, batch_size=rows, prompt_tokens=max(map(len, prompts)), new_tokens=57)
    step, _ = WholeStep.of(ours, plan)
    assert plan.renewal == 65 and step._cache_size() == 1


def test_a_plan_has_room_for_the_new_keys_where_rows_need_them(models, bundled):
    _, ours = models

    def renewal(model, batch, prompt, new):
        return make_plan(model, PAGES, batch_size=batch, prompt_tokens=prompt, new_tokens=new).renewal

    assert [renewal(ours, 1, 30, new) for new in (35, 36)] == [0, 65]
    assert [renewal(ours, 1, prompt, 50) for prompt in (64, 65)] == [65, 0]
    assert renewal(ours, 2, 100, 50) == 65 and renewal(bundled[0], 2, 100, 50) == 0
    plan = make_plan(with_context(ours, 1000), PAGES, batch_size=1, prompt_tokens=30, new_tokens=2000)
    np.testing.assert_array_equal(plan.extents(30), plan.extents(1001))  # an extent has 512 tokens
    assert plan.spec.prompt_capacity >= 1001 and plan.extents(1001)[:2].all()


@pytest.mark.slow
def test_many_rows_are_prefilled_anew_at_any_step(models):
    """Each row passes the original context at another phase of the window's page, beyond a round of compaction."""
    _, ours = models
    prompts = [prompt_of(n) for n in range(3, 64, 6)]
    together = icejax.generate(ours, Letters(), prompts, cache=PAGES, max_new_tokens=110)
    for ids, reply in itertools.islice(zip(prompts, together, strict=True), 0, None, 3):
        (alone,) = icejax.generate(ours, Letters(), [ids], cache=PAGES, max_new_tokens=110)
        assert reply.token_ids == alone.token_ids


@pytest.mark.slow
def test_a_row_has_extents_for_its_new_keys(models):
    """Extents have 512 tokens here: the prompt alone has one, the text that is prefilled again two."""
    texts = [
        icejax.generate(with_context(models[1], context), Letters(), [prompt_of(500)], cache=PAGES, max_new_tokens=60)
        for context in (520, 5000)
    ]
    assert texts[0][0].token_ids == texts[1][0].token_ids


@pytest.mark.slow
def test_explain_counts_the_steps_before_the_keys_are_new(models):
    _, ours = models
    explanation = Explanation(ours, prompt_of(40), PAGES, new_tokens=40)
    (reply,) = icejax.generate(ours, Letters(), [prompt_of(40)], cache=PAGES, max_new_tokens=40, watch=explanation.watch)
    assert reply.new_tokens == 40 and explanation.steps == 24


def test_factors_depend_on_the_row_alone_in_prefill(models):
    theirs, ours = models
    prompts = [prompt_of(n) for n in (64, 65)]
    plan = make_plan(ours, Full(), batch_size=2, prompt_tokens=65, new_tokens=1)
    _, step, _ = prefill(ours, prompts, plan)
    with torch.no_grad():
        expected = [theirs(torch.tensor([ids])).logits[0, -1].numpy() for ids in prompts]
    np.testing.assert_allclose(step.logits, expected, rtol=0, atol=tolerances.LOGITS)
