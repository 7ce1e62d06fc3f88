"""The cache of compiled programs on disk: its size, which program leaves first, whose folder it is, and its faults."""

import os
import warnings

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from icejax.runtime import compile_cache
from tests.helpers.crash import file_limit

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture(autouse=True)
def settings_of_the_suite():
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def start_process(folder, room: int, monkeypatch) -> None:
    """Sets up the cache as a new process does, with `room` bytes for programs."""
    monkeypatch.setattr(compile_cache, "MOST_BYTES", room)
    compilation_cache.reset_cache()
    compile_cache.keep_programs(str(folder))


def compile_power(exponent: int) -> None:
    jax.jit(lambda x: x**exponent)(np.ones(3, np.float32))


def stored(folder) -> dict[str, int]:
    """Returns the names and bytes of the programs in `folder`."""
    return {path.name: path.stat().st_size for path in folder.glob("*-cache")}


def test_the_program_used_longest_ago_makes_room(tmp_path, monkeypatch):
    start_process(tmp_path, 2**30, monkeypatch)
    compile_power(3)
    (first,) = stored(tmp_path)
    compile_power(5)
    second = next(iter(stored(tmp_path).keys() - {first}))
    compile_power(3)  # another function with the same program, which is read from the cache
    assert stored(tmp_path).keys() == {first, second}
    room = int(sum(stored(tmp_path).values()) * 1.25)
    start_process(tmp_path, room, monkeypatch)
    compile_power(7)
    assert first in stored(tmp_path) and second not in stored(tmp_path) and len(stored(tmp_path)) == 2
    for exponent in range(11, 31):
        compile_power(exponent)
    assert 2 <= len(stored(tmp_path)) <= 3 and sum(stored(tmp_path).values()) <= room


def test_programs_without_a_time_are_bounded_too(tmp_path, monkeypatch):
    """Written by a version without a bound, or by a process killed before it wrote the program's time of use."""
    start_process(tmp_path, 2**30, monkeypatch)
    compile_power(3)
    compile_power(5)
    old_programs = stored(tmp_path)
    for time in tmp_path.glob("*-atime"):
        time.unlink()
    start_process(tmp_path, int(max(old_programs.values()) * 1.5), monkeypatch)
    compile_power(7)
    assert len(stored(tmp_path)) == 1 and not stored(tmp_path).keys() & old_programs


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


NOT_KEPT = "compiled programs are not kept: {}; choose another folder by --compile-cache, or 'none'"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "programs"):
        caplog.clear()
        start_process(folder, 2**30, monkeypatch)
        compile_power(37)
        assert lines(caplog) == [NOT_KEPT.format(f"{folder} cannot be written (Not a directory)")]
        assert jax.config.jax_compilation_cache_dir is None


def test_a_folder_that_others_may_fill_is_not_used(tmp_path, monkeypatch, caplog):
    """A program in it is not read either: the same program is compiled without a warning of its own."""
    folder = tmp_path / "open" / "programs"
    start_process(folder, 2**30, monkeypatch)
    compile_power(41)
    (program,) = stored(folder)
    (folder / program).write_bytes(b"planted")
    everybody = "may be written by everybody, whose programs would run"
    for path, mode, danger in (
        (folder, 0o777, f"{folder} {everybody}"),
        (folder, 0o1777, f"{folder} {everybody}"),
        (folder.parent, 0o777, f"{folder} is in {folder.parent}, which {everybody}"),
    ):
        caplog.clear()
        path.chmod(mode)
        start_process(folder, 2**30, monkeypatch)
        compile_power(41)
        assert lines(caplog) == [NOT_KEPT.format(danger)] and stored(folder) == {program: 7}
        path.chmod(0o700)
    caplog.clear()
    another = os.geteuid() + 1
    monkeypatch.setattr("os.geteuid", lambda: another)
    start_process(folder, 2**30, monkeypatch)
    assert lines(caplog) == [NOT_KEPT.format(f"{folder} belongs to another user, whose programs would run")]
    monkeypatch.undo()
    folder.parent.chmod(0o1777)  # as /tmp, where nobody can put another folder in its place
    (tmp_path / "link").symlink_to(folder)
    start_process(tmp_path / "link", 2**30, monkeypatch)
    assert jax.config.jax_compilation_cache_dir == str(folder)


def test_the_folder_is_made_for_the_user_alone(tmp_path, monkeypatch):
    old_mask = os.umask(0)
    try:
        start_process(tmp_path / "cache" / "programs", 2**30, monkeypatch)
    finally:
        os.umask(old_mask)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("cache", "cache/programs")] == [0o700, 0o700]


@pytest.mark.parametrize("damage", [lambda code: b"", lambda code: code[: len(code) // 2], lambda code: b"?" + code[1:]])
def test_a_damaged_program_is_one_line_and_replaced(tmp_path, monkeypatch, caplog, damage):
    start_process(tmp_path, 2**30, monkeypatch)
    for exponent in (43, 44, 45):
        compile_power(exponent)
    whole = {path.name: path.read_bytes() for path in tmp_path.glob("*-cache")}
    for name, code in whole.items():
        (tmp_path / name).write_bytes(damage(code))
    start_process(tmp_path, 2**30, monkeypatch)
    with warnings.catch_warnings(record=True) as shown:
        compile_cache.keep_programs(str(tmp_path))
        for exponent in (43, 44, 45):
            compile_power(exponent)
    assert shown == [] and len(lines(caplog)) == 1
    assert lines(caplog)[0].startswith(f"compile cache: a program in {tmp_path} is damaged and is compiled again (")
    sizes = {name: len(code) for name, code in whole.items()}
    assert stored(tmp_path).keys() == sizes.keys() and all(size > 0.9 * sizes[name] for name, size in stored(tmp_path).items())
    caplog.clear()
    start_process(tmp_path, 2**30, monkeypatch)
    for exponent in (43, 44, 45):
        compile_power(exponent)
    assert lines(caplog) == []


def test_a_disk_that_takes_no_more_is_one_line(tmp_path, monkeypatch, caplog):
    """What is half written is removed, else JAX would keep no more programs."""
    start_process(tmp_path, 2**30, monkeypatch)
    with file_limit(1000):
        for exponent in (47, 48):
            compile_power(exponent)
    assert lines(caplog) == [f"compile cache: programs are not kept in {tmp_path} (File too large)"] and stored(tmp_path) == {}
    compile_power(49)
    assert len(stored(tmp_path)) == 1 and len(caplog.records) == 1


def test_other_warnings_are_shown_as_before(tmp_path, monkeypatch):
    with pytest.warns(UserWarning, match="^of another kind$"):
        start_process(tmp_path, 2**30, monkeypatch)
        warnings.warn("of another kind", stacklevel=1)


def test_none_keeps_none(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    compile_cache.keep_programs("none")
    assert jax.config.jax_compilation_cache_dir == before
