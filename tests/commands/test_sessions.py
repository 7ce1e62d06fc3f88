"""`icejax sessions`: lists saved sessions, says which are damaged, and removes only the sessions named."""

import json
import os
import shutil
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from icejax.cache.registry import Full
from icejax.commands import sessions
from icejax.engine.plan import make_plan
from icejax.engine.snapshot import row_arrays, stored_arrays
from icejax.engine.snapshot.fingerprint import damaged, fingerprint
from icejax.files.atomic_folder import claim
from icejax.session import storage
from tests.session.test_storage import fields_of, seal


@pytest.fixture(scope="module")
def whole(bundled, tmp_path_factory):
    """The folder of a session of 13 tokens with random numbers in its cache; tests must not change it."""
    folder, rng = tmp_path_factory.mktemp("sessions"), np.random.default_rng(0)
    plan = make_plan(bundled[0], Full(), batch_size=1, prompt_tokens=9, new_tokens=91)
    cache = jax.tree.map(lambda leaf: rng.integers(0, 99, leaf.shape).astype(leaf.dtype), row_arrays.empty_cache(plan))
    about = storage.SessionInfo(context_length=100, first=9, tokens=13, pages=0, started=1234567890.25, messages=[])
    storage.write(folder, fingerprint(bundled[0], Full(), bundled[1]), about, range(13), cache, None, plan=plan)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    """A folder with two sessions, one of them a chat saved three hours ago, and with other files and folders."""
    for name in ("book", "chat"):
        shutil.copytree(whole, tmp_path / name)
    fields = fields_of(tmp_path / "chat")
    fields["messages"] = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
    fields["identity"] |= {"cache.name": "clustered", "cache.budget": 64}
    seal(tmp_path / "chat", fields)
    os.utime(tmp_path / "chat" / storage.ABOUT, (time.time() - 3 * 3600,) * 2)
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / ".book.lock").touch()
    shutil.copytree(whole, tmp_path / ".more.part")
    return tmp_path


def run(capsys, *arguments) -> tuple[int, str, str]:
    status = sessions.main([str(word) for word in arguments])
    return status, *capsys.readouterr()


def size_of(folder: Path) -> int:
    return sum(len(file.read_bytes()) for file in folder.iterdir())


def test_each_session_has_a_line(capsys, folder):
    status, out, err = run(capsys, folder)
    assert (status, err) == (0, "")
    head, book, chat = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in out.splitlines()]
    assert head == ["name", "size", "model", "cache", "tokens", "messages", "age"]
    size = f"{size_of(folder / 'book') / 2**20:.1f} MiB"
    assert book[:-1] == ["book", size, "llama, 4 layers of 256", "full", "13", "0"]
    assert chat == ["chat", size, "llama, 4 layers of 256", "clustered, budget 64", "13", "2", "3 hours"]
    starts = [line.index("llama") for line in out.splitlines()[1:]]
    assert starts == [out.index("model")] * 2


def test_json_has_numbers(capsys, folder):
    status, out, _ = run(capsys, folder, "--json")
    book, chat = map(json.loads, out.splitlines())
    assert status == 0 and book.pop("saved") == (folder / "book" / storage.ABOUT).stat().st_mtime
    assert book == dict(
        name="book", bytes=size_of(folder / "book"), model="llama", layers=4, hidden_size=256, cache="full", budget=None,
        tokens=13, messages=0, started=1234567890.25,
    )  # fmt: skip
    assert (chat["budget"], chat["messages"]) == (64, 2)


def test_a_folder_may_be_a_session_itself(capsys, folder, monkeypatch):
    monkeypatch.chdir(folder / "book")
    assert run(capsys, ".", "--json")[1].startswith('{"name": "book", ')
    assert run(capsys, ".", "--remove", "book")[:2] == (0, "book  removed\n") and not (folder / "book").exists()


def test_what_a_killed_writer_left_is_shown_under_its_name(capsys, folder):
    os.rename(folder / "book", folder / ".book.old")
    assert [json.loads(line)["name"] for line in run(capsys, folder, "--json")[1].splitlines()] == ["book", "chat"]
    assert run(capsys, folder / "book", "--verify")[0] == 0
    assert run(capsys, folder, "--remove", "book")[:2] == (0, "book  removed\n")
    assert sorted(os.listdir(folder)) == [".more.part", "chat", "file", "other"]


def test_none_is_a_line(capsys, tmp_path):
    assert run(capsys, tmp_path) == (0, f"{tmp_path} holds no sessions\n", "")
    assert run(capsys, tmp_path, "--verify") == (0, f"{tmp_path} holds no sessions\n", "")
    assert run(capsys, tmp_path, "--json") == (0, "", "")


@pytest.mark.parametrize("name, reason", [("nowhere", "No such file or directory"), ("file", "Not a directory")])
def test_a_folder_that_is_none_is_told(capsys, tmp_path, name, reason):
    (tmp_path / "file").touch()
    message = f"icejax sessions: error: {tmp_path / name} cannot be read ({reason}): expected a folder that holds sessions\n"
    assert run(capsys, tmp_path / name) == (2, "", message)


def _identity(**changes):
    def change(folder):
        fields = fields_of(folder)
        fields["identity"] |= {key.replace("__", "."): value for key, value in changes.items()}
        seal(folder, fields)

    return change


def _arrays(**arrays):
    def change(folder):
        fields = fields_of(folder)
        fields["arrays"] |= arrays
        seal(folder, fields)

    return change


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda f: (f / storage.ARRAYS).unlink(), "arrays is missing"),
        (lambda f: (f / storage.ARRAYS).write_bytes(b"123"), "arrays has 3 bytes, expected "),
        (lambda f: (f / storage.ABOUT).write_text('{"name": "a game"}'), "session.json is not as it was saved"),
        (lambda f: (f / storage.ABOUT).write_text("{"), "session.json is no JSON"),
        (
            lambda f: (f / storage.ABOUT).unlink() or (f / storage.ABOUT).mkdir(),
            "session.json is no file",
        ),
        (lambda f: (f / storage.ABOUT).write_text('{"identity": {}}'), "was saved by an older icejax: begin a new session"),
        (_arrays(a=dict(dtype="int8", shape=[10**4000], crc32=0)), "it does not say what a is"),
        (_identity(config__model_type=None), "config.model_type is None"),
        (_identity(config__num_hidden_layers=[[4]]), "config.num_hidden_layers is [[4]]"),
        (_identity(cache__budget="all"), "cache.budget is 'all'"),
    ],
)
def test_a_damaged_or_foreign_one_is_a_line_among_the_others(capsys, folder, damage, reason):
    damage(folder / "book")
    status, out, err = run(capsys, folder)
    assert (status, err, out.count("\n")) == (0, "", 3) and f"  damaged: {reason}" in out.splitlines()[1]
    status, out, err = run(capsys, folder, "--json")
    book, chat = map(json.loads, out.splitlines())
    assert status == 0 and book["damaged"].startswith(reason) and chat["tokens"] == 13
    assert run(capsys, folder, "--verify")[0] == 2


@pytest.mark.parametrize("at", [0, 51, 52, 10**6, -1])
def test_every_byte_is_verified(capsys, folder, monkeypatch, at):
    """The token ids take the first 52 bytes; small blocks make the arrays be read in several pieces."""
    monkeypatch.setattr(stored_arrays, "BLOCK", 4099)
    status, out, err = run(capsys, folder, "--verify")
    assert (status, err) == (0, "") and "damaged" not in out
    content = bytearray((folder / "book" / storage.ARRAYS).read_bytes())
    content[at] ^= 1
    (folder / "book" / storage.ARRAYS).write_bytes(content)
    assert run(capsys, folder)[0] == 0
    status, out, err = run(capsys, folder, "--verify")
    (line,) = [line for line in out.splitlines() if "damaged: the bytes of " in line]
    assert (status, err) == (2, "") and line.startswith("book ") and line.endswith("are not those that were saved")
    assert ("token_ids" in line) == (0 <= at < 52)


def test_one_that_is_saved_anew_meanwhile_is_not_damaged(capsys, folder, monkeypatch):
    """A session saved again once during --verify is sound; one saved again at every try is damaged."""
    verify, interruptions = storage.StoredSession.verify, [1]

    def verify_while_saving(self):
        if self.path.name == "book" and interruptions:
            interruptions.pop()
            fields = fields_of(self.path)
            fields["started"] += 1
            seal(self.path, fields)
            damaged(self.path, "the bytes of it are another's")
        verify(self)

    monkeypatch.setattr(storage.StoredSession, "verify", verify_while_saving)
    status, out, err = run(capsys, folder, "--verify")
    assert (status, err, interruptions) == (0, "", []) and "damaged" not in out
    interruptions += 99 * [1]
    status, out, err = run(capsys, folder, "--verify")
    assert (status, err, len(interruptions)) == (2, "", 96) and "damaged: the bytes of it are another's" in out


def test_one_that_changes_places_meanwhile_is_not_damaged(capsys, folder, monkeypatch):
    scandir, interruptions = os.scandir, [1]

    def scandir_once_missing(path):
        if Path(path).name == "book" and interruptions:
            interruptions.pop()
            raise FileNotFoundError(2, "No such file or directory")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scandir_once_missing)
    status, out, err = run(capsys, folder, "--verify")
    assert (status, err, interruptions) == (0, "", []) and "damaged" not in out


def test_one_that_may_not_be_read_is_not_removed(capsys, folder, monkeypatch):
    def denied(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)
    assert run(capsys, folder, "--remove", "book") == (2, "book  not removed: Permission denied\n", "")


def test_names_reach_the_terminal_as_text(capsys, folder):
    os.rename(folder / "book", folder / "b\x1b[2Jk\n")
    out = run(capsys, folder)[1]
    assert out.splitlines()[1].startswith("b\\x1b[2Jk\\n  ") and "\x1b" not in out


def test_only_sessions_that_are_named_are_removed(capsys, folder, whole):
    (folder / "book" / "notes").touch()
    with claim(folder / "chat", mark=storage.ABOUT):
        status, out, err = run(capsys, folder, "--remove", "chat", "book", "chat")
    chat, book = out.splitlines()
    assert (status, err) == (2, "") and chat.startswith("chat  not removed: is in use by another writer of this process")
    assert book == "book  not removed: holds more than a session ('notes'): remove it by hand"
    for name, hint in (("other", ""), ("file", ""), ("boook", " (did you mean book?)"), ("../chat", " (did you mean chat?)")):
        status, out, err = run(capsys, folder, "--remove", "chat", name)
        message = f"icejax sessions: error: {folder} holds no session '{name}', and nothing was removed{hint}\n"
        assert (status, out, err) == (2, "", message)
    before = sorted(os.listdir(folder))
    (folder / "book" / "notes").unlink()
    status, out, err = run(capsys, folder, "--remove", "book", "--json")
    assert (status, err, json.loads(out)) == (0, "", {"name": "book", "removed": True})
    assert sorted(os.listdir(folder)) == [name for name in before if name not in (".book.lock", "book")]


def test_a_damaged_one_can_be_removed(capsys, folder):
    (folder / "book" / storage.ABOUT).write_text("{")
    assert run(capsys, folder, "--remove", "book")[:2] == (0, "book  removed\n") and not (folder / "book").exists()


def test_options_that_exclude_one_another_are_one_line(capsys, folder):
    status, out, err = run(capsys, folder, "--verify", "--remove", "book")
    assert (status, out) == (2, "") and err == "icejax sessions: error: argument --remove: not allowed with argument --verify\n"
    assert (folder / "book").exists()
