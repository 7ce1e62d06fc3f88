"""Saved sessions: a session loads bit for bit, or a one-line error says what is wrong with its folder."""

import dataclasses
import itertools
import json
import math
import os
import pickle
import re
import shutil
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import icejax
from icejax.cache.registry import Clustered
from icejax.engine.snapshot import stored_arrays
from icejax.engine.snapshot.fingerprint import Damaged
from icejax.files.atomic_folder import claim
from icejax.session import storage
from icejax.session.session import Session
from tests.helpers.crash import Killed, file_limit, killed_at

TEXT = "Pass key ab:12345.\n" * 60 + "Pass key ab:"
OPTIONS = dict(cache=Clustered(budget=64), context_length=1600)
MESSAGES = [{"role": "user", "content": "Who?\n\udcff \N{SNOWMAN}"}, {"role": "assistant", "content": ""}]


@pytest.fixture(scope="module")
def session(bundled):
    """A session with some pages in the pool, in two extents; only to be read."""
    session = Session(*bundled, **OPTIONS)
    session.ask(TEXT, max_new_tokens=20)
    session.messages, session.started = MESSAGES, 1234567890.25
    return session


@pytest.fixture(scope="module")
def saved_folder(session, tmp_path_factory):
    """The folder of `session`; only to be read."""
    folder = tmp_path_factory.mktemp("saved") / "whole"
    session.save(folder)
    assert len([name for name in fields_of(folder)["arrays"] if name.startswith("pool.")]) == 2
    return folder


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(stored_arrays, "BLOCK", 2**20)


@pytest.fixture
def copy(saved_folder, tmp_path):
    return Path(shutil.copytree(saved_folder, tmp_path / "copy"))


def fields_of(folder: Path) -> dict:
    return json.loads((folder / storage.ABOUT).read_text())


def seal(folder: Path, fields: dict) -> None:
    """Writes `fields` to `session.json` with a valid checksum."""
    fields.pop("checksum", None)
    (folder / storage.ABOUT).write_text(json.dumps(fields | {"checksum": storage._checksum(fields)}))


def pages_of(session: Session) -> list[np.ndarray]:
    """Returns the pages in use of each extent [L, n, K, 2, p, H]."""
    cache, pool = session._cache.run.state.cache, np.asarray(session._cache.run.pool)
    extents, pages = np.asarray(cache.table)[0], int(cache.lengths.next_page)
    return [pool[extents[i // 64]][:, : pages - i] for i in range(0, pages, 64)]


def arrays(session: Session) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(session._cache.run.state.cache.layers)] + pages_of(session)


def assert_same(actual: Session, expected: Session) -> None:
    assert (actual.token_ids, actual.messages, actual.started) == (expected.token_ids, expected.messages, expected.started)
    for a, b in zip(arrays(actual), arrays(expected), strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


def refused(folder: Path, bundled, **options) -> str:
    """Returns the one-line error of loading `folder`."""
    with pytest.raises(icejax.InputError) as error:
        Session.load(folder, *bundled, **options)
    message = str(error.value)
    assert message.startswith(str(folder)) and "\n" not in message and "config.json" not in message and len(message) < 500
    return message


@pytest.mark.slow
def test_all_of_it_comes_back(session, saved_folder, bundled):
    assert sorted(os.listdir(saved_folder)) == [storage.ARRAYS, storage.ABOUT]
    assert_same(Session.load(saved_folder, *bundled), session)


def test_a_session_is_the_users_alone(session, tmp_path):
    folder = tmp_path / "kept"
    for _ in range(2):
        session.save(folder)
        assert [path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())] == [0o700, 0o600, 0o600]
        for path in (*folder.iterdir(), folder):  # as an earlier version left them
            path.chmod(0o755)


def test_what_is_in_the_file_is_checked_by_what_wrote_none_of_it(session, saved_folder):
    """The file begins with the token ids and ends with the pool's bytes."""
    pool = b"".join(x.tobytes() for x in pages_of(session))
    assert (saved_folder / storage.ARRAYS).read_bytes().endswith(pool) and pool.strip(b"\0")
    start = np.asarray(session.token_ids, "<i4").tobytes()
    assert (saved_folder / storage.ARRAYS).read_bytes().startswith(start)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([storage.ABOUT, storage.ARRAYS]), st.floats(0, 1, exclude_max=True), st.integers(0, 255), st.booleans())
def test_any_damage_is_found(session, saved_folder, bundled, tmp_path_factory, name, where, change, cut):
    """A damaged session is refused, or it loads bit for bit."""
    folder = tmp_path_factory.mktemp("damaged") / "copy"
    shutil.copytree(saved_folder, folder)
    content = bytearray((folder / name).read_bytes())
    offset = int(where * len(content))
    content[offset] ^= change
    (folder / name).write_bytes(content[:offset] if cut else content)
    try:
        loaded = Session.load(folder, *bundled)
    except icejax.InputError as error:
        message = str(error)
        assert message.startswith(str(folder)) and "session" in message and "\n" not in message
        with pytest.raises(icejax.InputError):
            storage.read_session(folder).verify()
    else:
        storage.read_session(folder).verify()
        assert not cut and (change == 0 or name == storage.ABOUT)
        assert_same(loaded, session)
    shutil.rmtree(folder)


OTHER = r"is \w+\[.*\], expected \w+\[|is missing|is not one of this cache"  # errors that name an array and what it should be
HUGE = dict(dtype="int8", shape=[10**4000], crc32=0)
# Changes to the fields of session.json, sealed with a valid checksum, and the error that each must give.
LIES = {
    "no version": (lambda f: f.pop("version"), "was saved by an older icejax: begin a new session in another folder"),
    "older": (lambda f: f.update(version=2), "was saved by an older icejax: begin a new session in another folder"),
    "newer": (lambda f: f.update(version=storage.VERSION + 1), "was saved by a newer icejax: use that, or another folder"),
    "version of text": (lambda f: f.update(version=str(storage.VERSION)), "damaged session"),
    "tokens that are not there": (lambda f: f.update(tokens=f["tokens"] + 1), OTHER),
    "a context of 10^12 tokens": (lambda f: f.update(context_length=10**12), "room for 1000000000000 do not fit"),
    "10^12 tokens": (lambda f: f.update(tokens=10**12), "1000000000000 in all"),
    "a context of 2^24": (lambda f: f.update(context_length=2**24), OTHER),
    "a first text of 2^24": (
        lambda f: f.update(first=2**24 - 1, tokens=2**24 - 1, context_length=2**24),
        OTHER,
    ),
    "a context whose positions are not exact": (lambda f: f.update(context_length=2**24 + 1), "room for 16777217 do not fit"),
    "no first text": (lambda f: f.update(first=0), "0 first tokens"),
    "10^12 pages": (lambda f: f.update(pages=10**12), "1000000000000 pages and there is no room"),
    "a page less": (lambda f: f.update(pages=f["pages"] - 1), OTHER),
    "pages below none": (lambda f: f.update(pages=-1), "pages is -1"),
    "pages as a fraction": (lambda f: f.update(pages=2.0), r"pages is 2\.0"),
    "pages as a truth": (lambda f: f.update(pages=True), "pages is True"),
    "a list": (lambda f: f.update(first=[1, 2] * 500), r"first is \[1, 2"),
    "missing": (lambda f: f.pop("tokens"), "tokens is None"),
    "no number": (lambda f: f.update(started=math.nan), "started is nan"),
    "for ever": (lambda f: f.update(started=math.inf), "started is inf"),
    "text": (lambda f: f.update(started="now\n"), r"started is 'now\\n'"),
    "messages of text": (lambda f: f.update(messages="hello"), "messages are no list"),
    "a message of text": (lambda f: f.update(messages=["hello"]), "messages are no list"),
    "a message without content": (lambda f: f.update(messages=[{"role": "user"}]), "messages are no list"),
    "a message of numbers": (lambda f: f.update(messages=[{"role": "user", "content": 1}]), "messages are no list"),
    "a message of other fields": (
        lambda f: f.update(messages=[{"role": "user", "content": "x", "tools": "y"}]),
        "messages are no list",
    ),
    "template variables of text": (lambda f: f.update(template_variables="x"), "template_variables are no tools and arguments"),
    "a template variable of messages": (
        lambda f: f.update(template_variables={"messages": []}),
        "template_variables are no tools and arguments",
    ),
    "a deep template variable": (
        lambda f: f.update(template_variables={"a": json.loads("[" * 99 + "]" * 99)}), "template_variables are no tools"),
    "outdated as a number": (lambda f: f.update(outdated=1), "outdated is 1"),
    "a joint of a token less": (lambda f: f["joints"][0].__setitem__(0, f["joints"][0][0] - 1), "joints do not match its pages"),
    "a joint of a page more": (lambda f: f["joints"][-1].__setitem__(1, f["joints"][-1][1] + 1), "joints do not match its pages"),
    "an answer without a question": (lambda f: f.update(messages=f["messages"][1:]), "messages are no list of turns"),
    "a question without an answer": (lambda f: f.update(messages=f["messages"] + f["messages"][:1]), "messages are no list of turns"),
    "an array of a million axes": (
        lambda f: f["arrays"].update(x=dict(dtype="int8", shape=[2**62] * 10**6, crc32=0)), "does not say what x is"),
    "an array of long sizes": (
        lambda f: f["arrays"].update(x=dict(dtype="int8", shape=[10**4000] * 60, crc32=0)), "does not say what x is"),
    "no identity": (lambda f: f.update(identity=[]), "does not say what it was saved with"),
    "no arrays": (lambda f: f.update(arrays=None), "does not say which arrays it has"),
    "an array without a checksum": (lambda f: f["arrays"]["token_ids"].pop("crc32"), "does not say what token_ids is"),
    "an array of no bytes": (lambda f: f["arrays"]["token_ids"].update(shape=[-1]), "does not say what token_ids is"),
    "other arrays": (lambda f: f["arrays"].update(x=f["arrays"].pop("token_ids")), "array token_ids is missing"),
    "arrays of 10^4300 bytes": (lambda f: f["arrays"].update(x=HUGE), "does not say what x is"),
    "another length": (lambda f: f["arrays"]["token_ids"].update(shape=[7]), "arrays has .* bytes, expected"),
    "another checksum": (lambda f: f["arrays"]["token_ids"].update(crc32=7), "the bytes of token_ids are not those"),
    "another model": (lambda f: f["identity"].update({"config.rope_theta": "a\nb"}), "saved with config.rope_theta = a b, here"),
    "more of a model": (lambda f: f["identity"].update({"config.x": 1}), "saved with config.x = 1, here it is None"),
    "another dtype": (lambda f: f["arrays"]["token_ids"].update(dtype="float32"), OTHER),
    "a dtype that there is not": (lambda f: f["arrays"]["token_ids"].update(dtype="int17"), "does not say what token_ids is"),
    "an array too many": (lambda f: f["arrays"].update(x=dict(dtype="int8", shape=[0], crc32=0)), "array x is not one of this"),
    "another tokenizer": (lambda f: f["identity"].update(tokenizer=7), "was saved with another tokenizer: use the same, or"),
    "another template": (lambda f: f["identity"].update({"chat template": 7}), "was saved with another chat template: use the"),
    "unknown cache": (lambda f: f["identity"].update({"cache.name": "cluttered"}), "cache.name = cluttered: register it"),
    "no cache": (lambda f: f["identity"].update({"cache.name": ["full"]}), "cache.name = "),
    "an unknown option": (
        lambda f: f["identity"].update({"cache.magic": 7}),
        "saved with cache.magic = 7, an option that this version does not have: use the version that saved it",
    ),
    "an option out of range": (lambda f: f["identity"].update({"cache.budget": 1}), "its cache: budget must hold"),
    "an option of text": (lambda f: f["identity"].update({"cache.tail": "yes"}), "cache.tail is yes"),
    "a deep option": (
        lambda f: f["identity"].update({"cache.page_size": json.loads("[" * 400 + "]" * 400)}), r"cache.page_size is \[\["),
    "an option of a list": (lambda f: f["identity"].update({"cache.page_size": [16]}), r"cache.page_size is \[16\]"),
    "an enormous option": (lambda f: f["identity"].update({"cache.sinks": 10**12}), "its cache: sinks must be at most 1048576"),
    "an enormous cache": (
        lambda f: f["identity"].update({"cache.budget": 2**30, "cache.sinks": 2**20}),
        OTHER,
    ),
}  # fmt: skip


def test_the_error_of_a_damaged_session_crosses_processes(copy, bundled):
    (copy / storage.ARRAYS).write_bytes(b"")
    with pytest.raises(Damaged) as error:
        Session.load(copy, *bundled)
    copied = pickle.loads(pickle.dumps(error.value))
    assert (type(copied), str(copied), copied.fault) == (Damaged, str(error.value), error.value.fault)
    assert error.value.fault.startswith("arrays has 0 bytes, expected ")


def test_what_is_kept_besides_is_passed_over(session, copy, bundled):
    with open(copy / storage.ARRAYS, "ab") as file:
        file.write(b"abc")
    fields = fields_of(copy)
    fields["arrays"]["kept.0.layers.1"] = dict(dtype="uint8", shape=[3], crc32=zlib.crc32(b"abc"))
    seal(copy, fields)
    assert_same(Session.load(copy, *bundled), session)


def test_text_needs_no_chat_template(copy, bundled):
    fields = fields_of(copy)
    fields["messages"], fields["identity"]["chat template"] = [], 7
    seal(copy, fields)
    assert Session.load(copy, *bundled).messages == []


def test_absent_fields_and_options_have_their_defaults(session, copy, bundled):
    fields = fields_of(copy)
    assert fields["identity"].pop("cache.prefetch") is False and fields["identity"].pop("config.sinks") is False
    seal(copy, fields)
    assert_same(Session.load(copy, *bundled), session)


@pytest.mark.parametrize("case", LIES)
def test_a_session_that_says_what_cannot_be_is_refused(copy, bundled, case):
    change, message = LIES[case]
    fields = fields_of(copy)
    change(fields)
    seal(copy, fields)
    assert re.search(message, refused(copy, bundled))


def _older(folder):
    """Turns the folder into one that icejax 0.1 wrote."""
    fields = fields_of(folder)
    old = {key: fields[key] for key in ("identity", "context_length", "first")}
    (folder / storage.ABOUT).write_text(json.dumps(old | {"token_ids": [1, 2]}))
    (folder / storage.ARRAYS).unlink()
    (folder / "state").mkdir()


def _sparse(folder):
    with open(folder / storage.ARRAYS, "r+b") as file:
        file.truncate(10**12)


BROKEN = {
    "nothing there": (shutil.rmtree, "is no session: expected a folder that Session.save or --session wrote"),
    "no description": (lambda f: (f / storage.ABOUT).unlink(), "is no session: expected a folder"),
    "no arrays": (lambda f: (f / storage.ARRAYS).unlink(), r"damaged session \(arrays is missing\): use a copy of it"),
    "a folder of arrays": (lambda f: (f / storage.ARRAYS).unlink() or (f / storage.ARRAYS).mkdir(), "arrays is no file"),
    "a pipe of arrays": (lambda f: (f / storage.ARRAYS).unlink() or os.mkfifo(f / storage.ARRAYS), "arrays is no file"),
    "a pipe": (lambda f: (f / storage.ABOUT).unlink() or os.mkfifo(f / storage.ABOUT), "session.json is no file"),
    "without end": (lambda f: (f / storage.ABOUT).unlink() or (f / storage.ABOUT).symlink_to("/dev/zero"), "session.json is no file"),
    "an enormous description": (lambda f: os.truncate(f / storage.ABOUT, 10**12), "session.json is too large"),
    "a file": (lambda f: shutil.rmtree(f) or f.touch(), "is no session"),
    "deep": (lambda f: (f / storage.ABOUT).write_text("[" * 10**6), "session.json is no JSON"),
    "deep in a field": (
        lambda f: (f / storage.ABOUT).write_text(f'{{"version": {storage.VERSION}, "identity": ' + "[" * 900 + "]" * 900 + "}"), "damaged session"),
    "a list": (lambda f: (f / storage.ABOUT).write_text("[]"), "holds no object"),
    "a number": (lambda f: (f / storage.ABOUT).write_text('{"version": ' + "9" * 10**5 + "}"), "is no JSON"),
    "no text": (lambda f: (f / storage.ABOUT).write_bytes(b"\xff\xfe"), "is no JSON"),
    "empty": (lambda f: (f / storage.ABOUT).write_text(""), "is no JSON"),
    "empty arrays": (lambda f: (f / storage.ARRAYS).write_bytes(b""), "arrays has 0 bytes, expected"),
    "enormous arrays": (_sparse, "arrays has 1000000000000 bytes, expected"),
    "older": (_older, "was saved by an older icejax: begin a new session in another folder, or remove it"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused(copy, bundled, case):
    change, message = BROKEN[case]
    change(copy)
    assert re.search(message, refused(copy, bundled))


def test_arrays_of_another_save_are_refused(session, saved_folder, copy, bundled):
    """Both files are whole and of the right size, but of different saves; or tokens and lengths are impossible."""
    content = bytearray((copy / storage.ARRAYS).read_bytes())
    content[:4] = np.int32(257).tobytes()
    (copy / storage.ARRAYS).write_bytes(content)
    assert "the bytes of token_ids are not those that were saved" in refused(copy, bundled)
    fields, count = fields_of(copy), 4 * len(session.token_ids)
    fields["arrays"]["token_ids"]["crc32"] = zlib.crc32(content[:count])
    seal(copy, fields)
    assert "it has tokens that the model does not know" in refused(copy, bundled)
    lengths = dataclasses.replace(session._cache.run.state.cache.lengths, origin=jax.numpy.full(1, 5000, jax.numpy.int32))
    cache = dataclasses.replace(session._cache.run.state.cache, lengths=lengths)
    info = storage.SessionInfo(**{field.name: fields[field.name] for field in dataclasses.fields(storage.SessionInfo)})
    storage.write(copy, fields["identity"], info, session.token_ids, cache, session._cache.run.pool, plan=session._cache.plan)
    assert "its cache's lengths do not match its description" in refused(copy, bundled)


def test_a_killed_save_leaves_the_old_session_or_the_new_one(session, saved_folder, bundled, tmp_path, monkeypatch):
    target = tmp_path / "kept"
    shutil.copytree(saved_folder, target)
    old = Session.load(target, *bundled)
    new = Session.load(target, *bundled)
    new.messages = [*MESSAGES, *MESSAGES]
    seen_lengths = set()
    for step in itertools.count(1, 3):
        with monkeypatch.context() as patch:
            killed_at(step, patch)
            try:
                new.save(target)
                died = False
            except Killed:
                died = True
        messages = storage.open_session(target, *bundled, None).about.messages
        if len(messages) not in seen_lengths:
            assert_same(Session.load(target, *bundled), old if messages == MESSAGES else new)
        seen_lengths.add(len(messages))
        assert messages == new.messages or (died and 4 not in seen_lengths)
        if not died:
            break
    assert seen_lengths == {2, 4} and os.listdir(tmp_path) == ["kept"]


def test_a_save_that_fails_late_keeps_the_old_session(session, saved_folder, bundled, tmp_path):
    shutil.copytree(saved_folder, tmp_path / "kept")
    changed = Session.load(saved_folder, *bundled)
    changed.messages = []
    message = r"kept cannot be written \(File too large\): what was there before is kept"
    with file_limit(10_000), pytest.raises(icejax.InputError, match=message):
        changed.save(tmp_path / "kept")
    assert os.listdir(tmp_path) == ["kept"]
    assert_same(Session.load(tmp_path / "kept", *bundled), session)


def test_two_savers_of_one_folder_take_turns(session, tmp_path):
    session.save(tmp_path / "kept")
    with claim(tmp_path / "kept", mark=storage.ABOUT) as held:
        session.save(held)
        with pytest.raises(icejax.InputError, match="is in use by another writer of this process"):
            session.save(tmp_path / "kept")
    (tmp_path / "theirs").mkdir()
    with pytest.raises(icejax.InputError, match="exists and is no session folder: choose another place"):
        session.save(tmp_path / "theirs")
