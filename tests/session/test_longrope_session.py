"""LongRoPE in a session: a conversation that outgrows the original context of 64 tokens gets all its keys again."""

import json
import logging

import pytest
import torch

from icejax import InputError
from icejax.cache.registry import Clustered, Full
from icejax.engine.decode import run as decode_run
from icejax.engine.renewal import renewed
from icejax.files.atomic_folder import Claim
from icejax.session import storage
from icejax.session.session import Session
from tests.helpers import families
from tests.helpers.letters import Letters

PAGES = Clustered(budget=2048, page_size=8, compact_every=32, dense_layers=0)  # a budget for all tokens
CACHES = pytest.mark.parametrize("cache", [Full(), pytest.param(PAGES, marks=pytest.mark.slow)], ids=["full", "clustered"])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    theirs = families.build(families.row("phi3-long"), num_hidden_layers=2)
    return theirs, families.load(theirs, tmp_path_factory.mktemp("model"))


def text_of(length: int) -> str:
    return Letters().decode([i % 90 for i in families.tokens(length, seed=length)])


def expected_from(theirs, ids: list[int], count: int) -> tuple[int, ...]:
    with torch.no_grad():
        return tuple(theirs.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)[0, len(ids) :].tolist())


def check_turns(theirs, session: Session, turns: list[tuple[int, int]]) -> None:
    """Asks texts of given lengths, with answers of given lengths; transformers answers the whole text each time."""
    for length, count in turns:
        ids = session.token_ids + Letters()(text_of(length))["input_ids"]
        answer = session.ask(text_of(length), max_new_tokens=count).token_ids
        assert answer == expected_from(theirs, ids, count)
        assert session.token_ids == [*ids, *answer]


TURNS = {
    "a text outgrows it": [(20, 10), (10, 5), (40, 10), (10, 10)],
    "an answer outgrows it": [(20, 10), (10, 50), (10, 10), (30, 40)],
    "the first answer outgrows it": [(40, 60), (10, 10)],
    "an answer ends at it": [(20, 44), (10, 10)],
    "an answer ends just beyond it": [(20, 45), (10, 10)],
}


@pytest.mark.slow
@CACHES
@pytest.mark.parametrize("case", TURNS)
def test_turns_equal_transformers(models, case, cache):
    theirs, ours = models
    check_turns(theirs, Session(ours, Letters(), cache=cache, context_length=400), TURNS[case])


@pytest.mark.slow
def test_the_log_says_once_that_keys_are_made_anew(models, caplog):
    _, ours = models
    session = Session(ours, Letters(), cache=Full(), context_length=400)
    for length in (30, 40, 30):
        session.ask(text_of(length), max_new_tokens=5)
    expected = "the conversation outgrows the model's original context of 64 tokens: it is prefilled again"
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [expected]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        Session(ours, Letters(), cache=Full(), context_length=400).ask(text_of(60), max_new_tokens=10)
    expected = "a text of 65 tokens outgrows the model's original context: it is prefilled again"
    assert [r.message for r in caplog.records if "outgrows" in r.message] == [expected]


@pytest.mark.slow
@CACHES
@pytest.mark.parametrize("turns", [2, 3, 4])
def test_a_saved_session_goes_on_wherever_it_was_saved(models, tmp_path, cache, turns):
    """Saved before the original context is outgrown, after an answer has, and after further text."""
    theirs, ours = models
    session = Session(ours, Letters(), cache=cache, context_length=400)
    lengths = [(20, 10), (10, 5), (10, 40), (10, 10), (25, 12)]
    check_turns(theirs, session, lengths[:turns])
    session.save(tmp_path / "kept")
    loaded = Session.load(tmp_path / "kept", ours, Letters())
    assert loaded.token_ids == session.token_ids
    check_turns(theirs, loaded, lengths[turns:])


@pytest.mark.slow
def test_the_disk_is_checked_for_all_that_is_saved(models, tmp_path):
    """The bound for the disk holds for the pages of an answer that outgrew the original context."""
    theirs, ours = models
    wanted = []

    class Folder(Claim):
        def __init__(self):
            pass

        def check_room(self, size):
            wanted.append(size)

    session = Session(ours, Letters(), cache=PAGES, context_length=400)
    for length in (20, 10):
        ids = session.token_ids + Letters()(text_of(length))["input_ids"]
        pieces = list(session.stream(text_of(length), max_new_tokens=70, save_to=Folder()))
        assert tuple(piece.token_ids[0] for piece in pieces) == expected_from(theirs, ids, 70)
        session.save(tmp_path / "kept")
        (arrays,) = (tmp_path / "kept").rglob(storage.ARRAYS)
        assert arrays.stat().st_size <= wanted[-1]


def test_an_interrupt_while_keys_are_made_anew_loses_nothing(models, monkeypatch):
    theirs, ours = models

    def interrupted(*arguments):
        renewed(*arguments)  # which donates the old arrays
        raise KeyboardInterrupt

    session = Session(ours, Letters(), cache=Full(), context_length=400)
    with monkeypatch.context() as patched:
        patched.setattr(decode_run, "renewed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.ask(text_of(60), max_new_tokens=20)
    assert len(session.token_ids) == 65
    check_turns(theirs, session, [(10, 10), (5, 5)])


def test_a_stream_left_at_the_original_context_goes_on(models):
    theirs, ours = models
    session = Session(ours, Letters(), cache=Full(), context_length=400)
    for piece in session.stream(text_of(60), max_new_tokens=20):
        if piece.new_tokens == 5:
            break
    assert len(session.token_ids) == 65
    check_turns(theirs, session, [(10, 10)])


def test_a_session_with_one_set_of_factors_is_refused(models, tmp_path):
    """Sessions once had the long factors in all texts of a long context."""
    _, ours = models
    session = Session(ours, Letters(), cache=Full(), context_length=400)
    session.ask(text_of(20), max_new_tokens=4)
    session.save(tmp_path / "kept")
    (about,) = (tmp_path / "kept").rglob(storage.ABOUT)
    fields = json.loads(about.read_text())
    del fields["checksum"], fields["identity"]["LongRoPE's factors"]
    about.write_text(json.dumps(fields | {"checksum": storage._checksum(fields)}))
    with pytest.raises(InputError) as error:
        Session.load(tmp_path / "kept", ours, Letters())
    assert str(error.value) == (
        f"{tmp_path / 'kept'} was saved by an older icejax, which had one set of LongRoPE's factors for all texts: "
        "begin a new session in another folder, or remove it"
    )
