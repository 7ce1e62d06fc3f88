"""`icejax.sandbox.programs`: results of programs, limits of time and memory, and attempts to escape that must fail."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import pytest

from icejax.sandbox import programs

pytestmark = pytest.mark.usefixtures("sandbox")


def test_only_a_program_that_comes_to_its_end_passes():
    assert programs.run("import math\nassert math.gcd(4, 6) == 2") == "passed"
    assert programs.run("import os\nos._exit(0)\nassert False") == "failed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "assert False",
        "def f(:",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "import os; os._exit(10)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV); import ctypes; ctypes.string_at(0)",
        "f = lambda: f(); f()",
        "input()",
        "import sys; print('passed'); print('passed', file=sys.stderr); sys.exit(10)",
        "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'passed' * 100)\n  except OSError: pass\nassert False",
        "\ud800",
        "import numpy",
    ],
)  # fmt: skip
def test_what_does_not_come_to_its_end_fails(program):
    assert programs.run(program) == "failed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", ["while True: pass", "import time; time.sleep(60)", "import os\nif os.fork(): os.wait()\nwhile True: pass"]
)
def test_time_is_limited(program):
    started = time.perf_counter()
    assert programs.run(program, seconds=1) == "timed out"
    assert time.perf_counter() - started < 40


# Attempt -> program, and the exception that it must raise in the programs.
ATTEMPTS = {
    "memory of no process": (
        "import ctypes\nx = ctypes.CDLL(None, use_errno=True)\nif x.shmget(0, 4096, 0o1600) < 0: raise OSError(ctypes.get_errno(), '')",
        "PermissionError",
    ),
    "memory without a name": ("import os; os.memfd_create('a')", "PermissionError"),
    "memory": ("x = bytearray(2**30)", "MemoryError"),
    "processes": ("import os, time\nfor _ in range(20):\n  if not os.fork(): time.sleep(5); os._exit(0)", "BlockingIOError"),
    "a large file": ("open('large', 'wb').write(bytes(2**25))", "OSError"),
    "many open files": ("files = [open('/dev/null') for _ in range(100)]", "OSError"),
    "the network": ("import socket; socket.create_connection(('127.0.0.1', PORT), 1)", "OSError"),
    "datagrams": ("import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))", "OSError"),
    "a local socket": (
        "import socket; socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', 'LOCAL')", "PermissionError"
    ),
    "a pair that leaves": (
        "import socket; socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', 'LOCAL')", "PermissionError"
    ),
    "sockets by the other call": (
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\nif libc.syscall(425, 1, bytes(120)) < 0: raise OSError", "OSError"
    ),
    "a new file outside": ("open('OUTSIDE/new', 'w')", "OSError"),
    "a file outside": ("open('OUTSIDE/kept', 'w')", "OSError"),
    "reading a file": ("open('OUTSIDE/kept').read()", "OSError"),
    "reading by a link": ("import os; os.symlink('OUTSIDE/kept', 'mine'); open('mine').read()", "OSError"),
    "listing a folder": ("import os; os.listdir('OUTSIDE')", "OSError"),
    "the user's names": ("open('/etc/passwd').read()", "OSError"),
    "another's environment": ("open('/proc/PARENT/environ').read()", "OSError"),
    "its own memory as a file": ("open('/proc/self/mem', 'rb')", "OSError"),
    "a program of the system": ("import subprocess; subprocess.run(['/bin/true'])", "OSError"),
    "cutting a file": ("import os; os.truncate('OUTSIDE/kept', 0)", "OSError"),
    "removing a file": ("import os; os.remove('OUTSIDE/kept')", "OSError"),
    "the rights of a file": ("import os; os.chmod('OUTSIDE/kept', 0)", "OSError"),
    "the times of a file": ("import os; os.utime('OUTSIDE/kept')", "OSError"),
    "a link to a file": ("import os; os.link('OUTSIDE/kept', 'mine'); open('mine', 'w')", "OSError"),
    "a symbolic link": ("import os; os.symlink('OUTSIDE/kept', 'mine'); open('mine', 'w')", "OSError"),
    "the parent's memory": ("open('/proc/PARENT/mem', 'r+b')", "OSError"),
    "another process": ("import os; os.kill(PARENT, 0)", "OSError"),
    "a mount that can be written": (
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.unshare(0x10020000) or libc.mount(None, b'/', None, 32 | 4096, None): raise OSError", "OSError"
    ),
    "more time": ("import resource; resource.setrlimit(resource.RLIMIT_CPU, (99, 99))", "ValueError"),
    "being root": ("import os; os.setuid(0)", "OSError"),
    "the environment": ("import os; os.environ['HOME']", "KeyError"),
}  # fmt: skip


@pytest.fixture
def local_socket():
    """The name of a socket that everybody may write to."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        os.chmod(folder, 0o755)
        server.bind(name := f"{folder}/socket")
        os.chmod(name, 0o777)
        yield name


@pytest.mark.slow
@pytest.mark.parametrize("what", ATTEMPTS)
def test_a_program_is_kept_from(what, tmp_path, local_socket):
    (outside_file := tmp_path / "kept").write_text("kept")
    before = _metadata(outside_file)
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = {"PORT": server.getsockname()[1], "LOCAL": local_socket, "OUTSIDE": tmp_path, "PARENT": os.getpid()}
        program, error = ATTEMPTS[what]
        for word, value in words.items():
            program = program.replace(word, str(value))
        if what in ("the network", "datagrams", "a local socket", "a pair that leaves"):  # it works outside the sandbox
            exec(compile(program, what, "exec"), {})
        assert programs.run(f"try:\n  exec({program!r})\nexcept {error}: pass\nelse: assert False") == "passed"
    assert (
        outside_file.read_text() == "kept" and _metadata(outside_file) == before and list(tmp_path.iterdir()) == [outside_file]
    )


def _metadata(file: Path) -> tuple:
    status = file.stat()
    return status.st_mode, status.st_mtime_ns, status.st_size, status.st_nlink, status.st_uid


@pytest.mark.slow
def test_the_standard_library_can_be_read():
    """Parts of it that have shared libraries of the system too."""
    names = "bz2 csv ctypes decimal hashlib lzma multiprocessing sqlite3 ssl unittest zlib zoneinfo".split()
    names = [name for name in names if importlib.util.find_spec(name) is not None]
    program = f"import importlib\nfor name in {names}: importlib.import_module(name)\n"
    assert programs.run(program + "import hashlib, os; hashlib.sha3_256(os.urandom(8)); assert os.listdir()") == "passed"
    program = (
        "import asyncio, multiprocessing\nmultiprocessing.Pipe()\nasync def one(): return 1\nassert asyncio.run(one()) == 1"
    )
    assert programs.run(program) == "passed"  # pairs of connected sockets


@pytest.mark.slow
def test_a_program_has_its_folder_while_it_runs_and_no_longer(tmp_path, monkeypatch):
    monkeypatch.setattr(programs.tempfile, "tempdir", str(tmp_path))
    assert programs.run("import os\nopen('a', 'w').write('b')\nos.mkdir('c')\nassert open('a').read() == 'b'") == "passed"
    assert programs.run("open('/dev/null', 'w').write('x')") == "passed"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_nothing_outlives_the_program_or_its_caller(tmp_path, monkeypatch):
    """Neither a child in its own session, nor the program itself when its caller is killed."""
    monkeypatch.setattr(programs.tempfile, "tempdir", str(tmp_path))
    program = "import os\nif not os.fork():\n  os.setsid()\n  while True: pass"
    assert programs.run(program) == "passed" and not _sandbox_processes(str(tmp_path))
    code = f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\nfrom icejax.sandbox import programs; programs.run('while True: pass')"
    caller = subprocess.Popen([sys.executable, "-c", code])
    _wait(lambda: len(_sandbox_processes(str(tmp_path))) >= 2)
    caller.kill()
    caller.wait()
    _wait(lambda: not _sandbox_processes(str(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("signal", [9, 19])
def test_a_signal_to_the_programs_group_ends_no_keeper(tmp_path, monkeypatch, signal):
    """Nor does it stop the keeper: a program that then sleeps is ended in time."""
    monkeypatch.setattr(programs.tempfile, "tempdir", str(tmp_path))
    program = f"import os, time\nos.kill(0, {signal})\nos.killpg(os.getpgrp(), {signal})\ntime.sleep(60)"
    assert programs.run(program, seconds=1) in ("failed", "timed out")
    assert not _sandbox_processes(str(tmp_path)) and not list(tmp_path.iterdir())


TOO_MUCH = {
    "files": "for i in range(3000): open(str(i), 'w')\nwhile True: pass",
    "files, quickly": "for i in range(3000): open(str(i), 'w')",
    "bytes": "for i in range(8): open(str(i), 'wb').write(bytes(2**24))",
    "depth": "import os\nfor i in range(3000):\n  os.mkdir('a')\n  os.chdir('a')",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", TOO_MUCH)
def test_a_folder_that_holds_too_much_fails_and_is_removed(what, tmp_path, monkeypatch):
    monkeypatch.setattr(programs.tempfile, "tempdir", str(tmp_path))
    assert programs.run(TOO_MUCH[what]) == "failed"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_folders_that_may_not_be_read_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(programs.tempfile, "tempdir", str(tmp_path))
    program = "import os\nos.makedirs('a/b')\nos.symlink('/', 'a/c')\nos.chmod('a/b', 0)\nos.chmod('a', 0)"
    assert programs.run(program) == "passed" and not list(tmp_path.iterdir())


def _sandbox_processes(text: str) -> list[str]:
    """Returns the command lines of sandbox processes that contain `text`."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().decode(errors="replace")
        except OSError:
            continue
        lines += [line] if text in line and "programs.py" in line else []
    return lines


def _wait(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_where_something_is_missing_nothing_runs(tmp_path, monkeypatch):
    code = "import sys\nfrom icejax.sandbox.programs import confine\nconfine(sys.argv[1])\nconfine(sys.argv[1])"  # the second fails
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    missing = "no namespaces of one's own, without a network (Operation not permitted)"
    assert process.returncode == 1 and process.stderr.splitlines()[-1] == f"icejax.sandbox.programs.Unsafe: {missing}"
    (keeper := tmp_path / "keeper.py").write_text(
        f"import sys\nprint({missing!r}, file=sys.stderr)\nsys.exit({programs.UNSAFE})"
    )
    monkeypatch.setattr(programs, "__file__", str(keeper))
    with pytest.raises(programs.Unsafe, match=f"^{re.escape(missing)}$"):
        programs.run("")
    with monkeypatch.context() as other:
        other.setattr(os, "uname", lambda: types.SimpleNamespace(machine="s390x"))
        with pytest.raises(programs.Unsafe, match="^the numbers of the system calls of s390x are not known, those of x86_64, "):
            programs.run("")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(programs.Unsafe, match="^darwin has no namespaces and no Landlock, Linux has$"):
        programs.run("")
