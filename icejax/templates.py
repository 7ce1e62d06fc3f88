"""Chat templates: messages to text, in a process apart that is ended when a template does not end by itself."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from icejax.errors import InputError

SECONDS = 5  # for a rendering, and as many for the process to start
CHARACTERS = 2**24  # a template may write so many more than its messages have
PROGRAM = Path(__file__).with_name("render.py")


def render(tokenizer: Any, messages: Sequence[dict[str, str]], *, now: float | None = None) -> str:
    """Returns the messages in the tokenizer's chat template, up to where the model's answer begins.

    Args:
        messages: each with a role and a content.
        now: unix time that the template takes for the present; None: the present.

    Raises:
        InputError: there is no template, or it refuses the messages, fails, or does not end.
    """
    template = tokenizer.chat_template
    if isinstance(template, dict):
        if "default" not in template:
            raise InputError(f"the tokenizer's chat templates are {', '.join(sorted(template))}: expected one named default")
        template = template["default"]
    if not template:
        raise InputError(
            "the tokenizer has no chat template: choose a model that has one, or give icejax.generate the prompt as it is "
            "(without --chat), in the model's own form"
        )
    if not isinstance(template, str):
        raise InputError(f"the tokenizer's chat template must be text, found a {type(template).__name__}")
    variables = dict(tools=None, documents=None, **tokenizer.special_tokens_map)
    variables |= dict(messages=messages, add_generation_prompt=True)
    request = dict(
        template=template,
        variables=variables,
        now=time.time() if now is None else now,
        most=CHARACTERS + sum(len(message["content"]) for message in messages),
        seconds=SECONDS,
    )
    answer = _RENDERER.ask(request)
    if "text" not in answer:
        raise InputError(f"the tokenizer's chat template {answer['fault']}")
    return answer["text"]


class _Renderer:
    """The process that renders, started when first needed and kept for the next time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any]) -> dict[str, str]:
        """Returns the answer of the process; what went wrong with a template is its `fault`."""
        line = json.dumps(request).encode() + b"\n"
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
                answer = process.stdout.readline(6 * request["most"] + 1000)  # JSON takes up to six bytes for a character
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
        return {"fault": f"fails: the process that renders it ended with status {process.returncode}"}

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


_RENDERER = _Renderer()
