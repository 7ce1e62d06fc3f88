"""Rows that join and leave a decoding batch: a row decodes as it would alone, and a fork as a run of its own."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import icejax
from icejax.cache.pool import allocation
from icejax.cache.pool.extents import Extents
from icejax.cache.registry import Clustered, Coded, Full, OmniKV, Packed, ParisKV, PQCache, Quest, RetroInfer, SnapKV, Streaming
from icejax.checks.errors import InputError
from icejax.engine import batch as rows
from icejax.engine.batch import empty_batch, end, extract, fold_into_prompt, fork, insert, resized
from icejax.engine.decode.state import Step
from icejax.engine.decode.step import DecodePrograms
from icejax.engine.extend import extend
from icejax.engine.plan import make_plan
from icejax.engine.prefill import prefill
from icejax.engine.sampling import row_keys
from tests import tolerances
from tests.helpers import families
from tests.helpers.run import greedy

ROOM = 2048  # tokens: a budget for all tokens, even in partly filled pages
PAGE = 8
EXACT = {
    "full": Full(),
    "clustered": Clustered(budget=ROOM, page_size=PAGE, compact_every=32),
    "resident": Clustered(budget=ROOM, page_size=PAGE, compact_every=32, resident=True),
    "quest": Quest(budget=ROOM, page_size=PAGE),
    "snapkv": SnapKV(budget=ROOM),
    "streaming": Streaming(budget=ROOM),
    "omnikv": OmniKV(budget=ROOM, generated=16, every=2, wait=0),
    "pqcache": PQCache(budget=ROOM, window=40),
    "retroinfer": RetroInfer(budget=ROOM),
    "pariskv": ParisKV(budget=ROOM),
    "coded": Coded(budget=ROOM, page_size=PAGE, compact_every=32),
    "packed": Packed(budget=ROOM, page_size=PAGE, compact_every=32),
    "look": Clustered(budget=ROOM, page_size=PAGE, compact_every=32, look=4),
}
SINGLE_TOKENS = (
    "pqcache",
    "retroinfer",
    "pariskv",
    "coded",
    "packed",
    "look",
)  # policies that fetch single tokens; test_omnikv has OmniKV


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Returns a model that also has sliding layers, whose rings wrap."""
    return families.load(families.build(families.row("qwen3-layer-types")), tmp_path_factory.mktemp("model"))


class Batch:
    """A decoding batch with places for `rows` rows, and the logits of every row, step by step."""

    def __init__(self, model, policy, *, rows: int, longest: int = 250, new: int = 250, extents: int = 40) -> None:
        self.model, self.plan = model, make_plan(model, policy, batch_size=rows, prompt_tokens=longest, new_tokens=new)
        self.row_plan = replace(self.plan, spec=replace(self.plan.spec, batch_size=1))
        self.state, self.programs, self.extents = empty_batch(self.plan), DecodePrograms(model, self.plan), Extents(extents)
        self.pool = allocation.allocate(*self.plan.pool_sizes(extents)) if self.plan.pooled else None
        self.logits: dict[int, list[np.ndarray]] = {}

    def prefill(self, prompt, **options):
        """Returns the state of a row after its prompt, and the step; the prompt's pages are written to the pool."""
        pool_and_table = None
        if self.pool is not None:
            pool_and_table = self.pool, self.extents.take(self.plan.extents(len(prompt))[None])
        row, step, self.pool = prefill(self.model, [prompt], self.row_plan, into=pool_and_table, **options)
        return row, step

    def join(self, prompt, index: int, **options) -> None:
        row, step = self.prefill(prompt, **options)
        self.state, self.logits[index] = insert(self.state, row, index, plan=self.plan), [np.asarray(step.logits)[0]]

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.state, step, self.pool = self.programs.step(self.state, self.pool)
            for index, row_logits in self.logits.items():
                row_logits.append(np.asarray(step.logits)[index])


def assert_alone(model, policy, prompt, logits) -> None:
    """Asserts that logits and tokens are those of greedy generation from the prompt alone."""
    tokens, expected, _ = greedy(model, policy, [prompt], len(logits))
    np.testing.assert_allclose(logits, expected[:, 0], rtol=0, atol=tolerances.LOGITS)
    np.testing.assert_array_equal(np.argmax(logits, -1), tokens[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quest", "full", "clustered", "snapkv", "streaming", *SINGLE_TOKENS])
def test_a_row_that_joins_at_any_step_goes_on_as_alone(model, name):
    """At every phase of the window's page, over compactions and wraps of sliding layers' rings, whatever other rows do."""
    policy, batch = EXACT[name], Batch(model, EXACT[name], rows=10)
    prompts = [families.tokens(length, seed=length) for length in (200, 5, 40, 250, 33, 64, 9, 129, 77, 31)]
    for index, prompt in enumerate(prompts):
        batch.join(prompt, index)
        batch.step(3 if index < 8 else 1)  # the phases mod 8 at which rows join: 0, 3, 6, 1, 4, 7, 2, 5, 0, 1
    batch.step(20)
    for index, prompt in enumerate(prompts):
        assert_alone(model, policy, prompt, batch.logits[index])


@pytest.mark.parametrize("name", [*map(slow, ("full", "clustered", "quest", *SINGLE_TOKENS))])
def test_the_pages_of_new_tokens_are_filled_over_and_over(model, name):
    """A row joins a freed place 20 slots before the last of these pages; its later tokens go to the first pages again."""
    policy, batch = EXACT[name], Batch(model, EXACT[name], rows=2)
    batch.join(families.tokens(150), 1)
    free = batch.extents.free
    batch.step(batch.plan.spec.new_capacity - 20)
    batch.state, _ = end(batch.state, 1, batch.extents), batch.logits.pop(1)
    prompt = families.tokens(90, seed=1)
    batch.join(prompt, 1)
    assert batch.extents.free == free
    batch.step(60)
    assert_alone(model, policy, prompt, batch.logits[1])


def test_a_row_that_decodes_all_it_may_has_its_windows(model):
    """A row may decode more than the 16 tokens planned for, as the plan pads them."""
    batch, prompt = Batch(model, Full(), rows=1, longest=16, new=16), families.tokens(16)
    batch.join(prompt, 0)
    batch.step(40)
    assert 40 < batch.plan.joining_tokens
    assert_alone(model, Full(), prompt, batch.logits[0])


def test_pages_for_new_tokens_are_whole_rounds_of_compaction(model):
    """Otherwise a round would wrap from their end to their start. Without room for a whole round, none runs."""
    sizes = dict(batch_size=1, prompt_tokens=100, new_tokens=300)
    plans = [make_plan(model, Clustered(budget=64, compact_every=every), **sizes) for every in (256, 512)]
    assert [(plan.growth_pages * plan.page_size, plan.compact_every) for plan in plans] == [(512, 256), (384, 0)]


@pytest.mark.slow
def test_the_last_round_before_that_is_compacted_as_the_others(model):
    """A round longer than the prompts, which ends at the step at which the pages of new tokens are reused from the first."""
    policy, prompt = Clustered(budget=ROOM, page_size=PAGE, compact_every=512), families.tokens(90)
    batch = Batch(model, policy, rows=1, longest=100, new=1000)
    batch.step(990)
    batch.join(prompt, 0)
    batch.step(60)
    assert_alone(model, policy, prompt, batch.logits[0])
    assert batch.plan.growth_pages == 128 and batch.plan.joining_tokens == 127 * PAGE - 512
    batch = Batch(model, policy, rows=1, new=500)
    batch.step()  # a row that begins with the batch needs no room beside its own
    with pytest.raises(InputError, match="rows cannot join a batch with room for 512 new tokens: plan for more"):
        batch.join(prompt, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clustered", "look"])
def test_nothing_is_read_of_what_others_have_left_in_the_pool(model, name):
    """The pool is full of NaN, and the row has only a part of the round that is compacted."""
    policy, prompt = replace(EXACT[name], compact_every=64), families.tokens(90)
    batch = Batch(model, policy, rows=1)

    def nothing(x: jax.Array) -> jax.Array:
        return jax.device_put(np.full(x.shape, 0x7FC00000 if x.dtype == np.uint32 else 0xFF, x.dtype), x.sharding)

    batch.pool = jax.tree.map(nothing, batch.pool)
    batch.step(41)
    batch.join(prompt, 0)
    batch.step(60)
    assert_alone(model, policy, prompt, batch.logits[0])


@pytest.mark.slow
def test_twins_that_settle_write_to_extents_of_their_own(model):
    policy, prompt, more = EXACT["clustered"], families.tokens(90), families.tokens(30, seed=2)
    batch = Batch(model, policy, rows=1, longest=500)
    batch.join(prompt, 0)
    batch.step(45)
    text = [*prompt, *np.argmax(batch.logits[0][:-1], -1).tolist()]
    twin, batch.pool = fork(batch.state, batch.pool, batch.extents, plan=batch.plan)
    states, results = [batch.state, twin], []
    for i in range(2):
        states[i], batch.pool = fold_into_prompt(states[i], batch.pool, batch.extents, plan=batch.plan, tokens=30)
        appended = [*more[i:], 7]
        states[i], step, batch.pool = extend(model, appended, batch.plan, states[i], batch.pool)
        results.append((appended, [np.asarray(step.logits)[0]]))
    programs_of = [DecodePrograms(model, batch.plan) for _ in states]
    for _ in range(20):
        for i, programs in enumerate(programs_of):
            states[i], step, batch.pool = programs.step(states[i], batch.pool)
            results[i][1].append(np.asarray(step.logits)[0])
    for appended, logits in results:
        assert_alone(model, policy, [*text, *appended], logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [Clustered(budget=64, page_size=PAGE, compact_every=32), Packed(budget=64, page_size=PAGE, exact=0)],
    ids=["clustered", "packed"],
)
def test_small_budget_selects_as_alone_where_pages_align(model, policy):
    batch, prompt = Batch(model, policy, rows=2), families.tokens(240)
    batch.step(32)
    batch.join(prompt, 1)
    batch.step(70)
    assert_alone(model, policy, prompt, batch.logits[1])


@pytest.mark.parametrize("name", ["full", *map(slow, ("clustered", "snapkv"))])
def test_a_row_taken_out_goes_on_alone(model, name):
    policy, batch = EXACT[name], Batch(model, EXACT[name], rows=3)
    for index, length in enumerate((30, 140, 80)):
        batch.join(families.tokens(length, seed=length), index)
        batch.step(7)
    (batch.state, row), row_logits = extract(batch.state, 1), batch.logits.pop(1)
    assert batch.state.cache.lengths.seen[1] == 0  # nothing is read for the free place
    programs = DecodePrograms(model, batch.row_plan)
    programs.clock = batch.programs.clock
    batch.join(families.tokens(60), 1)  # in the freed place
    for _ in range(40):
        row, step, batch.pool = programs.step(row, batch.pool)
        row_logits.append(np.asarray(step.logits)[0])
        batch.step()
    assert_alone(model, policy, families.tokens(140, seed=140), row_logits)
    assert_alone(model, policy, families.tokens(60), batch.logits[1])
    with pytest.raises(InputError, match="row 1 of the batch is taken: end it first, or take it out"):
        batch.join(families.tokens(60), 1)


@pytest.mark.parametrize("name", ["full", slow("clustered")])
def test_a_batch_of_another_size_has_its_rows_and_nothing_more(model, name):
    """Every array of a batch of three rows, and its newest step, against NumPy; the old arrays are gone."""
    rng, batch = np.random.default_rng(0), Batch(model, EXACT[name], rows=3)

    def numbered(x: jax.Array) -> jax.Array:
        return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.asarray(rng.integers(0, 2, x.shape), x.dtype)

    layers, table = jax.tree.map(numbered, batch.state.cache.layers), batch.state.cache.table
    table = None if table is None else numbered(table) + 5
    state = replace(batch.state, cache=replace(batch.state.cache, layers=layers, table=table), done=jnp.zeros(3, bool))
    state = replace(state, last_tokens=jnp.asarray([7, 8, 9]), key=row_keys([(1, 0), (2, 0), (3, 0)]))
    step = Step(jnp.asarray(rng.integers(0, 9, (8, 3))), jnp.asarray(rng.random((3, 5))))
    for places, size in (([2, 0], 2), ([0, 2], 4)):
        old, numbers = jax.tree.map(jnp.copy, state), [np.asarray(x) for x in jax.tree.leaves(layers)]
        new, results = resized(old, step, places, size)
        assert all(x.is_deleted() for x in jax.tree.leaves((old.cache.layers, old.key, old.done)))
        for x, before in zip(jax.tree.leaves(new.cache.layers), numbers, strict=True):
            each = len(before) // 3
            rows = np.concatenate([before[each * place : each * (place + 1)] for place in places])
            np.testing.assert_array_equal(np.asarray(x)[: len(rows)], rows)
            assert len(x) * 3 == len(before) * size
        assert new.last_tokens[:2].tolist() == [7 + place for place in places]
        np.testing.assert_array_equal(jax.random.key_data(new.key)[:2], jax.random.key_data(state.key)[np.asarray(places)])
        assert new.done.tolist() == [False, False, *[True] * (size - 2)]
        if table is not None:
            np.testing.assert_array_equal(new.cache.table[:2], np.asarray(table)[places])
            assert (np.asarray(new.cache.table[2:]) == 0).all()
        np.testing.assert_array_equal(results.counters[:, :2], np.asarray(step.counters)[:, places])
        np.testing.assert_array_equal(results.logits[:2], np.asarray(step.logits)[places])


@pytest.mark.parametrize(
    ("name", "begun"),
    [
        *(slow(name, 0) for name in ("clustered", "coded")),
        *(slow(name, 230) for name in ("clustered", "snapkv", "full", "resident", "quest", *SINGLE_TOKENS)),
    ],
)
def test_more_text_is_put_behind_a_row_that_then_joins_again(model, name, begun):
    """Its new tokens may have been compacted, and their pages reused from the first; the other row does not change."""
    policy, batch = EXACT[name], Batch(model, EXACT[name], rows=2, longest=500)
    batch.step(begun)
    batch.join(families.tokens(120, seed=1), 0)
    batch.step(6)
    prompt, more = families.tokens(90), families.tokens(40, seed=2)
    batch.join(prompt, 1)
    batch.step(45)
    text = [*prompt, *np.argmax(batch.logits.pop(1)[:-1], -1).tolist(), *more]
    batch.state, row = extract(batch.state, 1)
    row, batch.pool = fold_into_prompt(row, batch.pool, batch.extents, plan=batch.row_plan, tokens=len(more))
    row, step, batch.pool = extend(model, more, batch.row_plan, row, batch.pool)
    batch.step(3)
    batch.state, batch.logits[1] = insert(batch.state, row, 1, plan=batch.plan), [np.asarray(step.logits)[0]]
    batch.step(40)
    assert_alone(model, policy, text, batch.logits[1])
    assert_alone(model, policy, families.tokens(120, seed=1), batch.logits[0])


@pytest.mark.slow
def test_a_row_that_has_decoded_cannot_join(model):
    batch = Batch(model, EXACT["clustered"], rows=2)
    batch.join(families.tokens(90), 0)
    batch.step(3)
    batch.state, row = extract(batch.state, 0)
    with pytest.raises(
        InputError, match="a row that has decoded cannot join a batch: extract it, call fold_into_prompt and extend it"
    ):
        insert(batch.state, row, 1, plan=batch.plan)


@pytest.mark.slow
def test_a_row_that_has_become_too_long_is_told(model):
    batch = Batch(model, EXACT["clustered"], rows=1)
    batch.join(families.tokens(230), 0)
    batch.step(20)
    with pytest.raises(InputError, match="a row of .* pages does not fit prompts of at most 32: plan for longer prompts"):
        fold_into_prompt(extract(batch.state, 0)[1], batch.pool, batch.extents, plan=batch.row_plan, tokens=60)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [5, 40, 250, 300])
@pytest.mark.parametrize("name", ["full", "clustered", "quest"])
def test_a_fork_goes_on_in_its_own_way(model, name, steps):
    """Both decode as if never forked: over compactions, before and after the pages of new tokens are reused from the first."""
    policy, prompt = EXACT[name], families.tokens(200)
    batch = Batch(model, policy, rows=1)
    batch.step(max(0, steps - 40))
    batch.join(prompt, 0)
    batch.step(min(steps, 40))
    address = None if batch.pool is None else batch.pool.unsafe_buffer_pointer()
    twin, batch.pool = fork(batch.state, batch.pool, batch.extents, plan=batch.plan)
    twin_programs = DecodePrograms(model, batch.plan)
    twin_programs.clock, forced = batch.programs.clock, jnp.asarray([7], jnp.int32)
    twin, twin_logits = replace(twin, last_tokens=forced), []
    for _ in range(50):  # the two take turns
        twin, step, batch.pool = twin_programs.step(twin, batch.pool)
        twin_logits.append(np.asarray(step.logits)[0])
        batch.step()
    assert address is None or batch.pool.unsafe_buffer_pointer() == address
    assert_alone(model, policy, prompt, batch.logits[0])
    text = [*prompt, *np.argmax(batch.logits[0][: min(steps, 40)], -1).tolist(), 7]
    assert_alone(model, policy, text, twin_logits)


@pytest.mark.slow
def test_forks_share_what_neither_writes_and_give_it_back(model):
    batch = Batch(model, EXACT["clustered"], rows=1, longest=1500, extents=9)
    free = batch.extents.free
    batch.join(families.tokens(1500), 0)
    num_extents = free - batch.extents.free
    twin, batch.pool = fork(batch.state, batch.pool, batch.extents, plan=batch.plan)
    tables = [np.asarray(state.cache.table)[0] for state in (batch.state, twin)]
    shared = int((tables[0] == tables[1]).sum())
    assert shared == 3 and free - batch.extents.free == 2 * num_extents - shared
    with pytest.raises(InputError, match=r"the pool has . free extents and \d+ are needed: use a larger pool"):
        for _ in range(9):
            _, batch.pool = fork(batch.state, batch.pool, batch.extents, plan=batch.plan)
    end(twin, 0, batch.extents)
    end(batch.state, 0, batch.extents)


@pytest.mark.slow
def test_samples_of_a_row_do_not_depend_on_its_batch(bundled):
    """Nor on when it joined; the row beside it stays greedy, and without penalties."""
    model, tokenizer = bundled
    sampling = icejax.Sampling(temperature=1.5, top_k=20, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={97: 2})
    (single,) = icejax.generate(model, tokenizer, "import ", cache=Full(), sampling=sampling, seed=3, max_new_tokens=12)
    (baseline,) = icejax.generate(model, tokenizer, "def ", cache=Full(), max_new_tokens=17)
    batch, ids = Batch(model, Full(), rows=2), [tokenizer(text)["input_ids"] for text in ("def ", "import ")]
    batch.join(ids[0], 0)
    batch.step(5)
    row, step = batch.prefill(ids[1], sampling=[sampling], draws=[(3, 0)])
    batch.state, token_ids = insert(batch.state, row, 1, plan=batch.plan), [int(step.tokens[0])]
    for _ in range(len(single.token_ids) - 1):
        batch.step()
        token_ids.append(int(batch.state.last_tokens[1]))
    assert token_ids == list(single.token_ids)
    assert (
        np.argmax(batch.logits[0], -1).tolist()[: len(baseline.token_ids)] == list(baseline.token_ids)[: len(batch.logits[0])]
    )


@pytest.mark.slow
def test_joining_compiles_once_and_copies_nothing_of_the_pool(model):
    rows._insert.clear_cache()
    batch = Batch(model, EXACT["clustered"], rows=3)
    address = batch.pool.unsafe_buffer_pointer()
    for index in range(3):
        batch.join(families.tokens(50 + index), index)
        batch.step(2)
    assert rows._insert._cache_size() == 1 and batch.pool.unsafe_buffer_pointer() == address
