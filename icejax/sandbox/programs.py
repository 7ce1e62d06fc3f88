"""A sandbox for untrusted programs, on Linux from 6.2: ``run(program)``, for benchmarks of code.

The program has no network and sees no other process. It reads only Python's library, shared libraries of the system and one
temporary folder, and writes only in that folder. The means are namespaces (unshare(2)), read-only mounts (mount_setattr(2)),
Landlock, which closes all other files and devices and prevents new mounts, and a filter of system calls (seccomp(2)), without
which a program could reach local sockets that have a name in the file system, or keep memory that no limit counts. Environment,
input and output are empty. Memory, processor time and the number of processes are limited, and root's rights are given up. A
keeper process ends the program, and all processes that the program started, when its time is over, its folder holds too much or
the caller is gone.

This file is also the keeper's program, so it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

PASSED, FAILED, TIMED_OUT, UNSAFE = range(10, 14)  # exit statuses of the keeper; Python itself uses none of them
ENDS = {PASSED: "passed", FAILED: "failed", TIMED_OUT: "timed out"}
LIMITS = {
    resource.RLIMIT_AS: 2**29,  # bytes per process
    resource.RLIMIT_FSIZE: 2**24,  # bytes per file
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_NPROC: 8,
    resource.RLIMIT_CORE: 0,
}
MOST_FILES, MOST_BYTES = 1000, 2**26  # in the program's folder
POLL_S = 0.1  # between two looks at the folder
PATIENCE = 3  # wall-clock seconds per second of processor time, because the machine may be busy
NOBODY = 65534
# Constants of linux/sched.h, mount.h, prctl.h and landlock.h; the call numbers are the same on every processor.
NAMESPACES = 0x10000000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x00020000  # of users, processes, network, IPC and mounts
BIND, HERE, BELOW, READ_ONLY, NO_NEW_PRIVILEGES, PARENT_DEATH = 4096, -100, 0x8000, 1, 38, 1
MOUNT_SETATTR, CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 442, 444, 445, 446
VERSION, BENEATH, TRUNCATES = (
    1,
    1,
    3,
)  # asks for Landlock's version; a rule for a path; the first version that can forbid truncating files
WRITE_FILE, WRITES = 0x2, 0x7FF2  # writing a file; writing, and removing, making, moving and truncating anything
READ_FILE, READS = 0x4, 0xC  # reading a file; reading, and listing a folder
LIBRARIES = (os.path.dirname(os.__file__), f"{sys.base_prefix}/lib", f"{sys.base_exec_prefix}/lib")  # of Python
LIBRARIES += ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
# Of each processor its name in linux/audit.h, and its numbers of socketpair(2), socket(2), shmget(2) and memfd_create(2).
CALLS = {
    "x86_64": (0xC000003E, 53, 41, 29, 319),
    "aarch64": (0xC00000B7, 199, 198, 194, 279),
    "riscv64": (0xC00000F3, 199, 198, 194, 279),
}
IO_URING, X32 = 425, 0x40000000  # io_uring_setup(2), which makes sockets too; the first number of x86-64's other table of calls
FILTER, STREAM = (22, 2), 1  # of prctl(2), for a filter of system calls; the type of a socket


class Unsafe(Exception):
    """This machine cannot close the network or files to a program; the message is one line that says what is missing."""


def run(program: str, *, seconds: int = 10) -> str:
    """Returns "passed" if a program reached its last line, "timed out" if its time was over first, else "failed".

    After the last line the worker sends back a random number drawn by the keeper, so a program that exits earlier fails with
    any exit status. A program written to cheat this file could find the number in its own memory.

    Args:
        seconds: limit of processor time; the wall-clock limit is three times as long.

    Raises:
        Unsafe: something is missing on this machine; nothing was run.
    """
    if not sys.platform.startswith("linux"):
        raise Unsafe(f"{sys.platform} has no namespaces and no Landlock, Linux has")
    if (machine := os.uname().machine) not in CALLS:
        raise Unsafe(f"the numbers of the system calls of {machine} are not known, those of {', '.join(CALLS)} are")
    with _own_folder() as folder:
        Path(folder, "program.py").write_text(program, encoding="utf-8", errors="replace")
        command = [sys.executable, "-I", "-S", __file__, folder, str(seconds)]
        # Nothing is written to stdin; it closes when the caller is gone, and then the keeper ends the program.
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        with subprocess.Popen(command, env={}, cwd=folder, start_new_session=True, **pipes) as keeper:
            messages = keeper.stderr.read().decode(errors="replace").splitlines()
    if keeper.returncode not in ENDS:
        raise Unsafe(messages[-1] if messages else f"the keeper's exit status is {keeper.returncode}")
    return ENDS[keeper.returncode]


@contextlib.contextmanager
def _own_folder() -> Iterator[str]:
    """Yields an empty folder, which is removed at the end, however deep the folders in it are."""
    folder = tempfile.mkdtemp()
    try:
        yield folder
    finally:
        names = itertools.count()
        while entries := list(os.scandir(folder)):
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                for name in os.listdir(entry.path):  # its content moves up: a deep name would be too long
                    os.rename(os.path.join(entry.path, name), os.path.join(folder, f".up-{next(names)}"))
                os.rmdir(entry.path)
        os.rmdir(folder)


def _holds_too_much(folder: str) -> bool:
    """Says whether a folder has more than `MOST_FILES` files or `MOST_BYTES`, or folders too deep for a name."""
    folders, count, size = [folder], 0, 0
    while folders:
        try:
            for entry in os.scandir(folders.pop()):
                count, size = count + 1, size + entry.stat(follow_symlinks=False).st_size
                if count > MOST_FILES or size > MOST_BYTES:
                    return True
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return True
    return False


def confine(folder: str) -> None:
    """Closes the network to this process and all that it starts, and all files but those of `folder` and, to read, `LIBRARIES`.

    Raises:
        Unsafe: the machine lacks one of the means; some may have been used.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def call(fault: str, function: Callable[..., int], *arguments: int | bytes | None) -> int:
        result = function(*(ctypes.c_long(x) if isinstance(x, int) else x for x in arguments))
        if result < 0:
            raise Unsafe(f"{fault} ({os.strerror(ctypes.get_errno())})")
        return result

    if os.geteuid() == 0:  # the kernel does not limit root's processes
        os.setresuid(NOBODY, NOBODY, 0)
        libc.setfsuid(0)  # file access as root until the next line, which gives up root's rights
    call("no namespaces of one's own, without a network", libc.unshare, NAMESPACES)
    folder_path, tree = os.fsencode(folder), "no tree of files that is read-only"
    call(tree, libc.mount, folder_path, folder_path, None, BIND, None)
    call(tree, libc.syscall, MOUNT_SETATTR, HERE, b"/", BELOW, struct.pack("4Q", READ_ONLY, 0, 0, 0), 32)
    call(tree, libc.syscall, MOUNT_SETATTR, HERE, folder_path, 0, struct.pack("4Q", 0, READ_ONLY, 0, 0), 32)
    os.chdir(folder)  # the folder as mounted now
    landlock = "no Landlock that keeps files as they are, from Linux 6.2"
    if call(landlock, libc.syscall, CREATE_RULESET, None, 0, VERSION) < TRUNCATES:
        raise Unsafe(landlock)
    rules = call(landlock, libc.syscall, CREATE_RULESET, struct.pack("Q", WRITES | READS), 8, 0)
    libraries = ((path, READS if os.path.isdir(path) else READ_FILE) for path in LIBRARIES if os.path.exists(path))
    for path, allowed in ((folder, WRITES | READS), (os.devnull, WRITE_FILE | READ_FILE), *libraries):
        rule = struct.pack("=Qi", allowed, os.open(path, os.O_PATH))
        call(landlock, libc.syscall, ADD_RULE, rules, BENEATH, rule, 0)
    call(landlock, libc.prctl, NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call(landlock, libc.syscall, RESTRICT_SELF, rules, 0)
    code = _filter(*CALLS[os.uname().machine])
    program = ctypes.create_string_buffer(code, len(code))
    pointer = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(program)))
    call("no filter of system calls", libc.prctl, *FILTER, ctypes.addressof(pointer), 0, 0)


def _filter(processor: int, pair: int, socket: int, shared: int, anonymous: int) -> bytes:
    """Returns the instructions of a filter (linux/filter.h) that refuses sockets, but for pairs of connected streams.

    It also refuses memory outside a process's address space, whose size alone is limited.

    An instruction has an operation, how many are skipped if it holds and if it does not, and a number. What is loaded stands in
    `struct seccomp_data`: the call's number at 0, the processor at 4, the second argument at 24.
    """
    load, equal, at_least, every, end = 0x20, 0x15, 0x35, 0x54, 0x06
    refuse, allow = 0x50000 | 1, 0x7FFF0000  # EPERM
    instructions = (
        (load, 0, 0, 4), (equal, 0, 10, processor), (load, 0, 0, 0),
        (equal, 8, 0, socket), (equal, 7, 0, shared), (equal, 6, 0, anonymous),
        (equal, 5, 0, IO_URING), (at_least, 4, 0, X32), (equal, 0, 4, pair),
        (load, 0, 0, 24), (every, 0, 0, 0xF), (equal, 1, 0, STREAM), (end, 0, 0, refuse), (end, 0, 0, allow),
    )  # fmt: skip
    return b"".join(struct.pack("HBBI", *line) for line in instructions)


def _keep(folder: str, seconds: int) -> int:
    """Runs the program of a folder in a worker process; returns its end as an exit status."""
    program = Path(folder, "program.py").read_text(encoding="utf-8")
    try:
        confine(folder)
    except Unsafe as missing:
        print(missing, file=sys.stderr)
        return UNSAFE
    number, (reading_end, writing_end) = os.urandom(16), os.pipe()
    worker = os.fork()
    if worker == 0:
        _work(program, number, writing_end, seconds)
    os.close(writing_end)
    watched, stop = [os.pidfd_open(worker), sys.stdin], time.monotonic() + PATIENCE * seconds
    while time.monotonic() < stop and not select.select(watched, [], [], POLL_S)[0] and not _holds_too_much("."):
        pass
    os.kill(worker, signal.SIGKILL)  # the first process of its namespace, so all others end with it; harmless if it has ended
    _, status = os.waitpid(worker, 0)
    if _holds_too_much("."):
        return FAILED
    if os.read(reading_end, len(number)) == number:
        return PASSED
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL  # by us, or by the processor-time limit
    return TIMED_OUT if killed else FAILED


def _work(program: str, number: bytes, writing_end: int, seconds: int) -> NoReturn:
    """Runs the program, and sends the number after its last line."""
    try:
        os.setsid()  # a signal to the program's group does not reach the keeper
        ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGKILL, 0, 0, 0)
        for stream in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        for limit, maximum in (LIMITS | {resource.RLIMIT_CPU: seconds}).items():
            resource.setrlimit(limit, (maximum, maximum))
        exec(compile(program, "program", "exec"), {})
        os.write(writing_end, number)
    finally:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(_keep(sys.argv[1], int(sys.argv[2])))
