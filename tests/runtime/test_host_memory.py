"""Free memory is that of the machine or of the process's control group, whichever is less."""

import psutil
import pytest

from icejax.runtime import devices, host_memory

GIB = 2**30


def group(folder, names, limit, used, unneeded) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip(names, (limit, used), strict=False):
        (folder / name).write_text(f"{text}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {unneeded}\n")


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Writes /proc/self/cgroup, on a machine of 100 GiB of which 80 are free."""
    monkeypatch.setattr(host_memory, "ROOT", tmp_path / "groups")
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path / "cgroup")
    memory = type("Memory", (), dict(total=100 * GIB, available=80 * GIB))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return (tmp_path / "cgroup").write_text


def test_without_a_group_the_machine_counts(groups, tmp_path):
    assert (host_memory.total(), host_memory.free()) == (100 * GIB, 80 * GIB)  # no /proc
    groups("3:cpuset:/a\n")
    assert (host_memory.total(), host_memory.free()) == (100 * GIB, 80 * GIB)


def test_the_least_of_a_group_and_its_parents_counts(groups, tmp_path):
    groups("0::/pod/container\n")
    group(tmp_path / "groups/pod/container", host_memory.VERSION_2, "max", 9 * GIB, 0)
    group(tmp_path / "groups/pod", host_memory.VERSION_2, 16 * GIB, 10 * GIB, 2 * GIB)
    assert (host_memory.total(), host_memory.free()) == (16 * GIB, 8 * GIB)  # what is cached of files can go
    assert devices.host_free() == 8 * GIB
    group(tmp_path / "groups/pod/container", host_memory.VERSION_2, 12 * GIB, 13 * GIB, 0)
    assert (host_memory.total(), host_memory.free()) == (12 * GIB, 0)


def test_groups_of_the_first_version_count(groups, tmp_path):
    groups("9:name=systemd:/x\n4:cpu,memory:/job\n0::/\n")
    group(tmp_path / "groups/memory", host_memory.VERSION_1, 2**63 - 4096, 30 * GIB, 0)  # no limit
    group(tmp_path / "groups/memory/job", host_memory.VERSION_1, 8 * GIB, 3 * GIB, GIB)
    assert (host_memory.total(), host_memory.free()) == (8 * GIB, 6 * GIB)
    (tmp_path / "groups/memory/job/memory.stat").write_text("?")
    assert host_memory.total() == 100 * GIB


def test_a_container_that_sees_its_own_group_as_the_root_counts(groups, tmp_path):
    groups("0::/../../else\n")
    group(tmp_path / "groups", host_memory.VERSION_2, 4 * GIB, GIB, 0)
    assert (host_memory.total(), host_memory.free()) == (4 * GIB, 3 * GIB)
