"""Settings of the whole suite: no network, no accelerator, nothing promoted in silence, nothing compiled twice."""

import ctypes
import gc
import importlib.metadata
import os
import sys
import tempfile

from packaging.version import parse

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers share what the process that starts them has
    CACHES = tempfile.TemporaryDirectory(prefix="icejax-tests-")
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",  # a process per core has no use for more
        "MALLOC_ARENA_MAX": "2",
        "XDG_CACHE_HOME": CACHES.name,  # nothing is left in the user's own
        # One cache of compiled programs for all tests and the commands they start: the same small ones come again and again.
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("ICEJAX_TEST_PROGRAMS", f"{CACHES.name}/programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
# Cheap to compile, slow to run, which small programs do not feel; `make test-slow` has some optimised too.
CHEAP = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_multi_thread_eigen=false",
    "--xla_cpu_parallel_codegen_split_count=1",  # or both cores compile each, and every part costs
]
if parse(importlib.metadata.version("jaxlib")) < parse("0.11.1"):  # later ones do not know it, and end the process
    CHEAP.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(CHEAP))

import jax
import psutil
import pytest

from tests.helpers import shapes

shapes.install()  # before anything of icejax is imported

import icejax
from icejax.engine import decode_step

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
MOST_BYTES = 1_200_000_000  # of a process of the suite, of which there are two, beside the commands that they start
gc.set_threshold(100_000, 50, 50)  # tracing makes many objects, few of them garbage, and a look through all of them is slow


NEEDS_TORCH = "needs PyTorch, in which the reference models are: pip install torch==2.13.0"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Skips a module that imports PyTorch where it is not installed."""
    report = yield
    if report.failed and "No module named 'torch'" in str(report.longrepr):
        report.outcome, report.longrepr = "skipped", (str(collector.path), None, f"Skipped: {NEEDS_TORCH}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Skips a test that imports PyTorch, or has transformers make a model of it, where it is not installed."""
    report = yield
    if report.failed and call.excinfo.errisinstance(ImportError) and "torch" in str(call.excinfo.value).lower():
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1], f"Skipped: {NEEDS_TORCH}")
    return report


def pytest_collection_finish():
    """Leaves what was imported out of every later collection: it is never garbage, and most of what there is."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def programs_are_dropped():
    """Keeps the suite's memory small: what a later file compiles again is read from the cache."""
    yield
    drop_programs()


@pytest.fixture(autouse=True)
def programs_are_few():
    """Within a file too, where they have become many."""
    yield
    if psutil.Process().memory_info().rss > MOST_BYTES:
        drop_programs()


def drop_programs() -> None:
    decode_step._programs.cache_clear()
    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what was freed


@pytest.fixture(scope="session")
def bundled():
    """The bundled model and its tokenizer, only to be read."""
    return icejax.load()
