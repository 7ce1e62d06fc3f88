"""The decode program compiles for GPU and TPU without either, and copies no pool there."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

CASES = [
    ("cuda", "jax_cuda12_plugin", "gather"),
    ("cuda", "jax_cuda12_plugin", "host_compute"),
    ("cuda", "jax_cuda12_plugin", "triton"),
    ("tpu", "libtpu", "slices"),
    ("tpu", "libtpu", "host_compute"),
]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("platform, compiler, backend", CASES, ids=[f"{p}-{b}" for p, _, b in CASES])
def test_the_step_copies_no_pool_and_sorts_no_pages(platform, compiler, backend, batch):
    if importlib.util.find_spec(compiler) is None:
        pytest.skip(f"{compiler} is not installed: pip install -e '.[aot]'")
    command = [sys.executable, "-m", "tests.aot", platform, backend, str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["pool_copies"]
    # What is fetched may be staged; a tenth of the pool is far more than that.
    assert found["host_temp_bytes"] < found["pool_bytes"] / 10 and found["temp_bytes"] < found["pool_bytes"] / 10
    if platform == "cuda":
        assert max(found["sorted_sizes"], default=0) <= 1024  # tokens of the fetched pages, not pages
