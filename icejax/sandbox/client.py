"""Runs untrusted chat templates and regular expressions in a worker process, which is killed if it takes too long.

`icejax.text.chat_template` and `icejax.checkpoint.quantized.formats` call it.
"""

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

SECONDS = 5  # limit for an answer; twice as long if the process must start first
PROGRAM = Path(__file__).with_name("worker.py")


class Sandbox:
    """The worker process: it starts at the first request and serves all later ones."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any], *, most: int) -> dict[str, Any]:
        """Returns the worker's answer to a request; a failure is its field `fault`.

        Args:
            request: arguments of `rendered` or `fits` in worker.py.
            most: largest number of characters of the answer.
        """
        line = json.dumps(request | dict(seconds=SECONDS)).encode() + b"\n"
        with self._lock:
            started, seconds = time.monotonic(), SECONDS
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
                seconds += SECONDS
            process, answer = self._process, b""
            timer = threading.Timer(seconds, process.kill)
            timer.start()
            try:
                process.stdin.write(line)
                process.stdin.flush()
                answer = process.stdout.readline(6 * most + 1000)  # JSON takes up to six bytes per character
            except BrokenPipeError:
                pass
            finally:
                timer.cancel()
                if not answer.endswith(b"\n"):  # also after Ctrl-C: the next request must not read this answer
                    _end(process)
        if answer.endswith(b"\n"):
            return json.loads(answer.decode("utf-8", "surrogatepass"))
        if time.monotonic() - started >= SECONDS:
            return {"fault": f"did not end in {SECONDS} s"}
        return {"fault": f"fails: the process that runs it ended with status {process.returncode}"}

    def _start(self) -> subprocess.Popen:
        # Isolated (-I) and without site packages (-S): it loads no installed package but Jinja and MarkupSafe.
        folders = sorted({str(Path(importlib.util.find_spec(name).origin).parents[1]) for name in ("jinja2", "markupsafe")})
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", PROGRAM, *folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal reaches this process alone
        )
        weakref.finalize(self, _end, process)  # at exit too
        return process


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdout.close()
    with contextlib.suppress(OSError):  # unwritten bytes have nowhere to go
        process.stdin.close()


SANDBOX = Sandbox()
