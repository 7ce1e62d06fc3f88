"""`icejax doctor` tests and times each fetch backend, shows why one fails, and says which is used."""

import json
import os
import subprocess
import sys

import pytest

from icejax.api.choice import batch_choice
from icejax.api.generate import ASSETS
from icejax.cache.registry import IN_PAGES, ON_DEVICE
from icejax.commands import doctor
from icejax.runtime.host_reads import choose
from icejax.runtime.host_reads.backends import BACKENDS


@pytest.mark.slow
def test_every_backend_is_tested_and_timed(capsys):
    assert doctor.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["backend"] for row in report["fetch"]] == list(choose.ORDER["cpu"])
    for row in report["fetch"]:
        assert (
            row["exact"] and abs(row["gb_per_s"] * row["microseconds"] / 1e6 * 1e9 / (512 * 8192) - 1) < 0.1
        )  # two digits are printed
    assert list(report["full_no_slower_up_to"]) == ["the bundled model", "Llama-3.1-8B"]
    assert report["fetch_backend"] == "gather_flat" and "pinned_host" in report["devices"][0]["memory_kinds"]


@pytest.mark.slow
def test_the_length_where_caches_cross_is_that_of_the_choice(capsys, bundled):
    assert doctor.main(["--model", str(ASSETS)]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--cache auto: ")]
    start = "--cache auto: full up to "
    assert line.startswith(start) and line.endswith(f" tokens, then clustered ({ASSETS})")
    tokens = int(line.removeprefix(start).partition(" ")[0].replace(",", ""))
    for length, policy in ((tokens, ON_DEVICE), (tokens + 1, IN_PAGES)):
        sizes = dict(batch_size=1, prompt_tokens=length - 256, new_tokens=256, joins=False)
        assert batch_choice(bundled[0], device_memory=2**33, host_memory_limit=None, **sizes).policy == policy
    assert doctor.main(["--model", "no/such/model"]) == 2
    assert capsys.readouterr().err.startswith("icejax.doctor: error: ")


@pytest.mark.slow
def test_a_backend_that_fails_is_shown_with_its_reason(capsys, monkeypatch):
    def refuse(table, rows):
        raise NotImplementedError("not here")

    monkeypatch.setitem(BACKENDS, "gather_flat", refuse)
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert "fails: not here" in out and "used: host_compute (" in out and "host memory" in out
    monkeypatch.setenv(choose.CHOICE, "gather_flat")
    assert doctor.main([]) == 2
    out = capsys.readouterr().out
    assert "fails: not here" in out and "used: none, only --cache full works" in out
    monkeypatch.setenv(choose.CHOICE, "nothing")
    assert doctor.main([]) == 2
    assert capsys.readouterr().err == (
        "icejax.doctor: error: ICEJAX_FETCH_BACKEND must be one of gather_flat, host_compute, slices on cpu, got 'nothing'\n"
    )


@pytest.mark.parametrize(
    "command", [pytest.param(["doctor"], marks=pytest.mark.slow), ["generate", "--prompt", "x", "--compile-cache", "none"]]
)
def test_a_machine_without_the_device_is_one_line(command):
    environment = dict(os.environ) | dict(JAX_PLATFORMS="cuda")
    process = subprocess.run([sys.executable, "-m", "icejax", *command], env=environment, capture_output=True, text=True)
    assert process.returncode == 2 and not process.stdout and process.stderr.count("\n") == 1, process.stderr
    assert f"icejax {command[0]}: error: JAX finds no device, with JAX_PLATFORMS='cuda'" in process.stderr
