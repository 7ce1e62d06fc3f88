"""The cache of compiled programs on disk: it stays within its size, and the program used longest ago leaves first."""

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from icejax.runtime import compile_cache

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


def test_a_folder_that_cannot_be_written_is_jaxs_to_tell(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    start_process(tmp_path / "file", 2**30, monkeypatch)
    with pytest.warns(UserWarning, match="persistent compilation cache"):
        compile_power(37)


def test_none_keeps_none(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    compile_cache.keep_programs("none")
    assert jax.config.jax_compilation_cache_dir == before
