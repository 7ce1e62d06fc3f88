"""Prefill and decode: padded sizes, how often programs compile, memory, repeatability, sampling, and pages fetched."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import icejax
from icejax.cache.bases.retrieval import Retrieval
from icejax.cache.index.digest_tree import Digested
from icejax.cache.protocol import KVCache, Lengths
from icejax.cache.registry import Clustered, Full, layer_policies
from icejax.engine import extend, prefill
from icejax.engine.buckets import bucket
from icejax.engine.decode.between_steps import between_steps
from icejax.engine.decode.counters import StepCounters
from icejax.engine.decode.step import DecodePrograms, StepLayer, StepParts, WholeStep, step_program
from icejax.engine.plan import make_plan
from icejax.engine.sampling import Sampling
from icejax.models.registry import family
from icejax.ops.pages import tree
from tests import tolerances
from tests.helpers import families, programs
from tests.helpers.policies import POLICIES, by_row
from tests.helpers.run import greedy, plan_for

# One row per policy with pages.
PAGED = [*{type(row.small): row for row in reversed(POLICIES) if isinstance(row.small, Retrieval)}.values()][::-1]


@given(st.integers(1, 2_000_000))
def test_padded_sizes_hold_the_prompt_and_divide_into_pages(tokens):
    size = bucket(tokens)
    assert tokens <= size <= max(256, tokens * 3 // 2 + 1)
    assert tokens <= 16384 or size - tokens < 8192
    assert size % 128 == 0


@pytest.mark.slow
def test_equal_plans_share_their_programs(tmp_path):
    model = families.load(families.build(families.row("llama-gqa")), tmp_path)
    prompt = families.tokens(50)
    programs.drop()
    for policy in (Clustered(budget=64), Clustered(budget=64), Full()):
        greedy(model, policy, [prompt], 20)
    assert step_program.cache_info().misses == between_steps.cache_info().misses == 2
    plan = plan_for(model, Clustered(budget=64), [prompt], 20)
    flush, flushed, compact = between_steps(plan)
    step, _ = WholeStep.of(model, plan)
    assert step._cache_size() == flush._cache_size() == flushed._cache_size() == 1 and compact._cache_size() == 0


@pytest.mark.slow
def test_growth_compiles_each_program_once(tmp_path, monkeypatch):
    """The programs of a step: the first, each kind of layer, the last."""
    monkeypatch.setattr("icejax.engine.plan.LEAST_LAYERS", 1)
    model = families.load(families.build(families.row("llama-gqa")), tmp_path)
    policy, prompt = Clustered(budget=64, compact_every=32), families.tokens(20)
    greedy(model, policy, [prompt], 200)
    plan = plan_for(model, policy, [prompt], 200)
    parts = StepParts.of(model, plan)
    programs_of_layers = {layer.program for layer in parts.layers}
    programs_of_a_run = (parts.begin, *programs_of_layers, parts.finish, *between_steps(plan))
    assert len(programs_of_layers) == 1 and {program._cache_size() for program in programs_of_a_run} == {1}


@pytest.mark.slow
def test_one_program_extends_all_layers(tmp_path):
    """Of three layers with pages; a program per layer would triple the wait for the second answer of a session."""
    model = families.load(families.build(families.row("llama-gqa")), tmp_path)
    plan = plan_for(model, Clustered(budget=64), [families.tokens(300)], 300)
    state, _, pool = prefill.prefill(model, [families.tokens(300)], plan)
    num_programs = extend._extend_layer._cache_size()
    extend.extend(model, families.tokens(20), plan, state, pool)
    assert len(plan.pooled) == 3 and extend._extend_layer._cache_size() == num_programs + 1


def test_int8_pages_are_refused_on_tpu(tmp_path, monkeypatch):
    model = families.load(families.build(families.row("llama-gqa")), tmp_path)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(icejax.InputError, match="page_dtype=int8 does not compile on TPU: leave it out"):
        plan_for(model, Clustered(budget=64, page_dtype="int8"), [families.tokens(50)], 20)


def test_a_flush_copies_no_level_of_the_tree(tmp_path):
    """Levels are donated and written in place; temporary memory is less than one vector per page."""
    model = families.load(families.build(families.row("llama-gqa")), tmp_path)
    model.config = replace(model.config, max_position_embeddings=2**17)
    plan = make_plan(model, Clustered(), batch_size=1, prompt_tokens=65536, new_tokens=64)
    state = jax.eval_shape(lambda: tuple(policy.init(plan.spec) for policy in plan.policies))
    assert [len(layer.index.levels) for layer in state] == [2] * len(state)
    cache = KVCache(state, jax.eval_shape(lambda: Lengths.none(1)))
    flush, flushed, _ = between_steps(plan)
    memory = flushed.lower(cache, jax.eval_shape(flush, cache)[1]).compile().memory_analysis()
    size = sum(math.prod(x.shape) * x.dtype.itemsize for layer in state for x in jax.tree.leaves(layer.index))
    assert memory.alias_size_in_bytes >= size and memory.temp_size_in_bytes < state[0].index.levels[0].mean.data.size


@pytest.mark.parametrize("row", by_row(rows=PAGED, slow=True))
def test_layers_give_up_their_pages_as_each_would_alone(tmp_path, monkeypatch, row):
    """One of the two rows has no page yet, and so no PQCache centroids, for example."""
    monkeypatch.setattr(tree, "TOP", 8)  # gives small trees several levels
    model = families.load(families.build(families.row("llama-gqa")), tmp_path)
    prompts = [families.tokens(300), families.tokens(9)]
    plan = plan_for(model, row.small, prompts, 40)
    state, _, pool = prefill.prefill(model, prompts, plan)
    decoding = DecodePrograms(model, plan)
    for _ in range(2 * plan.page_size - 1):  # the first page to leave the window begins a new node
        state, _, pool = decoding.step(state, pool)
    flush, *_ = between_steps(plan)
    cache = decoding.programs.run(state, pool)[0].cache
    pages, updates, _ = flush(cache)
    assert len(updates) > 1
    indexes = [cache.layers[i].index for i in plan.pooled]
    assert all(len(index.levels) > 1 for index in indexes if isinstance(index, Digested))
    for number, i in enumerate(plan.pooled):
        page, update = jax.jit(plan.policies[i].flush)(cache.layers[i], cache.lengths)
        np.testing.assert_array_equal(np.asarray(pages[0, number]), np.asarray(page))
        for actual, expected in zip(jax.tree.leaves(updates[number]), jax.tree.leaves(update), strict=True):
            np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), atol=tolerances.EXACT)


def num_aliased(program: Callable, *arguments: Any) -> int:
    hlo = program.lower(*arguments).compile().as_text()
    return re.search(r"input_output_alias={(.*?)}, entry", hlo.splitlines()[0])[1].count("alias)")


@pytest.mark.slow
def test_a_step_leaves_all_of_its_state_where_it_is(tmp_path):
    """A buffer whose address changed at every step would have to be updated in the CUDA graph, kernel by kernel."""
    model = families.load(families.build(families.row("llama-gqa")), tmp_path)
    plan = plan_for(model, Clustered(budget=64), [families.tokens(300)], 20)
    state, _, pool = prefill.prefill(model, [families.tokens(300)], plan)
    program, leaves = WholeStep.of(model, plan)
    assert num_aliased(program, leaves, state, pool) == len(jax.tree.leaves(state))


BY_LAYERS = {  # the cache, and its kinds of layers
    "dense-and-clustered": (Clustered(budget=64, dense_layers=1), 2),
    "followed": (Clustered(budget=64, reuse=2), 2),
    "guessed": (Clustered(budget=64, prefetch=True), 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_LAYERS)
def test_a_step_by_layers_equals_one_program(tmp_path, name):
    """Each kind of layer is one program, which copies no cache; the state, the counters and the logits are those of a step."""
    policy, kinds = BY_LAYERS[name]
    model, prompts = (
        families.load(families.build(families.row("llama-gqa")), tmp_path),
        [families.tokens(300), families.tokens(9)],
    )
    plan = plan_for(model, policy, prompts, 20)
    state, _, pool = prefill.prefill(model, prompts, plan)
    aliased = {}

    def checked(layer: StepLayer) -> StepLayer:
        def program(leaves, cache, inputs):
            if layer.program not in aliased:
                aliased[layer.program] = num_aliased(layer.program, leaves, cache, inputs) == len(jax.tree.leaves(cache))
            return layer.program(leaves, cache, inputs)

        return layer._replace(program=program)

    parts, whole = StepParts.of(model, plan), WholeStep.of(model, plan)
    parts = parts._replace(layers=[checked(layer) for layer in parts.layers])
    states = [jax.tree.map(jnp.copy, state) for _ in range(2)]
    for _ in range(3):
        (states[0], by_layer), (states[1], at_once) = (
            step.run(x, pool) for step, x in zip((parts, whole), states, strict=True)
        )
        assert (by_layer.counters == at_once.counters).all() and by_layer.counters[1:4].any(1).all()
        np.testing.assert_allclose(by_layer.logits, at_once.logits, atol=tolerances.EXACT)
        for x, y in zip(*map(jax.tree.leaves, states), strict=True):
            if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                np.testing.assert_allclose(x, y, atol=tolerances.EXACT)
    assert len(parts.layers) == 3 and [*aliased.values()] == [True] * kinds


@pytest.mark.slow
def test_the_same_input_gives_the_same_bits(tmp_path):
    model = families.load(families.build(families.row("qwen3-plain")), tmp_path)
    prompts = [families.tokens(300), families.tokens(20)]
    first, second = (greedy(model, Clustered(budget=64), prompts, 40) for _ in range(2))
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_finds_the_bundled_answer(dtype):
    """The pool stores pages as bit patterns; the answer is that of fp32."""
    model, tokenizer = icejax.load(dtype=dtype)
    prompt = (icejax.api.generate.ASSETS / "prompt.txt").read_text()
    question = prompt[prompt.rindex("Pass key ") :]
    answer = prompt[prompt.index(question) + len(question) :][:6]
    context = prompt[prompt.index(question) - 10 :][:1500] + question
    (response,) = icejax.generate(model, tokenizer, context, cache=Clustered(budget=128), max_new_tokens=8)
    assert response.text == answer and response.run.dtype == dtype and response.finish_reason == "stop"


def test_dense_first_layers_by_depth():
    deep = family(raw := families.SIZES | dict(model_type="llama", num_hidden_layers=16)).read_config(raw)
    shallow = family(raw := families.SIZES | dict(model_type="llama")).read_config(raw)
    policy = Clustered()
    assert layer_policies(policy, deep, capacity=100) == (Full(), Full()) + (policy,) * 14
    assert layer_policies(policy, shallow, capacity=100) == (policy,) * 3
    none = Clustered(dense_layers=0)
    assert layer_policies(none, deep, capacity=100) == (none,) * 16


def test_rows_draw_on_their_own_and_penalty_sees_the_prompt(tmp_path):
    model = families.load(families.build(families.row("llama-gqa")), tmp_path)
    prompt = families.tokens(30)
    sampling = Sampling(repetition_penalty=1e6)
    plan = make_plan(model, Full(), batch_size=1, prompt_tokens=30, new_tokens=30)
    state, step, pool = prefill.prefill(model, [prompt], plan, sampling=[sampling])
    chosen, decoding = [int(state.last_tokens[0])], DecodePrograms(model, plan)
    for _ in range(29):
        state, step, pool = decoding.step(state, pool)
        chosen.append(int(step.tokens[0]))
    assert len(set(chosen)) == 30 and not set(chosen) & set(prompt)


@pytest.mark.slow
def test_a_resident_set_changes_nothing_but_the_fetches(tmp_path):
    model = families.load(families.build(families.row("llama-gqa")), tmp_path)
    prompts = [families.tokens(300), families.tokens(120)]
    base = Clustered(budget=64, compact_every=32, keys_first=False)
    (tokens, logits, _), resident = (greedy(model, policy, prompts, 80) for policy in (base, replace(base, resident=True)))
    np.testing.assert_array_equal(tokens, resident[0])
    np.testing.assert_array_equal(logits, resident[1])


@pytest.mark.slow
@pytest.mark.parametrize("resident", [True, False])
def test_rows_that_have_ended_cost_no_fetches(bundled, resident):
    """The bundled model answers a short question and stops; the other row decodes to its limit."""
    model, tokenizer = bundled
    prompt = (icejax.api.generate.ASSETS / "prompt.txt").read_text()
    question = prompt[prompt.rindex("Pass key ") :]
    context = prompt[prompt.index(question) - 10 :][:1200]
    options = dict(cache=Clustered(budget=64, resident=resident), max_new_tokens=48)
    stopped, running = icejax.generate(model, tokenizer, [context + question, context], **options)
    assert stopped.finish_reason == "stop" and running.finish_reason == "length"
    if resident:
        assert 0 < stopped.hit_rate < 1 and 0 < running.hit_rate < 1
    else:
        assert stopped.hit_rate == running.hit_rate == 0

    plan = plan_for(model, options["cache"], [list((context + question).encode()), list(context.encode())], 48)
    state, _, pool = prefill.prefill(model, [list((context + question).encode()), list(context.encode())], plan)
    decoding, fetched = DecodePrograms(model, plan), []
    for _ in range(47):
        state, step, pool = decoding.step(state, pool)
        fetched.append(StepCounters.read(step.counters).pages_fetched)
    fetched = np.stack(fetched)
    assert (fetched[stopped.new_tokens :, 0] == 0).all() and (fetched[: stopped.new_tokens - 1, 0] > 0).all()
    assert fetched[20:, 1].sum() > 0
