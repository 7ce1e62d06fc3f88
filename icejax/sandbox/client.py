"""What strangers wrote as a program runs in a process apart, which is ended when it does not end by itself."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

SECONDS = 5  # for an answer, and as many for the process to start
PROGRAM = Path(__file__).with_name("worker.py")


class Apart:
    """The process, started when first needed and kept for the next time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any], *, most: int) -> dict[str, Any]:
        """Returns the answer of the process to what one of its functions takes; what went wrong is its `fault`.

        Args:
            most: characters of the answer.
        """
        line = json.dumps(request | dict(seconds=SECONDS)).encode() + b"\n"
        with self._lock:
            started, seconds = time.monotonic(), SECONDS
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
                seconds += SECONDS
            process, answer = self._process, b""
            late = threading.Timer(seconds, process.kill)
            late.start()
            try:
                process.stdin.write(line)
                process.stdin.flush()
                answer = process.stdout.readline(6 * most + 1000)  # JSON takes up to six bytes for a character
            except BrokenPipeError:
                pass
            finally:
                late.cancel()
                if not answer.endswith(b"\n"):  # after Ctrl-C as well: the answer would be taken for the next one's
                    _end(process)
        if answer.endswith(b"\n"):
            return json.loads(answer.decode("utf-8", "surrogatepass"))
        if time.monotonic() - started >= SECONDS:
            return {"fault": f"did not end in {SECONDS} s"}
        return {"fault": f"fails: the process that runs it ended with status {process.returncode}"}

    def _start(self) -> subprocess.Popen:
        # Isolated and without site packages: nothing of the user's is loaded but Jinja, from where this process has it.
        folders = sorted({str(Path(importlib.util.find_spec(name).origin).parents[1]) for name in ("jinja2", "markupsafe")})
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", PROGRAM, *folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is for this process alone
        )
        weakref.finalize(self, _end, process)  # at exit too
        return process


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdout.close()
    with contextlib.suppress(OSError):  # what was not written yet has nowhere to go
        process.stdin.close()


APART = Apart()
