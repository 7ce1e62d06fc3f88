"""`icejax generate --session`: a session that cannot be saved is a one-line error, before the prompt runs where possible."""

import os
import shutil

import pytest

from icejax.commands import generate as command
from icejax.files.atomic_folder import claim
from icejax.session import storage, text_cache
from tests.helpers.commands import SHORT, run
from tests.helpers.crash import file_limit


@pytest.fixture
def unloaded(monkeypatch):
    """Loading a model fails the test."""
    monkeypatch.setattr(command, "load", lambda *_, **__: pytest.fail("the model was loaded"))


def line(folder, *more: str) -> list[str]:
    return ["--prompt", "Pass key ab:12345.\nPass key ab:", "--session", str(folder), "--context-length", "500", *SHORT, *more]


def test_unusable_session_folder_is_told_before_the_model_loads(capsys, tmp_path, unloaded):
    with claim(tmp_path / "kept", mark=storage.ABOUT):
        status, out, err = run(capsys, *line(tmp_path / "kept"))
    assert (status, out, err.count("\n")) == (2, "", 1) and f"error: {tmp_path / 'kept'} is in use by another writer" in err
    (tmp_path / "file").touch()
    for name, message in (
        ("file", "exists and is no session folder"),
        ("file/kept", "file/kept cannot be written (File exists"),
    ):
        status, out, err = run(capsys, *line(tmp_path / name))
        assert (status, out, err.count("\n")) == (2, "", 1) and message in err
    assert os.listdir(tmp_path) == ["file"]


def test_the_folder_is_held_while_the_command_runs(capsys, tmp_path, monkeypatch):
    def interrupted_prefill(*_, **__):
        assert os.listdir(tmp_path) == [".kept.lock"]
        raise KeyboardInterrupt

    monkeypatch.setattr(text_cache, "prefill", interrupted_prefill)
    with pytest.raises(KeyboardInterrupt):
        run(capsys, *line(tmp_path / "kept"))
    assert os.listdir(tmp_path) == []


def test_a_disk_too_small_is_told_before_the_prompt_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(text_cache, "prefill", lambda *_, **__: pytest.fail("the prompt ran"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 2**40, 2**20))
    status, out, err = run(capsys, *line(tmp_path / "kept"), "--cache", "clustered")
    assert (status, out, err.count("\n")) == (2, "", 1) and "GiB and 0.000977 GiB is free on its disk: make room" in err


def test_failed_save_is_told_after_the_answer_keeps_old_session(capsys, tmp_path):
    assert run(capsys, *line(tmp_path / "kept"), "--cache", "full")[0] == 0
    before = {file: (tmp_path / "kept" / file).read_bytes() for file in os.listdir(tmp_path / "kept")}
    os.rename(tmp_path / "kept", tmp_path / ".kept.old")  # as after a writer was killed between its two renames
    with file_limit(2**20):
        status, out, err = run(capsys, "--prompt", "Pass key ab:", "--session", str(tmp_path / "kept"), *SHORT)
    expected = (
        f"icejax.generate: error: {tmp_path / 'kept'} cannot be written (File too large): what was there before is kept\n"
    )
    assert (status, err) == (2, expected) and len(out) > 1
    assert {file: (tmp_path / "kept" / file).read_bytes() for file in os.listdir(tmp_path / "kept")} == before
    assert os.listdir(tmp_path) == ["kept"]


@pytest.mark.slow
def test_unlimited_answer_needs_room_for_the_context_alone(capsys, tmp_path):
    status, out, err = run(capsys, *line(tmp_path / "kept"), "--cache", "full", "--max-new-tokens", str(10**12))
    assert status == 0 and out.startswith("12345.") and err.count("\n") == 1
    assert f"has room for an answer of 469, not {10**12}" in err
