"""The core: rows come and go, and each row's answer is that of its prompt alone."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import icejax
from icejax.cache.registry import Clustered, Coded, Full, Packed, Quest, SnapKV, Streaming
from icejax.checks.errors import InputError
from icejax.engine.decode.step import DecodePrograms
from icejax.engine.request import AnswerOptions
from icejax.engine.response import GenerationResponse, join
from icejax.engine.sampling import Sampling
from icejax.engine.serving import core as core_module
from icejax.engine.serving.core import Core
from icejax.engine.serving.job import CoreSizes, Job
from icejax.runtime.compile_clock import Mark, clock
from tests import tolerances
from tests.helpers import families
from tests.helpers.letters import Letters

ROOM = 2048  # tokens: a budget for all tokens, even in partly filled pages
PAGES = dict(budget=ROOM, page_size=8, compact_every=32)
CACHES = {
    "full": Full(),
    "clustered": Clustered(**PAGES),
    "coded": Coded(**PAGES),
    "packed": Packed(**PAGES),
    "snapkv": SnapKV(budget=ROOM),
    "evicting": Streaming(budget=48),
}
LENGTHS = (200, 5, 40, 250, 33, 64, 9, 129, 77, 31)  # of prompts
LIMITS = (37, 45, 29, 41, 18, 50, 33)  # of answers, so that places become free at all phases of the window's page


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def steps_between_all_units(monkeypatch):
    """The units of a small model would all fit between two steps."""
    monkeypatch.setattr(core_module, "UNIT_S", -60.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Returns a model that also has sliding layers, whose rings wrap."""
    return families.load(families.build(families.row("qwen3-layer-types")), tmp_path_factory.mktemp("model"))


def job(prompt, index: int = 0, *, seed: int = 0, **options) -> Job:
    options = AnswerOptions(**dict(max_new_tokens=max(LIMITS)) | options)
    names = dict(index=index, number=index + 1, draw=(seed, index), started=Mark.now())
    return Job(tokens=np.asarray(prompt, np.int32), options=options, limit=options.max_new_tokens, **names)


def core_of(model, policy, *, places: int = 3, longest: int = 250, new: int = max(LIMITS), resizes=False, **options) -> Core:
    sizes = dict(places=places, prompt_tokens=longest, new_tokens=new, prompts=(longest,) * places, joins=True, resizes=resizes)
    return Core(model, Letters(), policy, CoreSizes(**sizes), **options)


def answers(core: Core) -> dict[int, GenerationResponse | InputError]:
    """Runs a core until it has answered all; returns whole answers and errors by index."""
    pieces = {}
    while core.busy:
        for ticket, outcome in core.step():
            pieces.setdefault(ticket.request.index, []).append(outcome)
    return {index: row[-1] if isinstance(row[-1], InputError) else join(row) for index, row in pieces.items()}


def alone(model, policy, prompt, **options) -> GenerationResponse:
    (answer,) = icejax.generate(
        model, Letters(), icejax.Request(prompt=prompt, index=options.pop("index", 0)), cache=policy, **options
    )
    return answer


def assert_all_free(core: Core) -> None:
    """Whoever comes next has all places and all extents."""
    extents = core.scheduler.extents
    assert not core.busy and not core.scheduler.decoding
    assert extents is None or extents.free == len(extents._users) - extents._users[0]


PROMPTS = [families.tokens(length, seed=i) for i, length in enumerate((*LENGTHS, *LENGTHS, *LENGTHS[:4]))]
ANSWERED = [*itertools.islice(itertools.cycle(LIMITS), len(PROMPTS))]  # tokens of each prompt's answer


@pytest.fixture(scope="module")
def of_full_cache(model):
    """The answers of rows of the full cache that begin together."""
    requests = [icejax.Request(prompt=prompt, max_new_tokens=n) for prompt, n in zip(PROMPTS, ANSWERED, strict=True)]
    return icejax.generate(model, Letters(), requests, cache=Full(), logprobs=0)


def answers_at_all_phases(model, policy) -> list[GenerationResponse]:
    """Answers of rows that join at each phase of the page, over compactions and a wrap of the pages of new tokens."""
    clocks, joined, pieces = [0], {}, {}
    core = core_of(model, policy, watch=lambda state: clocks.append(int(state.cache.lengths.clock)))
    for i, (prompt, limit) in enumerate(zip(PROMPTS, ANSWERED, strict=True)):
        core.submit(job(prompt, i, max_new_tokens=limit, logprobs=0))
    while core.busy:
        for _, piece in core.step():
            joined.setdefault(piece.row, clocks[-1])
            pieces.setdefault(piece.row, []).append(piece)
    assert_all_free(core)
    assert {clock % 8 for clock in joined.values()} == {*range(8)} and max(clocks) > core.plan.spec.new_capacity
    return [join(pieces[i]) for i in range(len(PROMPTS))]


def assert_equal(actual: GenerationResponse, expected: GenerationResponse) -> None:
    assert (actual.token_ids, actual.text, actual.finish_reason) == (expected.token_ids, expected.text, expected.finish_reason)
    scores = [[token.chosen.logprob for token in answer.logprobs] for answer in (actual, expected)]
    np.testing.assert_allclose(*scores, rtol=0, atol=tolerances.LOGITS)


@pytest.mark.parametrize("name", ["full", *map(slow, ("clustered", "coded", "packed", "snapkv"))])
def test_rows_that_come_and_go_equal_rows_that_begin_together(model, of_full_cache, name):
    for actual, expected in zip(answers_at_all_phases(model, CACHES[name]), of_full_cache, strict=True):
        assert_equal(actual, expected)


@pytest.mark.parametrize("name", ["full", *map(slow, ("clustered", "coded", "packed", "snapkv"))])
def test_rows_equal_themselves_while_steps_change_their_size(model, of_full_cache, name):
    """Two rows continue while three others end and three others come, to the last row; a second round compiles nothing."""
    limits, sizes, compiled = (37, 45, 6, 6, 6, 50, 4, 4), [], []
    core = core_of(model, CACHES[name], places=5, resizes=True, watch=lambda state: sizes.append(len(state.done)))
    for _ in range(2):
        before, pieces = clock().programs, []
        sizes.clear()
        for i, limit in enumerate(limits):
            while i == 5 and len(sizes) < 24:  # the first five run
                pieces += [piece for _, piece in core.step()]
            core.submit(job(PROMPTS[i], i, max_new_tokens=limit, logprobs=0))
        while core.busy:
            pieces += [piece for _, piece in core.step()]
        assert_all_free(core)
        assert [size for size, _ in itertools.groupby(sizes)] == [5, 4, 2, 5, 4, 2, 1]
        compiled.append(clock().programs - before)
        for i, limit in enumerate(limits):
            answer = join([piece for piece in pieces if piece.row == i])
            assert answer.token_ids == of_full_cache[i].token_ids[:limit] and len(answer.token_ids) == limit
            scores = [[token.chosen.logprob for token in row.logprobs[:limit]] for row in (answer, of_full_cache[i])]
            np.testing.assert_allclose(*scores, rtol=0, atol=tolerances.LOGITS)
    assert compiled[0] > 0 == compiled[1]
    assert DecodePrograms(model, core.plan).programs.program._cache_size() == 4


def test_a_batch_that_begins_or_changes_its_size_has_the_memory_of_earlier_ones(model, monkeypatch):
    """The C library holds freed arrays of some MB and puts no new ones into them, also after a cancelled row."""
    given = []
    monkeypatch.setattr("icejax.runtime.heap.give_back", lambda: given.append(len(core.scheduler.decoding)))
    core = core_of(model, CACHES["full"], places=2, resizes=True)
    for i, limit in enumerate((3, 9)):
        core.submit(job(PROMPTS[i], i, max_new_tokens=limit))
    while core.busy:
        list(core.step())
    assert given == [0, 2]  # before the first row begins, and when the second one joins
    for _ in range(2):
        ticket = core.submit(job(PROMPTS[0], 0, max_new_tokens=9))
        list(core.step())
        core.release(ticket)
    assert given == [0, 2, 0, 0]


@pytest.mark.slow
def test_a_row_that_evicts_equals_itself_alone_at_every_phase(model):
    for i, actual in enumerate(answers_at_all_phases(model, CACHES["evicting"])):
        assert_equal(actual, alone(model, CACHES["evicting"], PROMPTS[i], max_new_tokens=ANSWERED[i], logprobs=0))


KINDS = (Sampling(temperature=1.2), None, Sampling(temperature=0.9, repetition_penalty=1.3), Sampling(frequency_penalty=1.0))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kinds"), [("full", KINDS[:2]), ("full", KINDS), ("clustered", KINDS)])
def test_a_sampled_row_draws_the_same_whatever_its_place(model, name, kinds):
    """Rows that sample, rows with penalties and greedy rows, one after another and together."""
    options = [dict(seed=5, sampling=kinds[i % len(kinds)], max_new_tokens=10 + i) for i in range(9)]
    results = []
    for places, resizes in ((1, False), (3, False), (3, True)):
        core = core_of(model, CACHES[name], places=places, resizes=resizes)
        for i, row_options in enumerate(options):
            core.submit(job(PROMPTS[i], i, **row_options))
        results.append({i: answer.token_ids for i, answer in answers(core).items()})
    assert results[0] == results[1] == results[2] and len(results[0]) == len(options)
    core = core_of(model, CACHES[name])
    core.submit(job(PROMPTS[4], 4, **options[4] | dict(seed=6)))
    assert answers(core)[4].token_ids != results[0][4]


def test_each_row_reports_as_many_logprobs_as_it_asks_for(model, of_full_cache):
    core = core_of(model, Full(), places=2)
    counts = (None, 3, 0, 1, None, 2)
    for i, count in enumerate(counts):
        core.submit(job(PROMPTS[i], i, logprobs=count, max_new_tokens=6 + i))
    for i, answer in answers(core).items():
        assert answer.token_ids == of_full_cache[i].token_ids[: 6 + i]
        if counts[i] is None:
            assert answer.logprobs is None
        else:
            assert {len(token.top) for token in answer.logprobs} == {counts[i]}
            scores = [[token.chosen.logprob for token in reply.logprobs[: 6 + i]] for reply in (answer, of_full_cache[i])]
            np.testing.assert_allclose(*scores, rtol=0, atol=tolerances.LOGITS)


def test_a_stop_string_frees_the_place_for_the_next(model, of_full_cache):
    """The step behind the stop string runs already when the host reads it."""
    core, stops = core_of(model, Full(), places=2), {}
    for i in range(6):
        stops[i] = of_full_cache[i].text[5 + i : 8 + i]
        core.submit(job(PROMPTS[i], i, stop=stops[i]))
    for i, answer in answers(core).items():
        text = of_full_cache[i].text
        assert (answer.text, answer.finish_reason) == (text[: text.index(stops[i])], "stop")
    assert_all_free(core)


@pytest.mark.parametrize("name", ["full", slow("clustered")])
def test_a_row_without_finite_logits_fails_alone(tmp_path, name):
    """One fails with its first token, one in the midst of its answer; their places and extents go to the next rows."""
    model = families.load(families.build(families.row("llama-gqa")), tmp_path)
    prompts = [[token % 40 for token in families.tokens(12, seed=i)] for i in range(6)]
    sound = [answer.token_ids for answer in icejax.generate(model, Letters(), prompts, cache=Full(), max_new_tokens=9)]
    others = {token for i in (0, 3, 4, 5) for token in (*prompts[i], *sound[i])}
    at, bad = next((at, token) for at, token in enumerate(sound[2][:-1]) if at > 1 and token not in {*others, *prompts[2]})
    first = next(token for token in range(101) if token not in {*others, *prompts[2], *sound[2]})
    prompts[1][5] = first
    weight = model.model.embed_tokens.weight
    weight[...] = weight[...].at[jnp.asarray([bad, first])].set(jnp.nan)
    core, pieces = core_of(model, CACHES[name], places=2), {}
    for i, prompt in enumerate(prompts):
        core.submit(job(prompt, i, max_new_tokens=9, logprobs=1 if i in (2, 3) else None))
    while core.busy:
        for ticket, outcome in core.step():
            pieces.setdefault(ticket.request.index, []).append(outcome)
    assert_all_free(core)
    for i in (1, 2):
        *streamed, error = pieces[i]
        assert [piece.token_ids[0] for piece in streamed] == ([] if i == 1 else [*sound[2][: at + 1]])
        assert str(error) == (
            f"prompt {i + 1}: the model's logits are not finite: model.embed_tokens.weight holds NaN: fetch the checkpoint again"
        )
    for i in (0, 3, 4, 5):
        assert join(pieces[i]).token_ids == sound[i]


class OfAFew(Letters):
    """A tokenizer that fails at a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def decode(self, ids, **options):
        if self.token in ids:
            raise IndexError("piece id is out of range.")
        return super().decode(ids, **options)


@pytest.mark.parametrize("options", [dict(logprobs=101), dict(prompt_logprobs=1)], ids=["answer", "prompt"])
def test_a_row_whose_tokens_cannot_be_named_fails_alone(model, of_full_cache, options):
    """No text has the token, and only the row that reports log-probabilities names it."""
    seen = {token for i in (0, 1) for token in of_full_cache[i].token_ids}
    token = next(token for token in range(101) if token not in seen)
    core = core_of(model, Full(), places=2)
    core._tokenizer, prompt_logprobs = OfAFew(token), options.pop("prompt_logprobs", None)
    core.submit(job(PROMPTS[0], 0, max_new_tokens=LIMITS[0]))
    failing = job([token, *PROMPTS[5]], 2, **options)
    core.submit(dataclasses.replace(failing, prompt_logprobs=prompt_logprobs))
    core.submit(job(PROMPTS[1], 1, max_new_tokens=LIMITS[1]))
    replies = answers(core)
    assert_all_free(core)
    assert str(replies[2]).startswith("the tokenizer fails") and "out of range" in str(replies[2])
    assert [replies[i].token_ids for i in (0, 1)] == [of_full_cache[i].token_ids for i in (0, 1)]


def test_pages_of_a_row_without_finite_values_harm_no_later_row(tmp_path):
    """The later row is shorter and selects more pages than it has; the others still hold what the first row wrote."""
    model = families.load(families.build(families.row("llama-gqa")), tmp_path)
    prompt = [1 + token % 40 for token in families.tokens(20)]
    sound = alone(model, Full(), prompt, max_new_tokens=9)
    bad = next(token for token in range(101) if token not in {*prompt, *sound.token_ids})
    weight = model.model.embed_tokens.weight
    weight[...] = weight[...].at[bad].set(jnp.nan)
    core = core_of(model, Quest(budget=ROOM, page_size=8), places=1, longest=1000)
    core.submit(job([bad] * 1000, 0, max_new_tokens=9))
    core.submit(job(prompt, 1, max_new_tokens=9))
    replies = answers(core)
    assert "the model's logits are not finite" in str(replies[0])
    assert replies[1].token_ids == sound.token_ids


@pytest.fixture(scope="module")
def longrope(tmp_path_factory):
    """Returns a model whose keys change beyond 64 tokens."""
    return families.load(families.build(families.row("phi3-long"), num_hidden_layers=2), tmp_path_factory.mktemp("longrope"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "places", "resizes"),
    [("full", 2, False), ("full", 1, False), ("clustered", 2, False), ("clustered", 1, False), ("clustered", 2, True)],
)
def test_rows_that_outgrow_the_original_context_equal_themselves(longrope, name, places, resizes):
    """Prompts below, at and beyond the original context, in a core of several places and in one of a single place."""
    lengths, limits = (30, 100, 64, 10, 63, 50, 65, 40), (50, 10, 9, 60, 3, 30, 5, 41)
    requests = [
        icejax.Request(prompt=families.tokens(length, seed=length), max_new_tokens=limit)
        for length, limit in zip(lengths, limits, strict=True)
    ]
    core = core_of(longrope, CACHES[name], places=places, longest=100, new=60, resizes=resizes)
    for i, request in enumerate(requests):
        core.submit(job(request.prompt, i, max_new_tokens=request.max_new_tokens))
    replies = answers(core)
    assert_all_free(core)
    together = icejax.generate(longrope, Letters(), requests, cache=Full())
    assert [replies[i].token_ids for i in range(len(requests))] == [answer.token_ids for answer in together]


def cancels_at_random(core: Core, count: int, *, seed: int) -> None:
    """Submits `count` jobs and releases many at a random moment of their way; some twice, some when they are over."""
    draw, tickets, number, released = np.random.default_rng(seed), [], 0, set()

    def release() -> None:
        ticket = tickets[draw.integers(len(tickets))]
        released.add(ticket)
        core.release(ticket)

    while number < count or core.busy:
        if number < count and draw.random() < 0.5:
            prompt = PROMPTS[draw.integers(len(PROMPTS))]
            tickets.append(core.submit(job(prompt, number, max_new_tokens=int(draw.integers(1, 40)))))
            number += 1
        for ticket, _ in core.step():
            assert ticket not in released
            if draw.random() < 0.1:
                release()
        while tickets and draw.random() < 0.2:
            release()
        held = [ticket for ticket in tickets if ticket.at is not None]
        assert {ticket.at: ticket for ticket in held} == core.scheduler.decoding and len(held) == len(core.scheduler.decoding)
    assert_all_free(core)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "share"),
    [("clustered", 25, 1.0), *((name, 400, 0.5) for name in ("full", "clustered", "coded"))],
)
def test_cancelled_rows_leave_nothing_behind(model, of_full_cache, name, count, share):
    """In the queue, between units of prefill and while decoding; who comes later has the answer of a prompt alone."""
    core = core_of(model, CACHES[name], share=share)
    cancels_at_random(core, count, seed=3)
    for i in range(4):
        core.submit(job(PROMPTS[i], i, max_new_tokens=ANSWERED[i]))
    assert {i: answer.token_ids for i, answer in answers(core).items()} == {i: of_full_cache[i].token_ids for i in range(4)}


def test_a_prompt_cancelled_between_units_is_not_gone_on_with(model, of_full_cache):
    core = core_of(model, CACHES["full"], share=0.5)
    ticket = core.submit(job(PROMPTS[1], 1, max_new_tokens=4))
    assert [*core.step()] == [] and core.scheduler.prefilling is ticket
    core.release(ticket)
    assert_all_free(core)
    core.submit(job(PROMPTS[0], 0, max_new_tokens=ANSWERED[0]))
    assert answers(core)[0].token_ids == of_full_cache[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "clustered", "snapkv"])
def test_prompts_prefilled_in_units_between_steps_equal_others(model, of_full_cache, name):
    """Steps of other rows run between the units, and some of these rows end there."""
    core = core_of(model, CACHES[name], share=0.5)
    for i, (prompt, limit) in enumerate(zip(PROMPTS, ANSWERED, strict=True)):
        core.submit(job(prompt, i, max_new_tokens=limit, logprobs=0))
    replies = answers(core)
    assert_all_free(core)
    for i, expected in enumerate(of_full_cache):
        assert_equal(replies[i], expected)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "places"), [("clustered", 2), *((name, 1) for name in ("full", "clustered", "coded"))])
def test_prompts_behind_a_cached_prefix_equal_themselves(model, name, places):
    """The second prompt is prefilled in two texts, the later ones begin with an entry; prompts may have several extents."""
    sizes = dict(places=places, prompt_tokens=1000, new_tokens=40, prompts=(1000,) * places, joins=True, prefix_memory=2**24)
    core, document = Core(model, Letters(), CACHES[name], CoreSizes(**sizes)), families.tokens(300)
    prompts = [[*document, *families.tokens(270 + 5 * i, seed=i)] for i in range(4)]
    for i, prompt in enumerate(prompts):
        core.submit(job(prompt, i, max_new_tokens=40, logprobs=0))
    replies = answers(core)
    options = dict(max_new_tokens=40, logprobs=0, context_length=1000)
    expected = icejax.generate(model, Letters(), prompts, cache=Full(), **options)
    for i in range(4):
        assert_equal(replies[i], expected[i])
    assert [replies[i].cached_tokens for i in range(4)] == [0, 0, 256, 256]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clustered", "coded"])
def test_answers_to_one_prompt_write_new_tokens_apart(model, name):
    """A prompt of 48 pages, whose extent also holds the first pages of new tokens."""
    sizes = dict(places=2, prompt_tokens=300, new_tokens=60, prompts=(300,) * 2, joins=True, samples=True)
    core, prompt = Core(model, Letters(), CACHES[name], CoreSizes(**sizes)), families.tokens(300)
    assert core.plan.prompt_pages == 48
    options = dict(max_new_tokens=60, sampling=Sampling(temperature=1.0), logprobs=0)
    for i in range(2):
        core.submit(dataclasses.replace(job(prompt, i, **options), sample=i, samples=2))
    replies = answers(core)
    for i in range(2):
        assert_equal(replies[i], alone(model, CACHES[name], prompt, index=i, context_length=400, **options))
    assert replies[1].cached_tokens == 300


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "clustered", "coded"])
def test_cancels_leave_cached_prefixs_and_nothing_else(model, name):
    """Prompts that begin alike share extents; all but those of the store are free at the end, and these when they are evicted."""
    sizes = dict(places=3, prompt_tokens=500, new_tokens=40, prompts=(500,) * 3, joins=True, prefix_memory=2**24)
    core, draw = Core(model, Letters(), CACHES[name], CoreSizes(**sizes), share=0.5), np.random.default_rng(5)
    documents = [families.tokens(300, seed=seed) for seed in range(3)]
    prompts = [[*documents[i % 3], *families.tokens(20 + i, seed=i)] for i in range(12)]
    expected = [answer.token_ids for answer in icejax.generate(model, Letters(), prompts, cache=Full(), max_new_tokens=40)]
    tickets, replies, capacity = [], {}, core.scheduler.extents and core.scheduler.extents.free
    while len(tickets) < 60 or core.busy:
        if len(tickets) < 60 and draw.random() < 0.3:
            tickets.append(core.submit(job(prompts[draw.integers(12)], len(tickets), max_new_tokens=40)))
        for ticket, piece in core.step():
            replies.setdefault(ticket, []).append(piece.token_ids[0])
            if draw.random() < 0.01:
                core.release(ticket)
        if tickets and draw.random() < 0.1:
            core.release(tickets[draw.integers(len(tickets))])
    for ticket, tokens in replies.items():
        number = prompts.index(ticket.request.tokens.tolist())
        assert tuple(tokens) == expected[number][: len(tokens)]
    assert core._prefix_cache.prefixes.hits > 0
    while core._prefix_cache.prefixes.evict():
        pass
    assert capacity is None or core.scheduler.extents.free == capacity


def test_a_row_released_within_a_step_has_no_more_pieces(model):
    core = core_of(model, Full(), places=2)
    tickets = [core.submit(job(PROMPTS[i], i)) for i in (1, 6)]
    while (count := len(list(core.step()))) < 2:
        assert count == 0
    pieces = []
    for ticket, _ in core.step():
        pieces.append(ticket)
        core.release(tickets[0] if ticket is tickets[1] else tickets[1])
    assert len(pieces) == 1 and len(list(core.step())) == 1
    core.release(pieces[0])
    assert_all_free(core)


def test_a_job_that_is_refused_leaves_nothing_behind(model):
    sizes = CoreSizes(places=2, prompt_tokens=2000, new_tokens=20, prompts=(100, 100), joins=True)
    core = Core(model, Letters(), CACHES["clustered"], sizes, most_waiting=1)
    with pytest.raises(InputError, match="the request needs . extents of host memory and the pool has .: shorten it"):
        core.submit(job(families.tokens(2000), 0, max_new_tokens=20))
    assert not core.busy
    tickets = [core.submit(job(PROMPTS[0], 0, max_new_tokens=2)) for _ in range(3)]  # for two a place is free
    with pytest.raises(InputError, match="1 requests wait already, as many as may: try again later"):
        core.submit(job(PROMPTS[1], 1, max_new_tokens=2))
    for ticket in tickets:
        core.release(ticket)
    assert_all_free(core)
