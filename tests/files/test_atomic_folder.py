"""`atomic_folder`: after any crash a reader finds the old or the new folder, whole; a folder has one writer at a time."""

import contextlib
import itertools
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icejax.checkpoint.folder import resolve
from icejax.checks.errors import InputError
from icejax.files.atomic_folder import claim, current_folder
from icejax.files.cache_home import cache_home
from tests.helpers.crash import Killed, file_limit, killed_at

MARK = "session.json"
FILES = (MARK, "arrays", "more/deep")


def save(target: Path, version: str) -> None:
    with claim(target, mark=MARK) as held, held.writing() as part:
        (part / "more").mkdir()
        for name in FILES:
            file = os.open(part / name, os.O_WRONLY | os.O_CREAT)
            os.write(file, version.encode())
            os.close(file)


def save_killed(target: Path, version: str, step: int) -> bool:
    """Saves, killed at file operation `step`; returns whether the writer died before it was done."""
    with pytest.MonkeyPatch.context() as patch:
        killed_at(step, patch)
        try:
            save(target, version)
            return False
        except Killed:
            return True


def version_of(target: Path) -> str | None:
    """Returns the version that a reader finds, the same in all files; None if there is no folder."""
    folder = current_folder(target)
    if not folder.exists():
        return None
    (version,) = {(folder / name).read_text() for name in FILES}
    return version


@pytest.mark.parametrize("before", [None, "old"])
def test_killed_writer_leaves_the_old_or_the_new_folder_whole(tmp_path, before):
    versions = []
    for step in itertools.count(1):
        target = tmp_path / str(step) / "kept"
        target.parent.mkdir()
        if before:
            save(target, before)
        died = save_killed(target, "new", step)
        versions.append(version_of(target))
        if not died:
            break
        if step % 3 == 0:  # also kill the next writer, while it cleans up
            save_killed(target, "newer", 1 + step % 10)
            assert version_of(target) in (versions[-1], "newer")
        save(target, "next")
        assert version_of(target) == "next" and os.listdir(target.parent) == ["kept"]
    assert step > 20 and versions[0] == before and versions[-1] == "new"
    changes = [earlier != later for earlier, later in itertools.pairwise(versions)]
    assert sum(changes) == 1  # once new, always new


def test_a_remover_killed_at_any_step_leaves_it_whole_or_gone(tmp_path):
    versions = []
    for step in itertools.count(1):
        target = tmp_path / str(step) / "kept"
        target.parent.mkdir()
        save(target, "old")
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
            killed_at(step, patch)
            with claim(target, mark=MARK) as held:
                held.remove()
            break
        versions.append(version_of(target))
        save(target, "next")
        assert version_of(target) == "next" and os.listdir(target.parent) == ["kept"]
    assert os.listdir(target.parent) == [] and versions[0] == "old" and versions[-1] is None
    assert sum(earlier != later for earlier, later in itertools.pairwise(versions)) == 1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=6))
def test_writers_killed_one_after_another_lose_nothing(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("kills")
    target, neighbour = folder / "kept", folder / ".kept.other"
    neighbour.write_text("not ours")
    expected = None
    for version, step in enumerate(steps):
        died = save_killed(target, str(version), step)
        current = version_of(target)
        assert current in ((expected, str(version)) if died else (str(version),))
        expected = current
    save(target, "last")
    assert version_of(target) == "last" and sorted(os.listdir(folder)) == [".kept.other", "kept"]


def test_a_folder_between_two_names_is_found_and_put_back(tmp_path):
    save(tmp_path / "kept", "old")
    os.rename(tmp_path / "kept", tmp_path / ".kept.old")
    assert current_folder(tmp_path / "kept") == resolve(tmp_path / "kept") == tmp_path / ".kept.old"
    with (
        pytest.raises(InputError, match="exists: choose another place, or give --force"),
        claim(tmp_path / "kept", mark=MARK, replace=False),
    ):
        pass
    assert current_folder(tmp_path / "kept") == tmp_path / "kept" and version_of(tmp_path / "kept") == "old"


def test_what_others_keep_beside_it_is_left_alone(tmp_path):
    save(tmp_path / "kept", "old")
    neighbours = [".kept.original", ".kept.settings", ".keptabcd_123", ".other.abcd_123", "kept.part"]
    for name in neighbours:
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / ".kept.original" / MARK).touch()
    (tmp_path / ".kept.old").mkdir()  # no session: not ours
    save(tmp_path / "kept*", "a pattern of nothing")
    with pytest.raises(InputError, match=r"cannot be written \(Directory not empty\)|cannot be written \(File exists\)"):
        (tmp_path / ".kept.old" / "theirs").touch()
        save(tmp_path / "kept", "new")
    assert version_of(tmp_path / "kept") == "old" and (tmp_path / ".kept.old" / "theirs").exists()
    shutil.rmtree(tmp_path / ".kept.old")
    save(tmp_path / "kept", "new")
    assert sorted(os.listdir(tmp_path)) == sorted(["kept", "kept*", *neighbours])
    assert (tmp_path / ".kept.original" / MARK).exists()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    theirs, lock = tmp_path / "theirs", tmp_path / ".kept.lock"
    theirs.write_text("precious")
    lock.symlink_to(theirs)
    with pytest.raises(InputError, match=f"^{lock} is a link, and would be written to: remove it, or choose another place$"):
        save(tmp_path / "kept", "new")
    assert theirs.read_text() == "precious" and not (tmp_path / "kept").exists()
    lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(InputError, match=f"^{lock} is no file: remove it, or choose another place$"):
        save(tmp_path / "kept", "new")


def test_a_lock_that_somebody_removed_is_not_missed(tmp_path):
    lock = tmp_path / ".kept.lock"
    with claim(tmp_path / "kept", mark=MARK):
        lock.unlink()
    with claim(tmp_path / "kept", mark=MARK):
        lock.unlink()
        lock.write_text("another's")
    assert lock.read_text() == "another's"


HOLD = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(file, fcntl.LOCK_EX)
os.write(file, str(os.getpid()).encode())
print(flush=True)
sys.stdin.read()
"""


def test_second_writer_is_told_at_once_dead_ones_are_ignored(tmp_path):
    target, lock = tmp_path / "kept", tmp_path / ".kept.lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline()
    for _ in range(2):
        with pytest.raises(InputError) as error:
            save(target, "second")
        expected = f"{target} is in use by another process (pid {holder.pid}): wait for it, or choose another place"
        assert str(error.value) == expected
    holder.kill()
    holder.communicate()
    assert lock.exists()
    save(target, "second")
    assert version_of(target) == "second" and os.listdir(tmp_path) == ["kept"]


def test_writers_of_one_process_take_turns(tmp_path):
    with claim(tmp_path / "kept", mark=MARK) as held:
        for version in "ab":
            with held.writing() as part:
                for name in FILES:
                    (part / name).parent.mkdir(exist_ok=True)
                    (part / name).write_text(version)
        with pytest.raises(InputError, match="is in use by another writer of this process: wait for it"):
            save(tmp_path / "kept", "c")
        save(tmp_path / "other", "c")
        (tmp_path / "link").symlink_to("kept")
        with pytest.raises(InputError, match="link is in use by another writer of this process"):
            save(tmp_path / "link", "c")
    save(tmp_path / "link", "d")
    assert version_of(tmp_path / "kept") == "d" and (tmp_path / "link").is_symlink()


def test_a_lock_that_was_removed_meanwhile_is_no_lock(tmp_path, monkeypatch):
    """Between open and lock, the holder removes the lock file and another process makes one: the new file must be locked."""
    lock, original_open, removed = tmp_path / ".kept.lock", os.open, []

    def open_and_remove(path, *arguments, **options):
        file = original_open(path, *arguments, **options)
        if path == lock and not removed:
            removed.append(os.unlink(lock))
            lock.touch()  # the next writer's
        return file

    monkeypatch.setattr(os, "open", open_and_remove)
    with claim(tmp_path / "kept", mark=MARK):
        assert lock.read_text() == str(os.getpid()) and removed
        with pytest.raises(InputError, match="is in use"):
            save(tmp_path / "kept", "second")
    assert not lock.exists()


def test_what_is_in_the_way_is_told(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "theirs").mkdir()
    for name, message in (
        ("theirs", "exists and is no session folder: choose another place"),
        ("file", "exists and is no session folder: choose another place"),
        ("file/kept", r"cannot be written \(File exists: .*/file\): choose another place"),
        ("x" * 253, r"cannot be written \(File name too long\): choose another place"),
        (".kept.old", "cannot be the name of a folder that is kept: choose another place"),
    ):
        with pytest.raises(InputError, match=message) as error, claim(tmp_path / name, mark=MARK):
            pass
        assert "\n" not in str(error.value)
    assert sorted(os.listdir(tmp_path)) == ["file", "theirs"]


def test_too_small_a_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    with claim(tmp_path / "kept", mark=MARK) as held:
        held.check_room(1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 2**40, 2**30))
        held.check_room(2**30)
        with pytest.raises(InputError, match=r"kept needs 3 GiB and 1 GiB is free on its disk: make room, or choose another"):
            held.check_room(3 * 2**30)


def test_all_of_it_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    synced, fsync, rename = set(), os.fsync, os.rename

    def checked_rename(part, target):
        assert {os.stat(path).st_ino for path in [part, *Path(part).rglob("*")]} == synced
        rename(part, target)

    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.fstat(file).st_ino) or fsync(file))
    monkeypatch.setattr(os, "rename", checked_rename)
    save(tmp_path / "kept", "new")
    assert len(synced) == 6  # three files, two folders, and last their parent folder


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}


@pytest.mark.parametrize("mask", [0, 0o022, 0o277])
def test_a_private_folder_is_the_users_alone(tmp_path, monkeypatch, mask):
    """While it is written too, and where a library or an earlier version left the folder open."""
    save(tmp_path / "kept", "old")
    old_mask = os.umask(mask)
    try:
        with claim(tmp_path / "kept", mark=MARK) as held:
            for _ in range(2):
                with held.writing(private=True) as part:
                    assert stat.S_IMODE(part.stat().st_mode) == 0o700
                    (part / "more").mkdir(mode=0o777)
                    for name in (MARK, "arrays"):
                        (part / name).touch(mode=0o666)
    finally:
        os.umask(old_mask)
    assert modes(tmp_path / "kept") == {"kept": 0o700, "more": 0o700, MARK: 0o600, "arrays": 0o600}


@pytest.mark.parametrize("mask, folder_mode, file_mode", [(0o002, 0o775, 0o664), (0o077, 0o700, 0o600)])
def test_the_umask_decides_for_other_folders(tmp_path, mask, folder_mode, file_mode):
    old_mask = os.umask(mask)
    try:
        with claim(tmp_path / "kept", mark=MARK) as held, held.writing() as part:
            (part / "more").mkdir(mode=0o700)  # as a library may that makes temporary files
            os.close(os.open(part / MARK, os.O_CREAT | os.O_WRONLY, 0o600))
    finally:
        os.umask(old_mask)
    assert modes(tmp_path / "kept") == {"kept": folder_mode, "more": folder_mode, MARK: file_mode}


def test_a_disk_without_permissions_is_told(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "chmod", refuse)
    monkeypatch.setattr(os, "mkdir", lambda path, mode=0o777, real=os.mkdir: real(path, 0o777))
    with claim(tmp_path / "kept", mark=MARK) as held, held.writing(private=True) as part:
        (part / MARK).touch()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/kept: its disk keeps no permissions, others may read it: choose another place"
    ]


def assert_fails_late(target: Path, reason: str, size: int = 2**21) -> None:
    save(target, "old")
    with pytest.raises(InputError) as error, claim(target, mark=MARK) as held, held.writing() as part:
        (part / MARK).write_text("new")
        (part / "arrays").write_bytes(bytes(size))
    assert str(error.value) == f"{target} cannot be written ({reason}): what was there before is kept"
    assert version_of(target) == "old" and os.listdir(target.parent) == ["kept"]


def test_a_limit_on_files_is_told_and_the_old_one_kept(tmp_path):
    with file_limit(2**20):
        assert_fails_late(tmp_path / "kept", "File too large")


@pytest.fixture
def disk(tmp_path):
    """A mounted disk of 1 MiB."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("mounting is not permitted")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_a_full_disk_is_told_and_the_old_one_kept(disk):
    assert_fails_late(disk / "kept", "No space left on device")
    with claim(disk / "kept", mark=MARK) as held, pytest.raises(InputError, match="is free on its disk"):
        held.check_room(2**21)


def test_a_disk_that_cannot_be_written_is_told_at_the_claim(disk):
    save(disk / "kept", "old")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(InputError, match=r"kept cannot be written \(Read-only file system\): choose another place"):
        save(disk / "kept", "new")
    assert version_of(disk / "kept") == "old"


@pytest.mark.parametrize("text", ["failed: File too large [os_error_code='28']", "I/O error (os error 28)"])
def test_errors_of_the_system_inside_others_are_known(tmp_path, text):
    with pytest.raises(InputError, match=r"cannot be written \(No space left on device\): what was there before is kept"):
        with claim(tmp_path / "kept", mark=MARK) as held, held.writing():
            raise ValueError(text)
    with pytest.raises(ValueError, match="^of another kind$"), claim(tmp_path / "kept", mark=MARK) as held, held.writing():
        raise ValueError("of another kind")
    assert os.listdir(tmp_path) == []


def test_user_without_a_home_has_a_cache_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_home() == Path("/somewhere/icejax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_home() == Path("/home/me/.cache/icejax")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as without a known home
    assert cache_home() == Path("~/.cache/icejax")
