"""Sessions: a later question sees all earlier text, and a saved session continues bit for bit."""

import dataclasses
import pickle
import time

import numpy as np
import pytest

import icejax
from bench.needle import task
from icejax.cache.registry import Clustered, Full, SnapKV
from icejax.engine.decode.row import Row
from icejax.engine.decode.run import run_constants
from icejax.engine.plan import Plan
from icejax.files.atomic_folder import Claim, claim
from icejax.runtime import compiler_options
from icejax.session import session as module
from icejax.session import text_cache
from icejax.session.session import Session
from icejax.session.storage import ABOUT, ARRAYS
from tests.helpers import families, programs
from tests.helpers.documents import document
from tests.helpers.layer import assert_digests, stored
from tests.helpers.letters import Letters


@pytest.mark.slow
@pytest.mark.parametrize("cache", [Full(), Clustered(budget=64)], ids=["full", "clustered"])
def test_questions_follow_one_another(bundled, cache):
    text, questions = document()
    session = Session(*bundled, cache=cache, context_length=3000)
    answers = [session.ask(text + questions[0].text)] + [session.ask(q.text) for q in questions[1:]]
    assert [a.text for a in answers] == [q.answer for q in questions]
    # All tokens in order, with the end-of-text token after each answer.
    parts = [part for q in questions for part in (list(q.text.encode()), list(q.answer.encode()), [task.EOS])]
    assert session.token_ids == list(text.encode()) + [token for part in parts for token in part]
    assert [a.prompt_tokens for a in answers] == [len(text) + 12 + i * (12 + 7) for i in range(4)]


@pytest.mark.slow
def test_a_second_question_gives_what_one_long_prompt_gives(tmp_path):
    """A budget for all tokens approximates nothing, so consecutive texts equal one text."""
    model = families.load(families.build(families.row("llama-gqa")), tmp_path)
    tokenizer = Letters()
    session = Session(model, tokenizer, cache=Clustered(budget=2000), context_length=1200)
    first = session.ask("a" * 300 + "bcd", max_new_tokens=30)
    second = session.ask("zyx" * 40, max_new_tokens=30)
    whole_text = tokenizer.decode(session.token_ids[: 303 + first.new_tokens + 120])
    (expected,) = icejax.generate(model, tokenizer, whole_text, cache=Full(), max_new_tokens=30)
    assert second.token_ids == expected.token_ids and len(second.token_ids) == 30


@pytest.mark.slow
def test_each_text_is_asked_with_its_own_sampling(bundled):
    """Every sampling leaves only the best token, so all answers are the greedy ones."""
    text, questions = document()
    samplings = (None, icejax.Sampling(temperature=1.5, top_k=1), icejax.Sampling(temperature=0.5, min_p=1.0), None)
    session = Session(*bundled, cache=Full(), context_length=3000)
    turns = zip((text + questions[0].text, *(q.text for q in questions[1:])), samplings, strict=True)
    assert [session.ask(question, sampling=s).text for question, s in turns] == [q.answer for q in questions]


@pytest.mark.slow
@pytest.mark.parametrize("cache", [Full(), Clustered(budget=64), Clustered(budget=64, digest_dtype="int8")], ids=repr)
def test_a_loaded_session_answers_bit_for_bit(bundled, tmp_path, monkeypatch, cache):
    text, questions = document()
    session, estimates = Session(*bundled, cache=cache, context_length=3000), []
    monkeypatch.setattr(Claim, "check_room", lambda _, need: estimates.append(need))
    with claim(tmp_path / "kept", mark=ABOUT) as held:
        session.ask(text + questions[0].text, max_new_tokens=40, save_to=held)
        session.save(held)
        loaded = Session.load(tmp_path / "kept", *bundled)
        for question in questions[1:3]:
            session.save(held)
            assert 0.5 * estimates[-1] < (tmp_path / "kept" / ARRAYS).stat().st_size <= estimates[-1]
            for x in (session, loaded):
                x.last = x.ask(question.text, max_new_tokens=20, save_to=held)
            assert estimates[-1] == estimates[-2] and len(estimates) % 2
            assert session.last.token_ids == loaded.last.token_ids and session.token_ids == loaded.token_ids
            np.testing.assert_array_equal(session._cache.run.step.logits, loaded._cache.run.step.logits)


def test_a_policy_is_known_by_the_name_it_is_registered_by(bundled, tmp_path, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Mine(Full):
        weights: tuple[int, ...] = (1, 2)

    session = Session(*bundled, cache=Mine(), context_length=300)
    assert session.ask("hello " * 30, max_new_tokens=1).run.cache == "mine"
    with pytest.raises(icejax.InputError, match="Mine cache cannot be saved: register it in icejax.POLICIES"):
        session.save(tmp_path / "kept")
    with monkeypatch.context() as patch:
        patch.setitem(icejax.POLICIES, "another-name", Mine)
        assert run_constants(session._cache.run, Mine()).report.cache == "another-name"
        session.save(tmp_path / "kept")
        loaded = Session.load(tmp_path / "kept", *bundled, cache=Mine())
        assert loaded._cache.policy == Mine() and loaded.token_ids == session.token_ids
    with pytest.raises(icejax.InputError, match="saved with cache.name = another-name: register it in icejax.POLICIES, or"):
        Session.load(tmp_path / "kept", *bundled)


@pytest.mark.slow
def test_an_answer_that_is_not_read_to_its_end_is_gone_on_from(bundled):
    text, questions = document()
    session = Session(*bundled, cache=Clustered(budget=64), context_length=3000)
    for piece in session.stream(text + questions[0].text):
        if piece.new_tokens == 3:
            break
    assert session.token_ids[-3:] == list(questions[0].answer[:3].encode())
    assert session.ask("\n" + questions[1].text).text == questions[1].answer


@pytest.mark.slow
def test_an_end_mark_that_is_left_out_is_not_penalised(bundled, monkeypatch):
    """The chat template replaces the end mark, so the old one is not in the penalised text."""
    texts, row_options = [], text_cache.row_options
    monkeypatch.setattr(
        text_cache, "row_options", lambda rows, ids, size: texts.append(list(ids[0])) or row_options(rows, ids, size)
    )
    monkeypatch.setattr(
        Session, "_chat_turn", lambda self, text, _: ([dict(content="")], self.token_ids[:-1], list(text.encode()))
    )
    session = Session(*bundled, cache=Full(), context_length=3000)
    session.ask("a = 1\nb =", max_new_tokens=4)
    held = session.token_ids[:-1]
    session.messages = ["any"]
    list(session.stream_chat("c", sampling=icejax.Sampling(repetition_penalty=1.5), max_new_tokens=2))
    assert texts == [held]


@pytest.mark.slow
def test_a_session_of_another_model_or_cache_is_refused(bundled, tmp_path):
    text, questions = document()
    session = Session(*bundled, cache=Clustered(budget=64), context_length=3000)
    with pytest.raises(icejax.InputError, match="session is empty: ask something before saving it"):
        session.save(tmp_path / "kept")
    session.ask(text, max_new_tokens=2)
    session.save(tmp_path / "kept")
    other_model = families.load(families.build(families.row("llama-gqa")), tmp_path)
    with pytest.raises(
        icejax.InputError, match=r"was saved with config\.\w+ = .+, here it is .+: use the same, or another folder"
    ):
        Session.load(tmp_path / "kept", other_model, bundled[1])
    with pytest.raises(icejax.InputError, match=r"saved with cache\.budget = 64, here it is 128: use the same"):
        Session.load(tmp_path / "kept", *bundled, cache=Clustered(budget=128))
    model, tokenizer = icejax.load()
    weight = model.model.layers[0].mlp.up_proj.weight
    weight[...] = weight[...] + 1
    with pytest.raises(icejax.InputError, match=r"was saved with weights = \d+, here it is \d+"):
        Session.load(tmp_path / "kept", model, tokenizer)
    with pytest.raises(icejax.InputError, match="is no session: expected a folder that Session.save or --session wrote"):
        Session.load(tmp_path, *bundled)


@pytest.mark.slow
def test_digests_equal_the_pages_after_any_sequence_of_steps(bundled, tmp_path):
    """After a prompt, answers with flushes and compactions, a second text, and a save and load; the pool has the pages."""
    session = Session(*bundled, cache=Clustered(budget=64, compact_every=32), context_length=3000)
    for text in (document()[0], "\n\nand so on " * 30):
        assert session.ask(text, max_new_tokens=75).new_tokens == 75
    session.save(tmp_path / "kept")
    session = Session.load(tmp_path / "kept", *bundled)
    session.ask("once more", max_new_tokens=40)
    run = session._cache.run
    pages = stored(run.pool, run.state.cache.table)[0]
    for layer, state in enumerate(run.state.cache.layers):
        counts = np.asarray(state.index.levels[0].count)[0]
        assert counts.sum() > 2 * 1800  # two KV heads
        for head, page_counts in enumerate(counts):
            assert_digests(state.index.levels, 0, head, [pages[i, layer, head, 0, :n] for i, n in enumerate(page_counts)])


@pytest.mark.slow
def test_a_resident_set_changes_no_answer_of_a_session(bundled, monkeypatch):
    """Bit for bit: both programs are compiled as for users, since conftest's cheaper options change the order of rounding."""
    monkeypatch.setitem(compiler_options.OPTIONS, "cpu", {"xla_cpu_use_fusion_emitters": True})
    programs.drop()
    text, questions = document()
    plain, with_resident = (
        Session(*bundled, cache=Clustered(budget=64, keys_first=False, resident=resident), context_length=3000)
        for resident in (False, True)
    )
    for q in (text + questions[0].text, *(q.text for q in questions[1:]), "Pass key", "Pass key"):
        expected, actual = (x.ask(q, max_new_tokens=20) for x in (plain, with_resident))
        assert actual.token_ids == expected.token_ids
    for a, b in zip(plain._cache.run.state.cache.layers, with_resident._cache.run.state.cache.layers, strict=True):
        np.testing.assert_array_equal(a.window.newest, b.window.newest)
    programs.drop()  # other tests have the cheaper options


@pytest.mark.parametrize("cache", [Full(), SnapKV(budget=64)], ids=lambda cache: type(cache).__name__)
def test_without_pages_no_more_is_reserved_than_the_context(bundled, cache):
    """Apart from the padding of texts, and SnapKV's kept tokens beside the new ones."""
    answer = Session(*bundled, cache=cache, context_length=3000).ask("x" * 100, max_new_tokens=1)
    bytes_per_token = answer.full_kv_bytes / (answer.prompt_tokens + answer.new_tokens)
    assert 3000 * bytes_per_token <= answer.run.device_kv_bytes <= 3400 * bytes_per_token


def test_a_full_session_says_so_and_stays_as_it_was(bundled):
    session = Session(*bundled, cache=Full(), context_length=300)
    for options in (dict(max_new_tokens=0), dict(stop=[""]), dict(seed=-1)):
        with pytest.raises(icejax.InputError, match="max_new_tokens must be|stop string is empty|seed must be"):
            session.ask("x", **options)
    assert session.room == 300
    session.ask("x" * 200, max_new_tokens=20)
    before = list(session.token_ids)
    assert session.room == 80
    message = r"the session holds 220 tokens and the text has 100: its context of 300 is full; shorten the text, or begin a"
    with pytest.raises(icejax.ContextFull, match=message) as error:
        session.ask("y" * 100)
    assert (error.value.context_length, error.value.held, error.value.new) == (300, 220, 100)
    copied = pickle.loads(pickle.dumps(error.value))  # it may cross processes
    assert (str(copied), copied.held) == (str(error.value), 220)
    with pytest.raises(icejax.ContextFull, match="holds 220 tokens and the text has 400") as error:
        session.ask("y" * 400)  # too long by itself
    assert (error.value.held, error.value.new) == (220, 400)
    with pytest.raises(icejax.ContextFull):
        session.ask("y" * 80)
    assert (session.token_ids, session.room) == (before, 80)
    assert session.ask("y" * 75, max_new_tokens=9).new_tokens <= 5


FULL_POOL = "many short texts have filled the pool of pages: the conversation is prefilled again"


def test_a_full_pool_is_prefilled_anew(bundled, monkeypatch, caplog):
    session = Session(*bundled, cache=Full(), context_length=300)
    session.ask("x = 1\n", max_new_tokens=3)
    monkeypatch.setattr(Plan, "room_for_answer", lambda *_, **__: 2)
    for count in (2, 3):
        session.ask("y = ", max_new_tokens=count)
        assert (FULL_POOL in caplog.messages) == (count == 3)
    expected = icejax.generate(*bundled, session.token_ids[:-3], cache=Full(), max_new_tokens=3)[0]
    assert session.token_ids[-3:] == list(expected.token_ids) and len(session.token_ids) == 6 + 3 + 4 + 2 + 4 + 3


@pytest.mark.slow
def test_many_short_texts_do_not_fill_the_pool(bundled, caplog):
    """Each begins a new page: the pool is full of pages with one token long before the context is full."""
    session = Session(*bundled, cache=Clustered(budget=64), context_length=600)
    for _ in range(100):
        session.ask("x", max_new_tokens=1)
        if FULL_POOL in caplog.messages:
            break
    *prompt, newest = session.token_ids
    plain = icejax.generate(*bundled, prompt, cache=Full(), max_new_tokens=1)[0]
    assert 20 < len(prompt) < 300 and newest == plain.token_ids[0]


def test_progress_is_told_and_may_end_the_first_text(bundled):
    class Enough(Exception):
        pass

    def enough(*_):
        raise Enough

    session, layers_done = Session(*bundled, cache=Full(), context_length=300), []

    def tell(phase, done, total):
        if phase == "prefill":
            layers_done.append((done, total))

    with pytest.raises(Enough):
        list(session.stream("another text", max_new_tokens=3, progress=enough))
    assert session.token_ids == []
    pieces = [*session.stream("import ", max_new_tokens=3, progress=tell)]
    pieces += session.stream(" x", max_new_tokens=3, progress=tell)
    plain = Session(*bundled, cache=Full(), context_length=300)
    for text in ("import ", " x"):
        plain.ask(text, max_new_tokens=3)
    assert layers_done == [(done, 4) for done in range(5)] * 2 and session.token_ids == plain.token_ids and len(pieces) == 6


@pytest.mark.slow
@pytest.mark.parametrize("where", ["before", "behind"])
def test_an_answer_that_ctrl_c_cuts_off_is_gone_on_from(bundled, tmp_path, monkeypatch, where):
    """Before or after a token is read: a token whose reading was interrupted is in the cache already."""
    text, questions = document()
    sessions = [Session(*bundled, cache=Clustered(budget=64), context_length=3000) for _ in range(2)]
    for piece in sessions[0].stream(text + questions[0].text):
        if piece.new_tokens == 4:
            break
    take = Row.take

    def cut(self, counters):
        if len(self.tokens) == 3 and where == "before":
            raise KeyboardInterrupt
        text_piece = take(self, counters)
        if len(self.tokens) == 4:
            raise KeyboardInterrupt
        return text_piece

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Row, "take", cut)
        sessions[1].ask(text + questions[0].text)
    assert sessions[1].token_ids == sessions[0].token_ids and sessions[1]._seen == len(sessions[1].token_ids)
    sessions[1].save(tmp_path / "kept")
    sessions.append(Session.load(tmp_path / "kept", *bundled))
    answers = [session.ask("\n" + questions[1].text).text for session in sessions]
    assert answers == 3 * [questions[1].answer]


@pytest.mark.slow
def test_a_text_that_ctrl_c_cuts_off_leaves_no_session(bundled, tmp_path, monkeypatch):
    session, layers = Session(*bundled, cache=Clustered(budget=64), context_length=600), []

    def cut(phase, num_done, _):
        if phase == "prefill":
            layers.append(num_done)
        if layers[-1] == 2:
            raise KeyboardInterrupt

    session.ask("import os", max_new_tokens=3)
    with pytest.raises(KeyboardInterrupt):
        session.ask("import re", max_new_tokens=3, progress=cut)
    message = "^the session's last answer was interrupted and left an incomplete cache: load what was saved, or begin"
    for act in (lambda: session.ask("more"), lambda: session.save(tmp_path / "kept")):
        with pytest.raises(icejax.InputError, match=message):
            act()
    assert not (tmp_path / "kept").exists() and layers == [0, 1, 2]


def test_refused_stop_string_leaves_the_session_unchanged(bundled):
    session = Session(*bundled, cache=Full(), context_length=300)
    session.ask("import ", max_new_tokens=3)
    before = list(session.token_ids), session._seen
    with pytest.raises(icejax.InputError, match="holds the special token"):
        session.ask("x", stop=[f"{bundled[1].eos_token}b"])
    assert (session.token_ids, session._seen) == before


def test_a_finished_answer_may_be_followed_inside_its_loop(bundled):
    session, plain = (Session(*bundled, cache=Full(), context_length=300) for _ in range(2))
    followups = []
    for piece in session.stream("import ", max_new_tokens=3):
        if piece.finish_reason is not None:
            followups.append(session.ask(" x", max_new_tokens=3).text)
    plain.ask("import ", max_new_tokens=3)
    assert followups == [plain.ask(" x", max_new_tokens=3).text] and session.token_ids == plain.token_ids


def test_speed_counts_what_ran_and_time_begins_with_the_call(bundled, monkeypatch):
    session = Session(*bundled, cache=Full(), context_length=600)
    session.ask("a" * 300, max_new_tokens=2)
    encode = module.encode_prompts
    monkeypatch.setattr(module, "encode_prompts", lambda *args, **options: time.sleep(0.5) or encode(*args, **options))
    answer = session.ask("b", max_new_tokens=2)
    assert 0 < 2 / answer.prefill_tps < answer.ttft_s - 0.5  # the text, and the last answer's end


WRONG = {
    "a cache's name": (lambda session, path: Session.load(path, *session, cache="full"), "cache must be"),
    "no path": (lambda session, path: Session.load(None, *session), "the path of a folder must be a text or a path, got None"),
    "a zero byte": (
        lambda session, path: Session.load("a\0b", *session),
        "the path of a folder must be a text or a path, got 'a",
    ),
    "a word": (
        lambda session, path: Session(*session).ask("x", special_tokens="no"),
        "special_tokens must be true or false, got 'no'",
    ),
    "a folder to save to": (
        lambda session, path: Session(*session, context_length=300).ask("x", save_to="kept"),
        "save_to must be a claim on a folder, from icejax.files.atomic_folder.claim, got 'kept'",
    ),
    "no model": (lambda session, path: Session("m", session[1]), "model must be one that icejax.load returns, got 'm'"),
    "a tokenizer as the model": (
        lambda session, path: icejax.generate(session[1], session[0], "x"),
        "model must be one that icejax.load returns, got ",
    ),
    "no tokenizer": (lambda session, path: icejax.chat(None, "x"), "the tokenizer has no chat template"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_types_are_one_line(bundled, tmp_path, case):
    act, message = WRONG[case]
    with pytest.raises(icejax.InputError, match=f"^{message}"):
        act(bundled, tmp_path / "kept")


def test_an_answer_left_for_another_question_cannot_go_on(bundled):
    session = Session(*bundled, cache=Full(), context_length=600)
    stream = session.stream("import os", max_new_tokens=5)
    pieces = [next(stream), next(stream)]
    answer = session.ask("import", max_new_tokens=3)
    held = list(session.token_ids)
    with pytest.raises(icejax.InputError, match="the session has been asked something else since: this answer cannot continue"):
        next(stream)
    assert session.token_ids == held and held[-3:] == list(answer.token_ids) and len(held) == 9 + len(pieces) + 6 + 3
