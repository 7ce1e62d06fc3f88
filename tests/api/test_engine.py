"""`icejax.Engine` with a model: requests of many threads are answered as `generate` answers them alone."""

import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import icejax
from icejax.cache.registry import Full
from icejax.engine.serving.core import Core
from icejax.engine.serving.group import FollowingCore
from icejax.engine.serving.scheduler import Scheduler

TEXTS = ["import os", "x = [", "def f(a):\n    return a", "class A:", "for i in range(10):", "print("]
SAMPLING = icejax.Sampling(temperature=1.2)


@pytest.fixture(scope="module")
def engine(bundled):
    with icejax.Engine(*bundled, cache=Full(), batch_size=3, context_length=300, max_new_tokens=40) as engine:
        yield engine


def alone(bundled, text: str, **options) -> icejax.GenerationResponse:
    return icejax.generate(*bundled, text, cache=Full(), **options)[0]


@pytest.mark.slow
def test_texts_of_many_threads_have_their_own_answers(engine, bundled):
    def ask(i: int) -> icejax.GenerationResponse:
        return engine.submit(TEXTS[i % 6] + "\n" * (i // 6), max_new_tokens=3 + i).result()

    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(ask, range(12)))
    expected = icejax.generate(
        *bundled,
        [icejax.Request(prompt=TEXTS[i % 6] + "\n" * (i // 6), max_new_tokens=3 + i) for i in range(12)],
        cache=Full(),
    )
    assert [(a.text, a.token_ids, a.finish_reason) for a in answers] == [
        (e.text, e.token_ids, e.finish_reason) for e in expected
    ]


@pytest.mark.slow
def test_a_request_samples_as_it_does_alone(engine, bundled):
    requests = [icejax.Request(prompt=text, seed=i, sampling=SAMPLING, max_new_tokens=9) for i, text in enumerate(TEXTS)]
    handles = [engine.submit(request) for request in requests]
    answers = [handle.result().token_ids for handle in handles]
    assert answers[2:4] == [alone(bundled, request).token_ids for request in requests[2:4]]
    assert answers == [answer.token_ids for answer in icejax.generate(*bundled, requests, cache=Full())]


@pytest.mark.slow
def test_pieces_come_one_by_one_and_a_cancelled_request_ends(engine, bundled):
    handle, pieces = engine.submit("import ", max_new_tokens=40), []
    for piece in handle:
        pieces.append(piece)
        if len(pieces) == 5:
            handle.cancel()
    assert 5 <= len(pieces) <= 40 and all(len(piece.token_ids) == 1 for piece in pieces)
    whole = alone(bundled, "import ", max_new_tokens=40)
    assert tuple(piece.token_ids[0] for piece in pieces) == whole.token_ids[: len(pieces)]
    assert engine.submit("import ", max_new_tokens=2).result().token_ids == whole.token_ids[:2]


WRONG = {
    "two prompts": (dict(prompt=["a", "b"]), r"submit takes one prompt, got 2: call it for each"),
    "empty": (dict(prompt=""), "prompt 1 is empty: expected some text"),
    "too long": (dict(prompt="a" * 300), "300 tokens"),
    "many tokens": (
        dict(prompt="a", max_new_tokens=41),
        "max_new_tokens is 41 and the engine's rows have room for 40: ask for",
    ),
    "its own tokens": (
        dict(prompt=icejax.Request(prompt="a", max_new_tokens=41)),
        "max_new_tokens is 41 and the engine's rows",
    ),
    "a stop string with a special token": (
        dict(prompt="a", stop="\n<eos>"),
        r"^prompt 1: stop string '\\n<eos>' holds the special token '<eos>', which is no text: give it alone$",
    ),
    "seed": (dict(prompt="a", seed=-1), "seed must be at least 0, got -1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_answered_is_refused_at_once(engine, case):
    arguments, message = WRONG[case]
    with pytest.raises(icejax.InputError, match=message):
        engine.submit(**arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(batch_size=0), "batch_size must be at least 1, got 0"),
        (dict(context_length=1), "context_length must be at least 2, got 1"),
        (dict(prefix_memory=-1), "prefix_memory must be at least 0, got -1"),
        (dict(prefix_disk=-1), "prefix_disk must be at least 0, got -1"),
        (dict(prefix_dir=5), "the path of a folder must be a text or a path, got 5"),
        (dict(prefix_dir="/nowhere", prefix_memory=0), "prefix_dir stores what prefix_memory holds, which is 0: give both"),
        (dict(prefix_dir=os.devnull), "prefix_dir /dev/null cannot be used .*: choose another folder"),
        (dict(prefill_share=0), "prefill_share must be a number above 0 and at most 1, got 0"),
        (dict(max_queue=0), "max_queue must be at least 1, got 0"),
        (dict(max_new_tokens=0), "max_new_tokens must be at least 1, got 0"),
        (dict(cache=icejax.Clustered(), host_memory_limit=1000), "host memory"),
    ],
)
def test_an_engine_that_cannot_be_is_refused_at_once(bundled, options, message):
    count = threading.active_count()
    with pytest.raises(icejax.InputError, match=message):
        icejax.Engine(*bundled, **dict(context_length=300) | options)
    assert threading.active_count() <= count + 1  # the thread may still be on its way out


def test_a_failure_on_the_device_reaches_the_caller(bundled, monkeypatch):
    engine = icejax.Engine(*bundled, cache=Full(), batch_size=3, context_length=300, max_new_tokens=40)
    decode = Core._decode

    def broken(core):
        if len(core.scheduler.decoding) == 2:
            raise MemoryError("out of memory")
        yield from decode(core)

    monkeypatch.setattr(Core, "_decode", broken)
    handles = [engine.submit("import "), engine.submit("x = ")]
    for handle in handles:
        with pytest.raises(RuntimeError, match="^the engine has failed: out of memory$"):
            handle.result()
    with pytest.raises(RuntimeError, match="^the engine has failed: out of memory$"):
        engine.submit("y")
    engine.close()


def test_an_engine_that_nobody_holds_ends_behind_its_last_handle(bundled):
    handle = icejax.Engine(*bundled, cache=Full(), batch_size=1, context_length=300).submit("import ", max_new_tokens=5)
    thread = handle.engine._thread._thread
    assert handle.result().token_ids == alone(bundled, "import ", max_new_tokens=5).token_ids and thread.is_alive()
    del handle
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_a_closed_engine_says_so(bundled):
    with icejax.Engine(*bundled, cache=Full(), batch_size=3, context_length=300, max_new_tokens=40) as engine:
        handle = engine.submit("import ", max_new_tokens=40)
    with pytest.raises(RuntimeError, match="^the engine is closed: start another one$"):
        handle.result()
    with pytest.raises(RuntimeError, match="^the engine is closed: start another one$"):
        engine.submit("import ")


@pytest.mark.slow
def test_an_interpreter_ends_while_an_engine_answers():
    code = """
import icejax
engine = icejax.Engine(*icejax.load(), context_length=2000, max_new_tokens=1000)
handles = [engine.submit("import os", max_new_tokens=1000) for _ in range(9)]
print(len(next(iter(handles[0])).token_ids))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (process.returncode, process.stdout, process.stderr) == (0, "1\n", "")


def test_an_engine_that_follows_takes_no_calls():
    core, engine = SimpleNamespace(constants=None, scheduler=Scheduler(2, None)), object.__new__(icejax.Engine)
    engine._thread = FollowingCore(core, None, SimpleNamespace(config=None), None)
    assert (engine.step_sizes, engine.load.running, engine.failure) == ((2,), 0, None)
    with pytest.raises(icejax.InputError, match="^process 0 takes the requests of a group: submit there"):
        engine.compile_for(2)
