"""The probe of fetch backends in a child process: its result is stored, per GPU and driver, if it will not change."""

import json
import sys
from types import SimpleNamespace

import pytest

from icejax.runtime import devices
from icejax.runtime.host_reads import choose, probe


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Returns the folder of a machine with one GPU, and a function that sets the shell program run as the child process."""
    (tmp_path / "gpus" / "0").mkdir(parents=True)
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX 580.1\nGCC version: 12\n")
    (tmp_path / "gpus" / "0" / "information").write_text("Model: \t H200\nIRQ: 7\n")
    monkeypatch.setattr(probe, "DRIVER", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def child(program: str) -> None:
        probe.probe_error.cache_clear()  # as in another process
        (tmp_path / "python").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "python").chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    return tmp_path, child


def stored_results(folder) -> dict:
    return json.loads((folder / "cache" / "icejax" / "fetch.json").read_text())


@pytest.mark.parametrize(
    ("program", "fault", "lasting"),
    [
        ("echo noise; echo 'found: [\"gpu\", null]'", None, True),
        ('echo \'found: ["gpu", "brings wrong bits"]\'', "brings wrong bits", True),
        ("kill -SEGV $$", "fails: the process that tries it ended with status -11", True),
        ('echo \'found: ["gpu", "fails: RESOURCE_EXHAUSTED: x"]\'', "fails: RESOURCE_EXHAUSTED: x", False),
        ('echo \'found: ["cpu", "fails: no GPU"]\'', "fails: no GPU", False),
        ("exit 0", "fails: the process that tries it ended with status 0", False),
        ("kill -TERM $$", "fails: the process that tries it ended with status -15", False),
    ],
)
def test_what_a_process_of_its_own_finds_is_kept_if_it_will_last(machine, program, fault, lasting):
    folder, child = machine
    child(program)
    assert probe.probe_error("triton") == fault
    assert not lasting or list(stored_results(folder).values()) == [fault]
    child("exit 3")
    assert probe.probe_error("triton") == (fault if lasting else "fails: the process that tries it ended with status 3")


def test_another_driver_is_tried_anew(machine):
    folder, child = machine
    child("echo 'found: [\"gpu\", null]'")
    assert probe.probe_error("triton") is None
    (folder / "version").write_text("NVRM version: NVIDIA UNIX 581.0\n")
    child("kill -ABRT $$")
    assert probe.probe_error("triton") == "fails: the process that tries it ended with status -6"
    assert len(stored_results(folder)) == 2


def test_one_that_hangs_is_ended_and_tried_again(machine, monkeypatch):
    folder, child = machine
    monkeypatch.setattr(probe, "SECONDS", 0.2)
    child("exec sleep 60")
    assert probe.probe_error("triton") == "is not ready in 0.2 s"
    assert not (folder / "cache").exists()
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert probe.probe_error("triton") == "is not ready in 0.2 s"  # a process waits for the probe only once


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": 3}', "\xff"])
def test_a_file_that_holds_no_results_is_written_anew(machine, text):
    folder, child = machine
    (folder / "cache" / "icejax").mkdir(parents=True)
    (folder / "cache" / "icejax" / "fetch.json").write_bytes(text.encode("latin-1"))
    child("echo 'found: [\"gpu\", null]'")
    assert probe.probe_error("triton") is None and list(stored_results(folder).values()) == [None]


def test_unwritable_cache_folder_only_costs_another_probe(machine):
    folder, child = machine
    (folder / "cache").write_text("a file")
    child("echo 'found: [\"gpu\", null]'")
    assert probe.probe_error("triton") is None


def test_probe_runs_ahead_only_with_cuda_and_before_jax_starts(machine, monkeypatch):
    probed = []
    monkeypatch.setattr(probe, "probe_error", probed.append)
    monkeypatch.setattr(probe, "_plugins", lambda: ["jax"])
    monkeypatch.setattr(devices, "started", lambda: False)
    probe.probe_early(["triton"])  # does nothing, as tests run on the CPU alone
    monkeypatch.setattr(probe, "jax", SimpleNamespace(config=SimpleNamespace(jax_platforms="cuda,cpu")))
    probe.probe_early(["triton"])
    assert probed == ["triton"]
    monkeypatch.setattr(devices, "started", lambda: True)
    probe.probe_early(["triton"])
    monkeypatch.setattr(devices, "started", lambda: False)
    (machine[0] / "version").unlink()
    (machine[0] / "gpus" / "0" / "information").unlink()
    probe.probe_early(["triton"])
    assert probed == ["triton"]


@pytest.mark.slow
def test_the_process_tells_what_is_wrong_here(monkeypatch, tmp_path):
    """On this CPU Triton fails and slices pass; neither result is stored, as it holds for no GPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    probe.probe_error.cache_clear()
    assert probe.probe_error("triton").startswith("fails: ")
    monkeypatch.setattr(choose, "PROBED_BACKENDS", ("slices",))
    assert choose.backend_error("slices") is None
    assert not list(tmp_path.iterdir())
