"""How commands end: one line and a status, no traceback, on Ctrl-C and on a full, closed or non-Unicode stdout."""

import concurrent.futures
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from icejax.api.generate import ASSETS
from icejax.checks.errors import InputError
from icejax.commands import process as launch
from tests.helpers import families

GENERATE = [sys.executable, "-m", "icejax.generate"]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc or /dev/full")


@pytest.fixture(scope="module")
def endless(tmp_path_factory) -> list[str]:
    """A command line that generates for minutes: the model has no end token."""
    folder = tmp_path_factory.mktemp("model") / "endless"
    shutil.copytree(ASSETS, folder)
    (folder / "generation_config.json").unlink()
    families.edit_config(folder, eos_token_id=None)
    return [*GENERATE, "--model", str(folder), "--prompt", "import", "--max-new-tokens", "20000", "--quiet"]


@pytest.fixture(scope="module", autouse=True)
def not_in_the_background():
    """Restores SIGINT: a background job of a shell ignores it, and its child processes would, too."""
    old_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old_handler)


def start(line: list[str], **streams) -> subprocess.Popen:
    return subprocess.Popen(line, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams)


def interrupted(line: list[str], after_s: float) -> None:
    """Interrupts the command `after_s` after its signal thread started; asserts one line and status 130."""
    process = start(line)
    while len(os.listdir(f"/proc/{process.pid}/task")) == 1:  # until the signal thread runs
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err.decode().strip()) == (130, "interrupted"), f"after {after_s:.2f} s: {err.decode()}"


@LINUX
@pytest.mark.parametrize("moments", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_ctrl_c_ends_with_one_line_at_any_moment(endless, moments):
    """Importing, loading, compiling, prefilling and decoding."""
    rng = random.Random(moments)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda after_s: interrupted(endless, after_s), [rng.uniform(0, 4) for _ in range(moments)]))


@LINUX
@pytest.mark.parametrize(
    "line",
    [["icejax", "doctor"], ["icejax.doctor"], ["convert.hf_to_orbax", str(ASSETS), "/no/such/place"]],
    ids=lambda x: x[0],
)
def test_every_command_owns_its_ctrl_c(line):
    interrupted([sys.executable, "-m", *line], 0.3)


def test_an_interrupt_removes_what_was_being_written(tmp_path):
    code = """
import pathlib, sys
from icejax.commands import process as launch
from icejax.files.unfinished import unfinished
def main(argv, name):
    part = pathlib.Path(sys.argv[1])
    part.mkdir()
    lock = part.with_suffix(".lock")
    lock.touch()
    with unfinished(lock), unfinished(part):
        print("writing", flush=True)
        while True:
            (part / "piece").write_text("x")
sys.modules["work"] = sys.modules["__main__"]
launch.launch("work", name="work")
"""
    process = start([sys.executable, "-c", code, str(tmp_path / "part")])
    assert process.stdout.readline() == b"writing\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130 and list(tmp_path.iterdir()) == []


def test_a_block_may_do_something_else_with_an_interrupt():
    code = """
import sys, threading
from icejax.commands import process as launch
from icejax.files.unfinished import unfinished
def main(argv, name):
    pressed = threading.Event()
    with launch.instead_of_ending(pressed.set):
        print("ready", flush=True)
        pressed.wait()
    print("went on", flush=True)
    threading.Event().wait()
sys.modules["work"] = sys.modules["__main__"]
launch.launch("work", name="work")
"""
    process = start([sys.executable, "-c", code])
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == b"went on\n"
    process.send_signal(signal.SIGINT)
    assert (process.communicate(timeout=20)[1].strip(), process.returncode) == (b"interrupted", 130)


def test_a_closed_stdout_pipe_ends_quietly(endless):
    process = start(endless)
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""


@LINUX
@pytest.mark.parametrize(
    "arguments",
    [pytest.param(["--prompt", "x", "--max-new-tokens", "2"], marks=pytest.mark.slow), ["--help"]],
    ids=lambda x: x[0],
)
def test_a_full_stdout_is_one_line(arguments):
    with open("/dev/full", "w") as full:
        process = start([*GENERATE, *arguments], stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.decode() == (
        "icejax.generate: error: stdout cannot be written (No space left on device): choose another place for the answer\n"
    )


def test_a_closed_stdout_is_told_before_anything_runs():
    process = subprocess.run(["sh", "-c", f"exec {sys.executable} -m icejax.generate --prompt x >&-"], capture_output=True)
    assert process.returncode == 2
    assert process.stderr == b"icejax.generate: error: stdout is closed: expected a terminal, a pipe or a file for the answer\n"


@pytest.mark.slow
def test_closed_stdin_and_stderr_do_no_harm():
    line = f"exec {sys.executable} -m icejax.generate --prompt - --max-new-tokens 2"
    process = subprocess.run(["sh", "-c", f"{line} <&-"], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (2, "icejax.generate: error: prompt 1 is empty: expected some text\n")
    assert subprocess.run(["sh", "-c", f"{line} --budget x 2>&-"], capture_output=True).returncode == 2


def test_stdout_of_few_characters_gets_escapes():
    code = """
import sys
from icejax.commands import process as launch
from icejax.files.unfinished import unfinished
def main(argv, name):
    launch.write("caf\\u00e9 \\u2603\\n")
sys.modules["work"] = sys.modules["__main__"]
launch.launch("work", name="work")
"""
    process = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True
    )
    assert process.returncode == 0 and process.stdout == "caf\\xe9 \\u2603\n"
    assert process.stderr == ("work: warning: stdout takes ascii, not UTF-8: other characters are written as escapes\n")


def test_errors_become_statuses(capsys, monkeypatch):
    def refuse():
        raise InputError("no")

    def leave():
        raise SystemExit(3)

    assert launch.ending("x", lambda: None) == 0 and launch.ending("x", lambda: 5) == 5
    assert launch.ending("x", leave) == 3 and launch.ending("x", refuse) == 2
    assert capsys.readouterr() == ("", "x: error: no\n")
    assert launch.ending("x", lambda: launch.LOG.warning("two\nlines \x1b[31m")) == 0
    assert capsys.readouterr() == ("", "x: warning: two\\nlines \\x1b[31m\n")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    assert not launch.is_unicode()


def test_a_terminal_is_given_no_control_characters(monkeypatch):
    text = "a\tb\n\x1b[2J\r\x9b7m\x7f é\u00a0\u3000\u200d"
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    assert launch.escaped(text) == "a\tb\n\\x1b[2J\\r\\x9b7m\\x7f é\u00a0\u3000\u200d"
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: False))
    assert launch.escaped(text) == text
