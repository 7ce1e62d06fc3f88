"""A session that outgrows the device moves from the full cache to pages, and a saved one continues with the cache that it has."""

from types import SimpleNamespace

import pytest

import icejax
from icejax.cache.registry import Clustered, Full
from icejax.files import atomic_folder
from icejax.files.atomic_folder import claim
from icejax.runtime import devices
from icejax.session import storage
from icejax.session.session import Session
from tests.helpers.documents import document
from tests.text.test_chat_turns import BUNDLED

SMALL = dict(context_length=3000, device_memory=20_000_000)  # the weights take 11.3 MB, and 768 tokens fit beside them
MOVED = "the conversation outgrows the 768 tokens that fit the device: it continues with the clustered cache"


@pytest.fixture
def chatting(bundled, monkeypatch):
    """The bundled model and its tokenizer with a chat template."""
    model, tokenizer = bundled
    monkeypatch.setattr(tokenizer, "chat_template", BUNDLED)
    return model, tokenizer


@pytest.mark.slow
def test_a_session_moves_when_it_outgrows_the_device(bundled, caplog):
    text, questions = document()
    session = Session(*bundled, **SMALL)
    assert session.cache_choice == "full for the first 768 tokens, as many as fit the device; then clustered, budget 256"
    first = session.ask(text[:400], max_new_tokens=8)
    assert first.run.cache == "full" and first.run.host_kv_bytes == 0 and not caplog.messages
    second = session.ask(text[400:] + questions[0].text, max_new_tokens=8)
    assert caplog.messages == [MOVED]
    assert second.text == questions[0].answer and second.run.cache == "clustered" and second.cached_tokens == 400 + 8 - 1


@pytest.mark.slow
def test_a_saved_session_goes_on_with_the_cache_that_it_has(bundled, tmp_path, caplog):
    """Before the move with room for as many tokens, after it in pages: bit for bit as one that was not saved."""
    text, questions = document()
    session = Session(*bundled, **SMALL)
    session.ask(text[:400], max_new_tokens=8)
    session.save(tmp_path / "before")
    loaded = Session.load(tmp_path / "before", *bundled)
    assert loaded._cache.policy == Full(movable=True) and loaded.cache_choice is None
    for one in (session, loaded):
        one.second = one.ask(text[400:] + questions[0].text, max_new_tokens=8)
        one.third = one.ask(questions[1].text, max_new_tokens=8)
    assert caplog.messages == [MOVED, MOVED]
    assert [session.second.text, session.third.text] == [question.answer for question in questions[:2]]
    assert session.token_ids == loaded.token_ids
    session.save(tmp_path / "after")
    after = Session.load(tmp_path / "after", *bundled)
    assert isinstance(after._cache.policy, Clustered) and after._cache.room == 3000
    for one in (session, loaded, after):
        one.ask(questions[2].text, max_new_tokens=8)
    assert session.token_ids == after.token_ids == loaded.token_ids and len(caplog.messages) == 2
    assert session.fresh_copy()._cache.policy == loaded.fresh_copy()._cache.policy == Full(movable=True)


@pytest.mark.slow
def test_a_first_text_that_is_too_long_is_prefilled_into_pages(bundled, caplog):
    text, questions = document()
    session = Session(*bundled, **SMALL)
    answer = session.ask(text + questions[0].text)
    assert answer.text == questions[0].answer and answer.run.cache == "clustered" and caplog.messages == [MOVED]


@pytest.mark.slow
def test_room_for_the_answer_counts(bundled):
    for new_tokens, cache in ((8, "full"), (9, "clustered")):
        assert Session(*bundled, **SMALL).ask("a" * 760, max_new_tokens=new_tokens).run.cache == cache


@pytest.mark.slow
def test_a_chat_that_went_back_moves_what_stays(chatting, caplog):
    session, whole = (Session(*chatting, cache=cache, **SMALL) for cache in (None, Clustered()))
    for message in ("def f(x):", "import os\n" * 20):
        session.chat(message, max_new_tokens=6)
    session.undo()
    whole.chat("def f(x):", max_new_tokens=6)
    message = "Pass key ab:12345.\n" * 40 + "Pass key ab:"
    answers = [one.chat(message, max_new_tokens=6) for one in (session, whole)]
    assert answers[0].run.cache == "clustered" and caplog.messages == [MOVED]
    assert answers[0].cached_tokens and answers[0].token_ids == answers[1].token_ids and session.token_ids == whole.token_ids


@pytest.mark.slow
def test_a_text_that_is_refused_leaves_no_cache_of_two_policies(chatting, tmp_path, monkeypatch):
    """A question asked again needs the whole chat prefilled in pages, and the disk is full."""
    session, whole = (Session(*chatting, cache=cache, **SMALL) for cache in (None, Clustered()))
    for one in (session, whole):
        one.chat("def f(x):", max_new_tokens=4)
    with monkeypatch.context() as patch, claim(tmp_path / "kept", mark=storage.ABOUT) as target:
        patch.setattr(atomic_folder.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
        with pytest.raises(icejax.InputError, match="needs"):
            list(session.stream_chat(None, max_new_tokens=800, save_to=target))
    message = "Pass key ab:12345.\n" * 40 + "Pass key ab:"
    answers = [one.chat(message, max_new_tokens=6) for one in (session, whole)]
    assert answers[0].run.cache == "clustered" and answers[0].token_ids == answers[1].token_ids
    session.save(tmp_path / "kept")
    assert isinstance(Session.load(tmp_path / "kept", *chatting)._cache.policy, Clustered)


@pytest.mark.slow
def test_without_host_memory_a_session_stays_as_it_is(bundled, monkeypatch):
    text, questions = document()
    session = Session(*bundled, **SMALL)
    session.ask(text[:400], max_new_tokens=8)
    with monkeypatch.context() as patch:
        patch.setattr(devices, "host_free", lambda: 1000)
        with pytest.raises(icejax.InputError, match="of host memory and 0.0 GiB is free"):
            session.ask(text[400:] + questions[0].text, max_new_tokens=8)
    assert len(session.token_ids) == 408 and session._cache.policy == Full(movable=True)
    assert session.ask(text[400:] + questions[0].text, max_new_tokens=8).text == questions[0].answer


def test_a_chat_with_another_context_length_is_chosen_anew(chatting, tmp_path):
    session = Session(*chatting, **SMALL)
    session.chat("def f(x):", max_new_tokens=4)
    session.save(tmp_path / "kept")
    assert Session.load(tmp_path / "kept", *chatting, context_length=600)._cache.policy == Full()
    longer = Session.load(tmp_path / "kept", *chatting, context_length=2000, device_memory=SMALL["device_memory"])
    assert longer._cache.policy == Full(movable=True) and longer._cache.room == 768
    with pytest.raises(icejax.InputError, match="was saved with cache.movable = True, here it is False"):
        Session.load(tmp_path / "kept", *chatting, cache=Full())
