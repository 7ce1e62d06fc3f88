"""Settings of the whole test suite: no network, CPU only, strict dtype promotion, one compile cache, bounded memory."""

import ctypes
import gc
import hashlib
import importlib.metadata
import os
import sys
import tempfile
import time
from pathlib import Path

from packaging.version import parse

if "ICEJAX_TEST_CACHES" not in os.environ:  # workers, and tests that tests run, have the folder of the process that starts them
    CACHES = tempfile.TemporaryDirectory(prefix="icejax-tests-")
    os.environ |= {
        "ICEJAX_TEST_CACHES": CACHES.name,
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",  # one test process per core
        "MALLOC_ARENA_MAX": "2",
        "XDG_CACHE_HOME": CACHES.name,  # leave the user's cache alone
        # One compile cache for all tests and the commands they start: they compile the same small programs many times.
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("ICEJAX_TEST_PROGRAMS", f"{CACHES.name}/programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
# Fast to compile and slow to run, which suits small programs; `make test-slow` also runs some tests optimised.
CHEAP_FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_multi_thread_eigen=false",
    "--xla_cpu_parallel_codegen_split_count=1",  # splitting a program over both cores costs more than it saves
]
if parse(importlib.metadata.version("jaxlib")) < parse("0.11.1"):  # later versions do not know the flag, and exit
    CHEAP_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(CHEAP_FLAGS))
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process that tests start would compile all modules
sys.dont_write_bytecode = False

import jax
import psutil
import pytest

from tests.helpers import shapes

shapes.install()  # before icejax is imported

import icejax
from icejax.commands.terminal import phases
from icejax.sandbox import programs as sandbox_programs
from tests.helpers import programs

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
phases.PATIENCE_S = 1e6  # on a busy machine a phase may last, and its line would stand between those that tests compare
# Bytes by which a test process grows before its programs are dropped; two of them run, beside the commands that they start. What
# the tests import is not counted: it alone is more than 1 GB, and programs that are dropped after every test are traced again.
GROWTH = 300_000_000
PROCESS = psutil.Process()
# Folders whose files run the bundled model, with the same programs, and change nothing that a program is made of.
SHARING = ("api", "commands", "evaluation", "serving", "session", "text")
gc.set_threshold(100_000, 50, 50)  # tracing makes many objects, few of them garbage, so collections are slow and free little


NEEDS_TORCH = "needs PyTorch, in which the reference models are: pip install torch==2.13.0"


def pytest_addoption(parser):
    parser.addoption("--until", type=float, default=float("inf"), help="seconds since 1970 after which no test begins")


def pytest_collection_modifyitems(config, items):
    """Orders tests for a run that a time ends: planted faults last, and files in another order every day.

    Of two processes one begins in the middle, so that each half is in this order.
    """
    if config.option.until == float("inf"):
        return

    def place(item) -> tuple[int, bool, bytes]:
        file, is_fault = item.path.name, item.path.name == "test_faults.py"
        digest = hashlib.sha256(f"{day} {item.name if is_fault or file == 'test_aot.py' else file}".encode()).digest()
        return digest[0] % 2, is_fault, digest

    day = int(config.option.until) // 86_400
    items.sort(key=place)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if time.time() > item.config.option.until:
        pytest.skip("not run: the time of --until is over")


def pytest_ignore_collect(collection_path, config):
    """Leaves out the module that imports Ray, for seconds, where no slow test runs."""
    return True if collection_path.name == "test_ray.py" and config.option.markexpr.startswith("not slow") else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Skips a module that imports PyTorch where it is not installed."""
    report = yield
    if report.failed and "No module named 'torch'" in str(report.longrepr):
        report.outcome, report.longrepr = "skipped", (str(collector.path), None, f"Skipped: {NEEDS_TORCH}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Skips a test that fails because PyTorch, which transformers' models need, is not installed."""
    report = yield
    if report.failed and call.excinfo.errisinstance(ImportError) and "torch" in str(call.excinfo.value).lower():
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1], f"Skipped: {NEEDS_TORCH}")
    return report


def pytest_collection_finish():
    """Excludes imported objects from garbage collection: they are most of all objects, and never garbage."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def programs_are_dropped(request):
    """Drops compiled programs after each file, to bound memory, and because files change constants that are in programs."""
    yield
    if request.path.relative_to(Path(__file__).parent).parts[0] not in SHARING:
        drop_programs()


@pytest.fixture(autouse=True)
def programs_are_few():
    """Drops compiled programs after a test if the process has grown by GROWTH since it last had none."""
    global without_programs
    if without_programs is None:
        without_programs = PROCESS.memory_info().rss
    yield
    if PROCESS.memory_info().rss > without_programs + GROWTH:
        drop_programs()


without_programs: int | None = None  # bytes


def drop_programs() -> None:
    """Drops compiled programs; a later test reads them from the compile cache."""
    global without_programs
    programs.drop()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system
    without_programs = PROCESS.memory_info().rss


@pytest.fixture(scope="session")
def bundled():
    """The bundled model and its tokenizer; tests must not change them."""
    return icejax.load()


@pytest.fixture(scope="session")
def sandbox():
    """Skips what runs programs in the sandbox where the machine lacks a part of it."""
    try:
        sandbox_programs.run("")
    except sandbox_programs.Unsafe as missing:
        pytest.skip(f"this machine lacks {missing}")


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of benchmarks' files that ICEJAX_TEST_DATA names, as --data takes it; tests that need one are skipped without."""
    folder = os.environ.get("ICEJAX_TEST_DATA")
    if folder is None:
        pytest.skip("ICEJAX_TEST_DATA names no folder with the files of docs/how-to/evaluate.md")
    return Path(folder)
