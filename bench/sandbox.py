"""A program of which nobody knows what it does, run where it can do little: ``run(program)``. Linux alone, from 6.2.

It has no network, sees no other process and can write beneath one temporary folder alone: namespaces of its own (unshare(2)),
every other mount read-only (mount_setattr(2)), and Landlock, which keeps it so and closes devices. Its environment, input and
output are empty; memory, processor time, the sizes of files, their number and that of processes are limited; root's rights are
given up. A keeper, the process above it, ends it and all that it started when its time is over or the caller is gone. Not
closed: files can be read, though no word of them gets out, and local sockets with a name in the file system can be spoken to.

Only the standard library is imported here, for this file is also the keeper's program.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

PASSED, FAILED, TIMED_OUT, UNSAFE = range(10, 14)  # statuses the keeper exits with, none of them Python's own
ENDS = {PASSED: "passed", FAILED: "failed", TIMED_OUT: "timed out"}
LIMITS = {
    resource.RLIMIT_AS: 2**29,  # bytes, of each process
    resource.RLIMIT_FSIZE: 2**24,  # bytes, of each file
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_NPROC: 8,
    resource.RLIMIT_CORE: 0,
}
PATIENCE = 3  # seconds on the clock per second of the processor, which others may be using
NOBODY = 65534
# Of linux/sched.h, linux/mount.h, linux/prctl.h and linux/landlock.h; the numbers of the calls are those of every processor.
NAMESPACES = 0x10000000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x00020000  # of users, processes, network, IPC and mounts
BIND, HERE, BELOW, READ_ONLY, NO_NEW_PRIVILEGES = 4096, -100, 0x8000, 1, 38
MOUNT_SETATTR, CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 442, 444, 445, 446
VERSION, BENEATH, TRUNCATES = (
    1,
    1,
    3,
)  # asks for Landlock's version; a rule for a path; the first version that keeps files whole
WRITE_FILE, WRITES = 0x2, 0x7FF2  # writing a file; that, and removing, making, moving and truncating anything


class Unsafe(Exception):
    """This machine cannot keep a program from the network or from files; the message is a line that says what is missing."""


def run(program: str, *, seconds: int = 10) -> str:
    """Returns "passed" if a program came to its end, "timed out" if its time was over before, else "failed".

    That it came to its end is told by a number that the keeper drew; a program that leaves before, whatever its exit status,
    fails. One written to cheat this very file could look that number up in its own memory.

    Args:
        seconds: of the processor; on the clock there are three times as many.

    Raises:
        Unsafe: something is missing on this machine; nothing was run.
    """
    if not sys.platform.startswith("linux"):
        raise Unsafe(f"{sys.platform} has no namespaces and no Landlock, Linux has")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "program.py").write_text(program, encoding="utf-8", errors="replace")
        line = [sys.executable, "-I", "-S", __file__, folder, str(seconds)]
        # Nothing is written to stdin: that it closes tells the keeper that nobody waits any more.
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        with subprocess.Popen(line, env={}, cwd=folder, start_new_session=True, **pipes) as keeper:
            said = keeper.stderr.read().decode(errors="replace").splitlines()
    if keeper.returncode not in ENDS:
        raise Unsafe(said[-1] if said else f"the keeper's exit status is {keeper.returncode}")
    return ENDS[keeper.returncode]


def confine(folder: str) -> None:
    """Gives up, for this process and all that it starts, the network and all writing but beneath `folder`.

    Raises:
        Unsafe: the machine lacks one of the means; some may have been used.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def call(missing: str, function: Callable[..., int], *arguments: int | bytes | None) -> int:
        found = function(*(ctypes.c_long(x) if isinstance(x, int) else x for x in arguments))
        if found < 0:
            raise Unsafe(f"{missing} ({os.strerror(ctypes.get_errno())})")
        return found

    if os.geteuid() == 0:  # or the kernel would not count processes
        os.setresuid(NOBODY, NOBODY, 0)
        libc.setfsuid(0)  # files are still the caller's own; the rights of root are gone with the next line
    call("no namespaces of one's own, without a network", libc.unshare, NAMESPACES)
    here, tree = os.fsencode(folder), "no tree of files that is read-only"
    call(tree, libc.mount, here, here, None, BIND, None)
    call(tree, libc.syscall, MOUNT_SETATTR, HERE, b"/", BELOW, struct.pack("4Q", READ_ONLY, 0, 0, 0), 32)
    call(tree, libc.syscall, MOUNT_SETATTR, HERE, here, 0, struct.pack("4Q", 0, READ_ONLY, 0, 0), 32)
    os.chdir(folder)  # as it is mounted now
    landlock = "no Landlock that keeps files as they are, from Linux 6.2"
    if call(landlock, libc.syscall, CREATE_RULESET, None, 0, VERSION) < TRUNCATES:
        raise Unsafe(landlock)
    rules = call(landlock, libc.syscall, CREATE_RULESET, struct.pack("Q", WRITES), 8, 0)
    for path, allowed in ((folder, WRITES), (os.devnull, WRITE_FILE)):
        rule = struct.pack("=Qi", allowed, os.open(path, os.O_PATH))
        call(landlock, libc.syscall, ADD_RULE, rules, BENEATH, rule, 0)
    call(landlock, libc.prctl, NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call(landlock, libc.syscall, RESTRICT_SELF, rules, 0)


def _keep(folder: str, seconds: int) -> int:
    """Returns how the program in a folder ended, as an exit status."""
    program = Path(folder, "program.py").read_text(encoding="utf-8")
    try:
        confine(folder)
    except Unsafe as missing:
        print(missing, file=sys.stderr)
        return UNSAFE
    number, (told, telling) = os.urandom(16), os.pipe()
    worker = os.fork()
    if worker == 0:
        _work(program, number, telling, seconds)
    os.close(telling)
    select.select([os.pidfd_open(worker), sys.stdin], [], [], PATIENCE * seconds)
    os.kill(worker, signal.SIGKILL)  # the first of its namespace: all others go with it; nothing, if it has ended
    _, status = os.waitpid(worker, 0)
    if os.read(told, len(number)) == number:
        return PASSED
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL  # by us, or for the processor's time
    return TIMED_OUT if killed else FAILED


def _work(program: str, number: bytes, telling: int, seconds: int) -> NoReturn:
    """Runs the program, and tells the number behind its last line."""
    try:
        for stream in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        for limit, most in (LIMITS | {resource.RLIMIT_CPU: seconds}).items():
            resource.setrlimit(limit, (most, most))
        exec(compile(program, "program", "exec"), {})
        os.write(telling, number)
    finally:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(_keep(sys.argv[1], int(sys.argv[2])))
