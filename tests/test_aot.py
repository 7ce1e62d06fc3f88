"""Every program that touches the cache compiles for GPU and TPU without either, and copies no pool there."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

COMPILERS = {"cuda": "jax_cuda12_plugin", "tpu": "libtpu"}
STEPS = [
    ("cuda", "step", "gather", "1"),
    ("cuda", "step", "gather", "2"),
    ("cuda", "step", "gather", "1", "int8"),
    ("cuda", "step", "host_compute", "1"),
    ("cuda", "step", "host_compute", "2"),
    ("cuda", "step", "triton", "1"),
    ("cuda", "step", "triton", "2"),
    ("tpu", "step", "slices", "1"),
    ("tpu", "step", "slices", "2"),
    ("tpu", "step", "host_compute", "1"),
    ("tpu", "step", "host_compute", "2"),
]
NAMES = ("prefill", "extend", "flush", "flushed", "compact", "write", "write-pages", "read-pages")
OTHERS = [(platform, name, backend) for platform, backend in (("cuda", "gather"), ("tpu", "slices")) for name in NAMES]


def compiled(platform: str, *options: str) -> dict:
    """Returns what `tests.aot` says of a program."""
    if importlib.util.find_spec(COMPILERS[platform]) is None:
        pytest.skip(f"{COMPILERS[platform]} is not installed: pip install -e '.[aot]'")
    command = [sys.executable, "-m", "tests.aot", platform, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", STEPS, ids="-".join)
def test_the_step_copies_no_pool_and_sorts_no_pages(case):
    found = compiled(*case)
    assert not found["pool_copies"]
    # What is fetched may be staged; a tenth of the pool is far more than that.
    assert found["host_temp_bytes"] < found["pool_bytes"] / 10 and found["temp_bytes"] < found["pool_bytes"] / 10
    if case[0] == "cuda":
        assert max(found["sorted_sizes"], default=0) <= 1024  # tokens of the fetched pages, not pages


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids="-".join)
def test_other_programs_write_in_place_and_copy_no_pool(case):
    found = compiled(*case)
    if case[1] == "flushed":  # a vector of every page of a layer is a 64th of the pool
        assert found["alias_bytes"] >= found["levels_bytes"] and found["temp_bytes"] < found["pool_bytes"] / 100
    elif case[1] in ("write", "write-pages"):
        assert found["alias_bytes"] >= found["pool_bytes"] and found["host_temp_bytes"] < found["pool_bytes"] / 100
    else:
        assert not found["pool_copies"] and found["host_temp_bytes"] < found["pool_bytes"] / 20
