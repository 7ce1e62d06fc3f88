"""The prefix store in memory: the second prompt begins behind the first one's cache and is answered as by itself."""

import dataclasses
import itertools

import numpy as np
import pytest

import icejax
from icejax.cache.registry import Clustered, Full, Kivi, Streaming
from icejax.engine.serving import core as core_module
from icejax.engine.serving.core import Core
from icejax.engine.serving.job import CoreSizes
from icejax.engine.serving.prefixes import Entry, Prefixes, chain
from icejax.engine.serving.scheduler import Scheduler, Work
from tests.engine.test_core import alone, answers, assert_all_free, assert_equal, job, slow
from tests.helpers import families
from tests.helpers.letters import Letters

PAGES = dict(budget=2048, page_size=8, compact_every=32)  # a budget for all tokens, even in partly filled pages
CACHES = {
    "full": Full(),
    "clustered": Clustered(**PAGES),
    "kivi": Kivi(),
    "evicting": Streaming(budget=48),
}
DOCUMENT = families.tokens(1100)
QUESTIONS = [families.tokens(20 + 5 * i, seed=i) for i in range(3)]
PROMPTS = [[*DOCUMENT, *question] for question in QUESTIONS]
LONG = [*DOCUMENT, *families.tokens(300, seed=7)]  # its question is longer than a tail
ANSWER = dict(max_new_tokens=10, logprobs=0)


@pytest.fixture(autouse=True)
def steps_between_all_pieces(monkeypatch):
    monkeypatch.setattr(core_module, "UNIT_S", -60.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models by name: one with full attention alone, and one that also has sliding layers, whose caches cannot be cut."""
    return {
        name: families.load(families.build(families.row(name)), tmp_path_factory.mktemp(name))
        for name in ("qwen3-plain", "qwen3-layer-types")
    }


def core_of(model, policy, *, places: int = 1, longest: int = 1500, memory: int = 2**26, **options) -> Core:
    sizes = dict(places=places, prompt_tokens=longest, new_tokens=40, prompts=(longest,) * places, joins=True)
    return Core(model, Letters(), policy, CoreSizes(**sizes, prefix_memory=memory, prefix_disk=2**30), **options)


def ask(core: Core, *prompts, salt: str = "") -> list[icejax.GenerationResponse]:
    """Answers prompts one after another."""
    replies = []
    for prompt in prompts:
        core.submit(dataclasses.replace(job(prompt, **ANSWER), salt=salt))
        replies.append(answers(core)[0])
    return replies


def assert_answered(replies, model, prompts) -> None:
    for reply, prompt in zip(replies, prompts, strict=True):
        assert_equal(reply, alone(model, Full(), prompt, context_length=2000, **ANSWER))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "clustered"])
def test_another_row_decodes_between_the_layers_of_a_question(models, name, monkeypatch):
    model, works, ran = models["qwen3-plain"], [], Scheduler.ran
    core = core_of(model, CACHES[name], places=2, share=0.5)
    row = families.tokens(50, seed=9)
    ask(core, *PROMPTS[:2])  # the second question compiles what the third one runs
    monkeypatch.setattr(Scheduler, "ran", lambda self, work, seconds: (works.append(work), ran(self, work, seconds)))
    core.submit(job(row, 0, max_new_tokens=40, logprobs=0))
    while not core.scheduler.decoding:
        assert not list(core.step())
    works.clear()
    core.submit(job(PROMPTS[2], 1, **ANSWER))
    both = answers(core)
    assert works.count(Work.PREFILL) == 1 + len(model.model.layers) and (Work.PREFILL,) * 2 not in itertools.pairwise(works)
    assert_answered([both[1]], model, PROMPTS[2:])
    assert_equal(both[0], alone(model, Full(), row, max_new_tokens=40, logprobs=0))


@pytest.mark.parametrize("share", [1.0, slow(0.5)])
def test_a_full_cache_is_cut_to_what_a_prompt_shares(models, share):
    """Prompts of 320 tokens and a few share 300 tokens, and then 306; one begins with all of another, one within another."""
    model, document = models["qwen3-plain"], DOCUMENT[:300]
    first = [*document, *families.tokens(20, seed=1)]
    prompts = [
        first,
        [*document, *families.tokens(30, seed=2)],
        [*first[:306], 1 - first[306] % 2],
        [*first, 5],
        first[:290],
        first,
    ]
    core = core_of(model, Full(), longest=400, share=share)
    replies = ask(core, *prompts)
    assert [reply.cached_tokens for reply in replies] == [0, 300, 306, 320, 289, 320]
    assert_answered(replies, model, prompts)
    other = [*document[:255], 1 - document[255] % 2, *document[256:]]
    assert ask(core, other)[0].cached_tokens == 0  # less than a block
    assert ask(core, first, salt="mine")[0].cached_tokens == 0
    assert core._prefix_cache.prefixes.hits == 300 + 306 + 320 + 289 + 320
    of_token, of_logits = core.plan.spec.token_bytes * len(core.plan.policies), 4 * model.config.vocab_size
    for entry in core._prefix_cache.prefixes._entries:  # none holds the end of the entry that it began with
        assert entry.nbytes == entry.length * of_token + of_logits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "places"),
    [
        ("clustered", "qwen3-layer-types", 2),
        ("clustered", "qwen3-plain", 1),
        ("full", "qwen3-layer-types", 1),
    ],
)
def test_the_second_question_begins_behind_the_document(models, name, model, places):
    """A cache that cannot be cut is stored without its last 256 tokens; a longer question computes the document once more."""
    core, prompts = core_of(models[model], CACHES[name], places=places), [*PROMPTS, LONG, PROMPTS[1]]
    replies = ask(core, *prompts)
    assert [reply.cached_tokens for reply in replies] == [0, 864, 864, 864, len(PROMPTS[1])]
    assert_answered(replies, models[model], prompts)
    while core._prefix_cache.prefixes.evict():
        pass
    assert_all_free(core)
    core = core_of(models[model], CACHES[name], places=places)
    prompts = [LONG, *PROMPTS]
    replies = ask(core, *prompts)
    assert [reply.cached_tokens for reply in replies] == [0, 0, 1024, 1024]
    assert_answered(replies, models[model], prompts)


@pytest.mark.slow
def test_a_row_behind_a_cut_prefix_equals_one_that_was_cut_there(models):
    """With a small budget pages matter: the first answer and the second one to a prompt come from the same pages."""
    model, policy = models["qwen3-plain"], Clustered(budget=64, page_size=8)
    first = ask(core_of(model, policy), PROMPTS[0])[0]
    core = core_of(model, policy)
    # The prompt without its end has the same first 864 tokens, and its own question behind them.
    second = ask(core, [*PROMPTS[0][:864], *families.tokens(256, seed=3)], PROMPTS[0])[1]
    assert second.cached_tokens == 864
    assert_equal(second, first)


@pytest.mark.slow
def test_coded_rings_are_stored_without_their_end_and_evicted_tokens_are_not(models):
    model = models["qwen3-plain"]
    assert [reply.cached_tokens for reply in ask(core_of(model, CACHES["kivi"]), *PROMPTS[:2])] == [0, 864]
    replies = ask(core_of(model, CACHES["evicting"]), *PROMPTS[:2], PROMPTS[1])
    assert [reply.cached_tokens for reply in replies] == [0, 0, len(PROMPTS[1])]


@pytest.mark.slow
def test_nothing_follows_a_prefix_that_leaves_sinks_empty(models):
    """A row that joins a batch tells by the place of its window alone how many sinks it has."""
    prompts, policy = [DOCUMENT[:256], *([*DOCUMENT[:280], *question] for question in QUESTIONS)], Clustered(**PAGES, sinks=300)
    replies = ask(core_of(models["qwen3-plain"], policy, places=2, longest=400), *prompts, prompts[1])
    assert [reply.cached_tokens for reply in replies] == [0, 0, 0, 0, len(prompts[1])]
    assert_answered(replies, models["qwen3-plain"], [*prompts, prompts[1]])


@pytest.mark.slow
@pytest.mark.parametrize("length", [1270, 1530])
def test_a_prompt_that_fills_the_context_is_stored_too(models, length):
    """The pages of 1,530 tokens less 256 are padded to all 1,536 of the context: those behind hold none, and are used again."""
    model, document = models["qwen3-plain"], families.tokens(length - 20, seed=11)
    prompts = [[*document, *question] for question in QUESTIONS[:1] + [QUESTIONS[1][:20]]]
    replies = ask(core_of(model, CACHES["clustered"], longest=1536), *prompts)
    assert [reply.cached_tokens for reply in replies] == [0, length - 256]
    assert_answered(replies, model, prompts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "clustered"])
def test_the_second_question_is_stored_on_the_disk(models, tmp_path, name):
    """A later engine answers the third question behind it; what two prompts shared is in the folder, and nothing of their ends."""
    model = models["qwen3-plain"]
    held = {"full": [0, 1023, 1024], "clustered": [0, 864, 864]}[name]
    replies = ask(core_of(model, CACHES[name], prefix_dir=tmp_path), *PROMPTS[:2])
    replies += ask(core_of(model, CACHES[name], prefix_dir=tmp_path), PROMPTS[2])
    assert [reply.cached_tokens for reply in replies] == held
    assert_answered(replies, model, PROMPTS)
    assert len([*tmp_path.rglob("*.arrays")]) == 1


@pytest.mark.slow
def test_several_answers_without_a_store_are_those_of_one(models):
    """`generate` prefills a prompt in one piece, however many answers it has."""
    options = dict(cache=Clustered(budget=64, page_size=8), max_new_tokens=10, context_length=2000)
    (one,) = icejax.generate(models["qwen3-plain"], Letters(), [PROMPTS[0]], batch_size=1, **options)
    two = icejax.generate(models["qwen3-plain"], Letters(), [PROMPTS[0]], batch_size=1, n=2, **options)
    assert {reply.token_ids for reply in two} == {one.token_ids}


def entry(tokens, *, nbytes: int = 100, salt: str = "", **fields) -> Entry:
    options = dict(table=None, pages=0, logits=None, extends=True, can_cut=False, followers=0) | fields
    return Entry(np.asarray(tokens, np.int32), None, nbytes, hashes=chain(tokens, salt), **options)


def held(store: Prefixes, tokens, salt: str = "") -> int:
    return store.find(np.asarray(tokens, np.int32), chain(tokens, salt)).held


def test_entries_serve_what_they_can():
    whole, cut, evicted = ([number] * 600 for number in (1, 2, 3))
    store = Prefixes(None, most_bytes=1000)
    for made in (entry(whole), entry(cut, can_cut=True), entry(evicted, extends=False)):
        store.add(made)
    assert [held(store, tokens) for tokens in (whole, cut, evicted)] == [600] * 3
    assert [held(store, [*tokens, 9]) for tokens in (whole, cut, evicted)] == [600, 600, 0]
    assert [held(store, [*tokens[:599], 9]) for tokens in (whole, cut, evicted)] == [0, 599, 0]
    assert [held(store, tokens[:300]) for tokens in (whole, cut, evicted)] == [0, 299, 0]
    assert [held(store, [*cut[:count], 9]) for count in (255, 256)] == [0, 256]
    assert held(store, cut, salt="other") == 0
    store.add(entry([*cut[:400], *[5] * 300], can_cut=True))
    assert [held(store, [*cut[:400], *[5] * count, 9]) for count in (0, 100, 250)] == [400, 500, 650]
    assert held(store, [*cut, 7, 7]) == 600


def test_without_a_store_the_prompt_of_a_second_answer_is_cut_nowhere(models):
    """Its cache was too large to be stored for the second answer."""
    sizes = dict(places=1, prompt_tokens=1500, new_tokens=40, prompts=(1500,), joins=True, samples=True)
    core = Core(models["qwen3-plain"], Letters(), CACHES["clustered"], CoreSizes(**sizes))
    core._prefix_cache.prefixes.see(chain(DOCUMENT, ""))
    ticket = core.submit(job(DOCUMENT))
    core.scheduler.next()
    assert ticket.route.cuts == (len(DOCUMENT),)


def test_a_whole_entry_goes_before_one_that_gives_less_than_a_block_more():
    store = Prefixes(None, most_bytes=1000)
    store.add(entry([1] * 900, can_cut=True))
    store.add(entry([1] * 300))
    assert [held(store, [*[1] * count, 2]) for count in (400, 555, 556)] == [300, 300, 556]


def test_prefixes_of_several_prompts_stay_and_leave_room_for_new_ones():
    store = Prefixes(None, most_bytes=400)
    shared = [entry([number] * 300, followers=2) for number in range(3)]
    for made in shared:
        store.add(made)
    for number in range(10, 20):  # each prompt alone
        store.add(entry([number] * 300))
        assert held(store, [number] * 300) == 300
        assert all(held(store, [other] * 300) == 300 for other in range(3))
    assert [held(store, [number] * 300) for number in range(10, 20)] == [0] * 9 + [300]
    store.add(entry([30] * 300, followers=2))  # the fourth that is shared: the one that was not used for the longest time goes
    assert [held(store, [number] * 300) for number in (0, 1, 2, 19, 30)] == [0] + [300] * 4


def test_the_prompt_without_its_end_outlasts_the_whole_one():
    store = Prefixes(None, most_bytes=100)
    document = entry([1] * 300, followers=1)
    store.add(document)
    store.add(entry([1] * 400), before=document)
    assert held(store, [*[1] * 300, 2]) == 300


def test_a_chats_newest_turn_outlasts_the_one_before():
    store = Prefixes(None, most_bytes=100)
    store.add(entry([1] * 300, followers=1))
    store.add(entry([1] * 400))
    assert held(store, [*[1] * 400, 2]) == 400


def test_no_entry_is_found_by_what_was_evicted():
    store = Prefixes(None, most_bytes=1000)
    store.add(entry([1] * 600, can_cut=True))
    store.add(entry([1] * 512, can_cut=True))
    assert store.evict() and held(store, [*[1] * 550, 2]) == 512
    assert store.evict() and not store.evict() and held(store, [1] * 600) == 0 and not store._by_blocks


@pytest.mark.parametrize("asks", [{}, dict(explain=True), dict(prompt_logprobs=1)], ids=["reads", "explains", "scores"])
def test_entries_go_for_a_prompt_whether_or_not_it_reads_them(models, asks):
    """Entries have all extents of the pool; nothing else would ever free one."""
    core = core_of(models["qwen3-plain"], CACHES["clustered"], longest=200, memory=2**22)
    store, extents = core._prefix_cache.prefixes, core.scheduler.extents
    while extents.free:
        table = extents.take(np.ones(1, bool))
        store.add(entry([extents.free] * 200, table=table, pages=25))
        extents.give_back(table)
    core.submit(dataclasses.replace(job(families.tokens(100), **ANSWER), **asks))
    assert core.scheduler.next() is Work.PREFILL and store._entries
