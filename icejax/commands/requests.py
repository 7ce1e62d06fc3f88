"""The prompts of a command line: given as they are, on stdin, or in a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from icejax import jsontext
from icejax.errors import InputError, quoted
from icejax.generation import ASSETS

BUNDLED_PROMPT = ASSETS / "prompt.txt"


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """Returns the prompts of the command line; InputError if there is none or a file cannot be read."""
    prompts = [_decode("stdin", sys.stdin.buffer.read()) if prompt == "-" else prompt for prompt in arguments.prompt]
    path = arguments.prompt_file
    if path is None and not prompts:
        if arguments.model is not None:
            raise InputError("no prompt: give --prompt TEXT, --prompt - or --prompt-file FILE")
        path = BUNDLED_PROMPT
    if path is None:
        return prompts
    text = read_text(path)
    if path.suffix != ".jsonl":
        return [*prompts, text]
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would cut at characters JSON leaves as they are
        if line.strip():
            prompts.append(_jsonl_prompt(path, number, line))
    if not prompts:
        raise InputError(f"{path} holds no prompt: expected one JSON object with 'prompt' per line")
    return prompts


def read_text(path: Path) -> str:
    """Returns the text of a file; InputError if it cannot be read or is not UTF-8."""
    try:
        return _decode(str(path), path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _decode(source: str, content: bytes) -> str:
    try:
        return content.decode().removeprefix("\ufeff")  # a byte-order mark
    except UnicodeDecodeError as error:
        raise InputError(f"{source} is not UTF-8 text (byte {error.start}): convert it first") from None


def _jsonl_prompt(path: Path, number: int, line: str) -> str:
    found = jsontext.parse(line, source=f"{path}, line {number}").get("prompt")
    if not isinstance(found, str):
        raise InputError(f"{path}, line {number}: expected a text 'prompt' in the JSON object, got {quoted(found)}")
    return found
