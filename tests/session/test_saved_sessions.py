"""Sessions that an earlier commit saved still open and give the same answers."""

import json
import re
import tarfile

import pytest

from icejax.checks.errors import InputError
from icejax.session.session import Session
from tests.helpers.letters import Letters
from tests.session import saved_sessions


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sessions")
    with tarfile.open(saved_sessions.ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def model():
    return saved_sessions.model()


def test_every_policy_has_a_saved_session(sessions):
    assert {path.name for path in sessions.iterdir() if path.is_dir()} == {saved_sessions.REFUSED, *saved_sessions.policies()}


def test_a_session_whose_cache_kept_other_arrays_is_refused(sessions, model):
    """Policy coded kept codes of keys alone once; its options are the same."""
    folder = sessions / saved_sessions.REFUSED / "coded"
    message = f"{folder} was saved by another version of icejax, whose cache 'coded' keeps other arrays: use that version, or "
    with pytest.raises(InputError, match=f"^{re.escape(message)}begin a new session in another folder$"):
        Session.load(folder, model, Letters())


def test_every_saved_session_opens(sessions, model):
    for name, policy in saved_sessions.policies().items():
        assert len(Session.load(sessions / name, model, Letters(), cache=policy).token_ids) == 144, name


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in saved_sessions.policies() if name not in ("full", "clustered")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "clustered", *SLOW])
def test_saved_session_answers_as_when_it_was_saved(sessions, model, name):
    session = Session.load(sessions / name, model, Letters())
    assert saved_sessions.answer(session) == json.loads((sessions / saved_sessions.ANSWERS).read_text())[name]
