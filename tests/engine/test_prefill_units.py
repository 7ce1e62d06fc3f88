"""Prefill in units: a row equals a whole prefill of it, and steps of other rows between two units change nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icejax.cache.pool import allocation
from icejax.cache.pool.host_pool import Pool
from icejax.cache.pool.page_format import without_codes
from icejax.cache.protocol import CachePolicy
from icejax.cache.registry import Clustered, Coded, Full, Quest, SnapKV
from icejax.cache.sizes import CacheSpec
from icejax.checkpoint import load_model
from icejax.config import ModelConfig
from icejax.engine.batch import insert
from icejax.engine.buckets import bucket
from icejax.engine.decode.state import DecodeState, Step
from icejax.engine.decode.step import DecodePrograms
from icejax.engine.plan import Plan
from icejax.engine.prefill import prefill
from icejax.engine.sampling import Sampling
from icejax.engine.units import programs
from icejax.engine.units.job import PrefillJob
from icejax.engine.units.sizes import UnitSizes, _largest, unit_sizes
from icejax.models.decoder import CausalLM
from icejax.models.registry import family
from icejax.ops.quantized.products import Grouped
from tests import tolerances
from tests.engine.test_batch import EXACT, Batch, assert_alone
from tests.helpers import families
from tests.helpers.policies import KINDS, by_row
from tests.helpers.run import plan_for

PROMPT = families.tokens(300)  # padded to 384
SIZES = UnitSizes(tokens=128, queries=64)
GREEDY, DRAWN = Sampling(), Sampling(temperature=0.8, repetition_penalty=1.2)


def in_units(
    model: CausalLM, plan: Plan, pool: Pool | None, table, prompt=PROMPT, *, sampling=GREEDY
) -> tuple[DecodeState, Step, jax.Array | None]:
    """Returns what `prefill` returns, computed unit by unit."""
    job, layers = PrefillJob(model, prompt, plan, table, sampling=sampling, draw=(3, 1), sizes=SIZES), []
    while not job.done:
        pool = job.advance(pool)
        layers.append(job.layers_done)
    assert layers == sorted(layers) and layers[-2:] == [len(plan.policies) - 1, len(plan.policies)]
    return *job.result(), pool


def both(
    model: CausalLM, policy: CachePolicy, *, sampling=GREEDY
) -> tuple[Plan, list[tuple[DecodeState, Step, jax.Array | None]]]:
    """Returns the plan, and the state, the step and the pool of a whole prefill and of one in units."""
    plan = plan_for(model, policy, [PROMPT], 40)
    whole = prefill(model, [PROMPT], plan, sampling=[sampling], draws=[(3, 1)])
    empty = None if whole[2] is None else allocation.allocate(*plan.pool_sizes(len(without_codes(whole[2]))))
    table = None if empty is None else np.asarray(whole[0].cache.table)
    return plan, [whole, in_units(model, plan, empty, table, sampling=sampling)]


def assert_equal(actual: DecodeState, expected: DecodeState) -> None:
    """Compares all arrays; sums over many keys may be large, so differences count relative to the largest number."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        if not jnp.issubdtype(y.dtype, jnp.floating):
            np.testing.assert_array_equal(x, y)
            continue
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        largest = np.abs(y[np.isfinite(y)]).max(initial=1.0)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerances.EXACT * largest)


def pages(pool: Pool | None) -> np.ndarray:
    return np.zeros(0) if pool is None else np.asarray(without_codes(pool)).view(np.float32)


def case(name: str, policy: CachePolicy, *, slow: bool = True):
    return pytest.param(
        name, policy, id=f"{name}-{type(policy).__name__}-{policy.budget}", marks=[pytest.mark.slow] if slow else []
    )


CASES = [
    case("qwen3-layer-types", EXACT["quest"]),  # sliding layers too
    case("qwen3-layer-types", Clustered(budget=64)),
    case("phi3-long", Full(), slow=False),  # LongRoPE, beyond the original context
    case("deepseek_v2-lite", Quest(budget=64)),  # latent attention and experts
    case("deepseek_v3-yarn", Clustered(budget=64)),
    case("llama-gqa", Clustered(budget=64, reuse=2)),  # a layer packs in the order of the layer before
    case("llama-gqa", Coded(budget=64)),
    case("qwen3_moe-plain", Clustered(budget=64)),
    case("mixtral-plain", SnapKV(budget=64)),
    case("gemma2-plain", Coded(budget=64)),  # soft caps
    case("gemma4_text-experts", Clustered(budget=64)),  # heads that differ from layer to layer
    case("gpt_oss-plain", Quest(budget=64)),  # sinks in the softmax
]


@pytest.mark.parametrize("name, policy", CASES)
def test_a_prefill_in_units_equals_a_whole_one(tmp_path, name, policy):
    """The first token's logits, all states, the pages, and the 20 tokens after them."""
    model = families.load(families.build(families.row(name)), tmp_path)
    plan, runs = both(model, policy)
    assert_equal(runs[1][0], runs[0][0])
    np.testing.assert_allclose(pages(runs[1][2]), pages(runs[0][2]), rtol=0, atol=tolerances.EXACT)
    tokens, logits = zip(*(decoded(model, plan, *run) for run in runs), strict=True)
    assert tokens[1] == tokens[0]
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=tolerances.EXACT)


@pytest.mark.parametrize("quantize", ["int4", "int8"])
@pytest.mark.parametrize(
    "name", ["llama-gqa", *(pytest.param(x, marks=pytest.mark.slow) for x in ("deepseek_v2-lite", "gemma4_text-experts"))]
)
def test_units_dequantize_each_matrix_once(tmp_path, monkeypatch, name, quantize):
    """Several units get dense matrices beside experts in codes, a single one gets codes; all equal a whole prefill."""
    in_codes, run_block = [], programs.run_block

    def record(layer, *arguments, **options):
        leaves = jax.tree.leaves(layer, is_leaf=lambda x: isinstance(x, Grouped))
        in_codes.append(any(isinstance(x, Grouped) and x.codes.ndim == 3 for x in leaves))
        return run_block(layer, *arguments, **options)

    monkeypatch.setattr(programs, "run_block", record)
    model = load_model(families.save(families.build(families.row(name)), tmp_path), quantize=quantize)
    _, runs = both(model, Full())
    assert_equal(runs[1][0], runs[0][0])
    assert len(in_codes) == 5 * model.config.num_hidden_layers and not any(in_codes)
    plan = plan_for(model, Full(), [PROMPT], 40)
    job = PrefillJob(model, PROMPT, plan, None, sampling=GREEDY, draw=(3, 1), sizes=UnitSizes(384, 384))
    while not job.done:
        job.advance(None)
    assert_equal(job.result()[0], runs[0][0])
    assert all(in_codes[-model.config.num_hidden_layers :])


def decoded(model: CausalLM, plan: Plan, state: DecodeState, step: Step, pool: Pool | None) -> tuple[list, np.ndarray]:
    """Returns 21 tokens, the first one included, and their logits."""
    decoding, steps = DecodePrograms(model, plan), [step]
    for _ in range(20):
        state, step, pool = decoding.step(state, pool)
        steps.append(step)
    return [int(x.tokens[0]) for x in steps], np.stack([np.asarray(x.logits) for x in steps])


def test_a_row_in_units_draws_its_first_token(tmp_path):
    model = families.load(families.build(families.row("phi3-long")), tmp_path)
    _, runs = both(model, Full(), sampling=DRAWN)
    assert_equal(runs[1][0], runs[0][0])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return families.load(families.build(families.row("llama-gqa")), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("row", by_row(rows=KINDS, slow=True))
def test_every_policy_keeps_the_same_in_units(llama, row):
    """Also policies whose KV heads are packed one by one."""
    _, runs = both(llama, row.small)
    assert_equal(runs[1][0], runs[0][0])
    np.testing.assert_allclose(pages(runs[1][2]), pages(runs[0][2]), rtol=0, atol=tolerances.EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [EXACT["clustered"], SnapKV(budget=64)], ids=["clustered", "snapkv"])
def test_nothing_comes_from_padding_in_units(tmp_path, policy):
    """The token of padding has an embedding of NaN, and so have its queries, keys and values."""
    model = families.load(families.build(families.row("qwen3-layer-types")), tmp_path)
    prompt = [max(token, 1) for token in PROMPT]
    plan, runs = plan_for(model, policy, [prompt], 40), []
    for value in (0.0, np.nan):
        weight = model.model.embed_tokens.weight
        weight.set_value(weight.get_value().at[0].set(value))
        pool, table = None, None
        if plan.pooled:
            table = 1 + np.arange(plan.extents(300).size, dtype=np.int32)[None]
            pool = allocation.allocate(*plan.pool_sizes(1 + table.size))
        runs.append(in_units(model, plan, pool, table, prompt))
    assert_equal(runs[1][0], runs[0][0])
    np.testing.assert_array_equal(pages(runs[1][2]), pages(runs[0][2]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clustered", "full", "coded", "quest"])
def test_steps_between_units_change_nothing(tmp_path, name):
    """A row decodes between every two units of the other, over flushes and compactions; both equal themselves alone."""
    model = families.load(families.build(families.row("qwen3-layer-types")), tmp_path)
    policy, prompts = EXACT[name], (families.tokens(280, seed=1), PROMPT)
    batch = Batch(model, policy, rows=2, longest=300)
    batch.join(prompts[0], 0)
    table = batch.extents.take(batch.plan.extents(300)[None]) if batch.plan.pooled else None
    job = PrefillJob(model, prompts[1], batch.row_plan, table, sampling=GREEDY, draw=(0, 0), sizes=SIZES)
    while not job.done:
        batch.pool = job.advance(batch.pool)
        batch.step()
    row, step = job.result()
    batch.state, batch.logits[1] = insert(batch.state, row, 1, plan=batch.plan), [np.asarray(step.logits)[0]]
    batch.step(40)
    for index, prompt in enumerate(prompts):
        assert_alone(model, policy, prompt, batch.logits[index])


@pytest.mark.slow
def test_experts_in_host_memory_are_those_the_prompt_takes(tmp_path):
    """Padding is routed too, but does not count."""
    families.save(families.build(families.row("qwen3_moe-plain"), num_hidden_layers=2), tmp_path)
    whole, model = (load_model(tmp_path, experts_on_host=3) for _ in range(2))
    prompt = families.tokens(70)  # the second block has 58 tokens of padding
    plan = plan_for(whole, Full(), [prompt], 40)
    before = [np.asarray(layer.offloaded.slot) for layer in model.model.layers]
    _, step, _ = prefill(whole, [prompt], plan)
    _, actual, _ = in_units(model, plan, None, None, prompt)
    np.testing.assert_allclose(actual.logits, step.logits, rtol=0, atol=tolerances.EXACT)
    after, expected = ([np.asarray(layer.offloaded.slot) for layer in x.model.layers] for x in (model, whole))
    np.testing.assert_array_equal(after, expected)
    assert not np.array_equal(after, before)


def config_of(**changes) -> ModelConfig:
    """Returns the config of Qwen2.5-Coder-0.5B, with changes."""
    sizes = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2)
    raw = families.SIZES | dict(model_type="qwen2", max_position_embeddings=32768) | sizes | changes
    return family(raw).read_config(raw)


@pytest.mark.parametrize("tokens", [300, 5000, 8192, 30_000])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_sizes_of_units_divide_the_prompt_and_bound_the_work(tokens, platform):
    """On a CPU the queries of a unit are fewer where there are more keys, or larger matrices."""
    config, padded = config_of(), bucket(tokens)
    heads = dict(batch_size=1, num_heads=14, num_kv_heads=2, head_dim=64, value_dim=64)
    spec = CacheSpec(**heads, prompt_capacity=padded, new_capacity=256, dtype="float32")
    sizes = unit_sizes(config, config.layers[0], spec, padded, platform)
    large = unit_sizes(config_of(intermediate_size=4864 * 16), config.layers[0], spec, padded, platform)
    assert padded % sizes.tokens == padded % sizes.queries == 0 and large.queries <= sizes.queries
    if platform == "cpu":
        assert sizes.queries == {300: 384, 5000: 192, 8192: 128, 30_000: 64}[tokens] and large.queries == 64
    else:
        assert sizes.queries == {300: 384, 5000: 2048, 8192: 2048, 30_000: 2048}[tokens]


@pytest.mark.parametrize(
    "tokens, padded, size", [(300, 8192, 256), (300, 384, 192), (400, 384, 384), (200, 12288, 192), (5, 96, 32), (90, 96, 32)]
)
def test_a_unit_is_the_largest_size_that_divides_a_prompt(tokens, padded, size):
    assert _largest(tokens, padded) == size and padded % size == 0
