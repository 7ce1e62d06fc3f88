"""How commands end: one line and a status, no traceback, on Ctrl-C and on a full, closed or non-Unicode stdout."""

import concurrent.futures
import io
import json
import os
import pty
import random
import shutil
import signal
import subprocess
import sys
import termios
import time
import unicodedata
from types import SimpleNamespace

import pytest

from icejax.api.generate import ASSETS
from icejax.checks.errors import InputError
from icejax.commands.terminal import process as launch
from tests.helpers import families

GENERATE = [sys.executable, "-m", "icejax.generate"]
WAIT_S = 120  # after which a process hangs, on the slowest machine
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc or /dev/full")


@pytest.fixture(scope="module")
def endless(tmp_path_factory) -> list[str]:
    """A command line that generates for minutes: the model has no end token."""
    folder = tmp_path_factory.mktemp("model") / "endless"
    shutil.copytree(ASSETS, folder)
    families.remove_eos(folder)
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
    _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err.decode().strip()) == (130, "interrupted"), f"after {after_s:.2f} s: {err.decode()}"


TURNING = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")  # bidirectional classes of control characters
MARKS = "\u061c\u200e\u200f"


def test_sigterm_leaves_the_terminal_as_it_was(tmp_path):
    """A progress bar has hidden the cursor, and a prompt has turned off the echo of keys."""
    code = """
import pathlib, sys, termios, threading
from icejax.commands.terminal import process as launch
from icejax.files.unfinished import unfinished
def main(argv, name):
    part = pathlib.Path(sys.argv[1])
    part.touch()
    settings = termios.tcgetattr(0)
    settings[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(0, termios.TCSANOW, settings)
    with unfinished(part), launch.instead_of_ending(lambda: None):
        print("\\x1b[?25lready", file=sys.stderr, flush=True)
        threading.Event().wait()
sys.modules["work"] = sys.modules["__main__"]
launch.launch("work", name="work")
"""
    terminal, child_end = pty.openpty()
    before = termios.tcgetattr(child_end)
    take = "import os, fcntl, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    line = [sys.executable, "-c", take + code, str(tmp_path / "part")]
    process = subprocess.Popen(line, stdin=child_end, stdout=child_end, stderr=child_end)
    shown = b""
    while b"ready" not in shown:
        shown += os.read(terminal, 1000)
    assert termios.tcgetattr(child_end) != before
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=WAIT_S) == 143
    shown = os.read(terminal, 1000)
    assert b"\x1b[?25h" in shown and b"terminated" in shown
    assert termios.tcgetattr(child_end) == before and list(tmp_path.iterdir()) == []
    os.close(terminal)
    os.close(child_end)


def test_lines_of_the_log_do_not_cut_an_answer():
    """What comes before the first piece is told before it, all else after the last; libraries' warnings alike."""
    code = """
import sys, warnings
from icejax.commands.terminal import process as launch
def work():
    sys.stderr = sys.stdout  # one stream, for the order
    with launch.uncut():
        launch.LOG.warning("before")
        for piece in ("one ", "two ", "\\n"):
            launch.write(piece)
            launch.LOG.warning("within")
            warnings.warn("of a library")
def main(argv, name):
    return launch.ending(name, work)
sys.modules["work"] = sys.modules["__main__"]
launch.launch("work", name="work")
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    lines = ["before", "one two ", "within", "UserWarning: of a library"]
    assert process.stdout.splitlines() == [line if line == "one two " else f"work: warning: {line}" for line in lines]


@LINUX
@pytest.mark.parametrize("moments", [1, pytest.param(16, marks=pytest.mark.slow)])
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
from icejax.commands.terminal import process as launch
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
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 130 and list(tmp_path.iterdir()) == []


def test_a_block_may_do_something_else_with_an_interrupt():
    code = """
import sys, threading
from icejax.commands.terminal import process as launch
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
    assert (process.communicate(timeout=WAIT_S)[1].strip(), process.returncode) == (b"interrupted", 130)


@pytest.mark.slow
def test_a_closed_stdout_pipe_ends_quietly(endless):
    process = start(endless)
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=WAIT_S) == 141
    assert process.stderr.read() == b""


@LINUX
@pytest.mark.parametrize(
    "arguments",
    [pytest.param(["--prompt", "x", "--max-new-tokens", "2", "--quiet"], marks=pytest.mark.slow), ["--help"]],
    ids=lambda x: x[0],
)
def test_a_full_stdout_is_one_line(arguments):
    with open("/dev/full", "w") as full:
        process = start([*GENERATE, *arguments], stdout=full)
        _, err = process.communicate(timeout=WAIT_S)
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
    line = f"exec {sys.executable} -m icejax.generate --prompt - --max-new-tokens 2 --quiet"
    process = subprocess.run(["sh", "-c", f"{line} <&-"], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (2, "icejax.generate: error: prompt 1 is empty: expected some text\n")
    assert subprocess.run(["sh", "-c", f"{line} --budget x 2>&-"], capture_output=True).returncode == 2


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-", "2> pipe"])
def test_messages_that_stderr_cannot_take_leave_the_answer(tmp_path, where):
    """stderr is full, closed, or a pipe whose reader has gone."""
    line = f"{sys.executable} -m icejax.generate --prompt x --max-new-tokens 2"  # its first message tells the cache
    os.mkfifo(tmp_path / "pipe")
    script = f"head -c0 < pipe & exec {line} {where}" if "pipe" in where else f"exec {line} {where}"
    expected = subprocess.run(["sh", "-c", f"{line} --quiet"], capture_output=True)
    process = subprocess.run(
        ["sh", "-c", script], stdout=subprocess.PIPE, cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.getcwd()}
    )
    assert (process.returncode, process.stdout) == (0, expected.stdout) and expected.stdout


def test_stdout_of_few_characters_gets_escapes():
    code = """
import sys
from icejax.commands.terminal import process as launch
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


def test_forked_processes_end_without_the_command():
    """A pool ends its processes by SIGTERM."""
    code = """
import multiprocessing
from icejax.commands.terminal import process
process._own_signals()
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=WAIT_S).returncode == 0


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
    text = "a\tb\n\x1b[2J\r\x9b7m\x7f é\u00a0\u3000\u200d\u0627"
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    assert launch.escaped(text) == "a\tb\n\\x1b[2J\\r\\x9b7m\\x7f é\u00a0\u3000\u200d\u0627"
    turning = [chr(code) for code in range(0x110000) if unicodedata.bidirectional(chr(code)) in TURNING] + list(MARKS)
    assert len(turning) == 12 and all(launch.escaped(x) == f"\\u{ord(x):04x}" for x in turning)
    assert json.loads(launch.escaped(json.dumps({"text": "".join(turning)}, ensure_ascii=False)))["text"] == "".join(turning)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: False))
    assert launch.escaped(text) == text
