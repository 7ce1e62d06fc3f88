"""The command `icejax serve`: its options, its refusals, and a process that starts, answers and ends by a signal."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import icejax
from icejax.commands import group, serve
from tests.helpers.in_processes import generate, model_folder, start


def refusal(capsys, *arguments: str) -> str:
    """Returns the one line of error of the command line."""
    status = serve.main([*arguments])
    out, err = capsys.readouterr()
    assert (status, out) == (2, "") and err.count("\n") == 1
    return err.removeprefix("icejax serve: error: ").rstrip("\n")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 lets other machines in: give --api-key KEY (or $ICEJAX_API_KEY), or --no-auth if all of them may ask"),
        (["--host", "::"], "--host :: lets other machines in: give --api-key KEY (or $ICEJAX_API_KEY), or --no-auth if all of them may ask"),
        (["--host", "example.org"], "--host example.org lets other machines in: give --api-key KEY (or $ICEJAX_API_KEY), or --no-auth if all of them may ask"),
        (["--api-key", "a", "--no-auth"], "--no-auth asks for no key: leave --api-key out, or --no-auth"),
        (["--api-key", "a secret"], "an API key must be ASCII text without spaces, because it travels in an HTTP header"),
        (["--api-key", ""], "an API key must be ASCII text without spaces, because it travels in an HTTP header"),
        (["--port", "70000"], "--port must be at most 65535, got 70000"),
        (["--slots", "0"], "--slots must be at least 1, got 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--max-queue", "-1"], "--max-queue must be at least 0, got -1"),
        (["--warmup", "-1"], "--warmup must be at least 0, got -1"),
        (["--prefix-memory", "-1"], "--prefix-memory must be a number from 0 to 1.04858e+06, got -1.0"),
        (["--prefix-disk", "-1"], "--prefix-disk must be a number from 0 to 1.04858e+06, got -1.0"),
        (["--prefix-dir", "x", "--prefix-memory", "0"], "--prefix-dir stores what --prefix-memory holds, which is 0: give both, or leave --prefix-dir out"),
        (["--prefill-share", "0"], "--prefill-share must be a number above 0 and at most 1, got 0.0"),
        (["--drain-seconds", "-1"], "--drain-seconds must be a number from 0 to 1e+06, got -1.0"),
        (["--served-model-name", " "], "--served-model-name must be printable text, got ' '"),
        (["--cache", "no"], "unknown cache 'no': expected one of "),
        (["--processes", "2"], "--processes needs --coordinator HOST:PORT"),
        (["--coordinator", "a:1"], "--coordinator needs --mesh heads=N: the processes share the KV heads of one model"),
        (["--coordinator", "a:1", "--mesh", "heads=2", "--prefix-dir", "x"], "--prefix-dir runs in one process: leave --coordinator out"),
    ],
)  # fmt: skip
def test_a_bad_option_is_told_before_anything_is_loaded(capsys, monkeypatch, arguments, message):
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)
    assert refusal(capsys, *arguments).startswith(message)


def test_keys_come_from_options_and_the_environment(monkeypatch):
    arguments = serve.parser("x").parse_args(["--host", "0.0.0.0", "--api-key", "a", "--api-key", "b"])
    monkeypatch.setenv(serve.KEY_VARIABLE, "c")
    assert serve.keys(arguments) == ("a", "b", "c")
    serve.check(arguments)
    serve.check(serve.parser("x").parse_args(["--host", "0.0.0.0"]))
    monkeypatch.setenv(serve.KEY_VARIABLE, "")
    arguments = serve.parser("x").parse_args(["--host", "0.0.0.0", "--no-auth"])
    assert serve.keys(arguments) == ()
    serve.check(arguments)


def test_missing_packages_are_named(capsys, monkeypatch):
    monkeypatch.setattr(serve, "NEEDED", ("json", "no_such_package"))
    assert refusal(capsys) == "icejax serve needs no_such_package: pip install 'icejax[serve]'"


@pytest.mark.parametrize(
    "arguments, names",
    [
        ([], ("bundled",)),
        (["--model", "org/Qwen"], ("Qwen",)),
        (["--model", "a/b/", "--served-model-name", "x", "--served-model-name", "y"], ("x", "y")),
    ],
)
def test_the_model_has_a_name(arguments, names):
    assert serve.model_names(serve.parser("x").parse_args(arguments)) == names


def test_addresses_of_this_machine_alone():
    assert [serve.is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost")] == [True] * 4
    assert [serve.is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "host", "")] == [False] * 5
    assert [serve.url(host, 80) for host in ("::1", "localhost")] == ["http://[::1]:80", "http://localhost:80"]


def test_a_failed_engine_is_status_1_and_other_errors_are_not_hidden(capsys, monkeypatch):
    pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    from icejax.commands import serving
    from icejax.serving.lifecycle import EngineFailed

    class Failing:
        port, error = 1, EngineFailed("the engine has failed: no power")

        def __init__(self, service, **options) -> None:
            assert service.hosts == ("localhost", "127.0.0.1", "::1") and options["port"] == 8000

        def drain(self) -> None:
            pass

        def run(self, *_) -> None:
            raise self.error

    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)
    monkeypatch.setattr(serving, "Server", Failing)
    assert serve.main([]) == 1
    Failing.error = MemoryError()
    assert refusal(capsys) == "out of memory on the host: use fewer --slots, a shorter --context-length, or a 16-bit --dtype"


def started(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "icejax", "serve", "--port", "0", "--quiet", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_process_starts_answers_and_ends_by_a_signal(sign):
    pytest.importorskip("uvicorn")
    process = started(
        "--context-length", "512", "--max-new-tokens", "64", "--warmup", "0", "--cache", "full", "--api-key", "sk-1"
    )
    try:
        line = process.stdout.readline()
        address = re.fullmatch(r"bundled is served at (http://127\.0\.0\.1:\d+/v1)\n", line)[1]
        body = json.dumps(dict(prompt="import os\nimport ", max_tokens=7, temperature=0)).encode()
        request = urllib.request.Request(f"{address}/completions", body, {"Authorization": "Bearer sk-1"})
        with urllib.request.urlopen(request, timeout=120) as response:
            assert json.load(response)["choices"][0]["text"] == "support"
        process.send_signal(sign)
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out, err) == (0, "", "")
    finally:
        process.kill()


@pytest.mark.slow
def test_a_second_signal_ends_a_process_that_drains():
    pytest.importorskip("uvicorn")
    process = started("--context-length", "4096", "--warmup", "0", "--cache", "full")
    try:
        address = process.stdout.readline().rpartition(" ")[2].strip()
        body = json.dumps(dict(prompt="a", max_tokens=4000, ignore_eos=True, stream=True)).encode()
        with urllib.request.urlopen(f"{address}/completions", body, timeout=120) as response:
            while not response.readline().startswith(b"data:"):
                pass
            process.send_signal(signal.SIGTERM)
            assert response.readline() is not None and process.poll() is None
            for _ in range(20):
                response.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 143
        assert process.stderr.read().strip() == "terminated"
    finally:
        process.kill()


@pytest.mark.slow
def test_a_model_that_does_not_load_is_told_in_one_line(tmp_path):
    pytest.importorskip("uvicorn")
    process = started("--model", str(tmp_path / "none"))
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "") and err.count("\n") == 1 and "none" in err


PROMPT, SEEDED = "he x", dict(seed=3, n=2)
LOST = f"icejax serve: error: {group.LOST_LINE}\n"


def group_of_two(folder: Path, *arguments: str) -> tuple[str, list[subprocess.Popen]]:
    """Starts a server in two processes; returns its address and them."""
    pytest.importorskip("uvicorn")
    sizes = ["--port", "0", "--quiet", "--context-length", "256", "--slots", "1", "--cache", "full"]
    processes = start(*generate(model_folder(folder), 2, *sizes, *arguments, command="serve"))
    return processes[0].stdout.readline().rpartition(" ")[2].strip(), processes


@pytest.mark.slow
def test_two_processes_serve_the_text_of_one(tmp_path):
    """After a warm-up; a signal to the first ends both."""
    address, processes = group_of_two(tmp_path, "--warmup", "1")
    try:
        answers = []
        for body in (dict(temperature=0), dict(temperature=1) | SEEDED):
            data = json.dumps(dict(prompt=PROMPT, max_tokens=9) | body).encode()
            with urllib.request.urlopen(f"{address}/completions", data, timeout=300) as response:
                answers += [choice["text"] for choice in json.load(response)["choices"]]
        processes[0].send_signal(signal.SIGTERM)
        ends = [process.communicate(timeout=120) for process in processes]
        assert [(process.returncode, *end) for process, end in zip(processes, ends, strict=True)] == [(0, "", "")] * 2
    finally:
        for process in processes:
            process.kill()
    model, tokenizer = icejax.load(tmp_path)
    drawn = dict(sampling=icejax.Sampling(temperature=1.0)) | SEEDED
    alone = [
        icejax.generate(model, tokenizer, PROMPT, max_new_tokens=9, cache=icejax.Full(), **options) for options in ({}, drawn)
    ]
    assert answers == [answer.text for part in alone for answer in part] and len(answers) == 3


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_a_serving_process_ends_the_other_with_a_line(tmp_path, victim):
    """Of the first while both wait, of the second during an answer."""
    address, processes = group_of_two(tmp_path, "--warmup", "0")
    try:
        body = json.dumps(dict(prompt=PROMPT, max_tokens=200, logit_bias={"2": -100}, stream=True)).encode()
        with contextlib.ExitStack() as stack:
            if victim == 1:
                response = stack.enter_context(urllib.request.urlopen(f"{address}/completions", body, timeout=300))
                while not response.readline().startswith(b"data:"):
                    pass
            processes[victim].kill()
            out, err = processes[1 - victim].communicate(timeout=120)
        lost = LOST.replace("error: ", "error: the engine has failed: ") if victim else LOST
        assert (processes[1 - victim].returncode, out, err) == (group.LOST, "", lost)
    finally:
        for process in processes:
            process.kill()
