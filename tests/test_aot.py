"""The decode program compiles for GPU and TPU without either, and copies no pool there."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

CASES = [
    ("cuda", "jax_cuda12_plugin", "gather", "1"),
    ("cuda", "jax_cuda12_plugin", "gather", "2"),
    ("cuda", "jax_cuda12_plugin", "gather", "1", "int8"),
    ("cuda", "jax_cuda12_plugin", "host_compute", "1"),
    ("cuda", "jax_cuda12_plugin", "host_compute", "2"),
    ("cuda", "jax_cuda12_plugin", "triton", "1"),
    ("cuda", "jax_cuda12_plugin", "triton", "2"),
    ("tpu", "libtpu", "slices", "1"),
    ("tpu", "libtpu", "slices", "2"),
    ("tpu", "libtpu", "slices", "1", "int8"),
    ("tpu", "libtpu", "host_compute", "1"),
    ("tpu", "libtpu", "host_compute", "2"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=["-".join((case[0], *case[2:])) for case in CASES])
def test_the_step_copies_no_pool_and_sorts_no_pages(case):
    platform, compiler, *options = case
    if importlib.util.find_spec(compiler) is None:
        pytest.skip(f"{compiler} is not installed: pip install -e '.[aot]'")
    command = [sys.executable, "-m", "tests.aot", platform, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["pool_copies"]
    # What is fetched may be staged; a tenth of the pool is far more than that.
    assert found["host_temp_bytes"] < found["pool_bytes"] / 10 and found["temp_bytes"] < found["pool_bytes"] / 10
    if platform == "cuda":
        assert max(found["sorted_sizes"], default=0) <= 1024  # tokens of the fetched pages, not pages
