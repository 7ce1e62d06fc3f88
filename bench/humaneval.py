"""HumanEval (Chen et al. 2021, arXiv 2107.03374): a model completes 164 functions, and what it wrote is run against tests.

One greedy answer for each, so that pass@1 is the share that passes. The file of problems is that of openai/human-eval, and
completions are written in its form, for its own evaluator to take.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

import icejax
from bench import sandbox
from bench.needle.evaluate import wilson
from icejax.checks.errors import InputError
from icejax.checks.json_file import parse

STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # §3.2 of the paper: what begins behind the function
ASKED = "Complete this Python function. Answer with the whole function, in one block of code.\n\n```python\n{}```"
BLOCK = re.compile(r"```(?:python|py)?\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Problem:
    """A function to complete; the fields are those of the file."""

    task_id: str
    prompt: str
    entry_point: str
    test: str

    def program(self, completion: str) -> str:
        """Returns what is run, as openai/human-eval puts it together."""
        return f"{self.prompt}{completion}\n{self.test}\ncheck({self.entry_point})"


@dataclass(frozen=True)
class Asking:
    """How a model is asked.

    Attributes:
        chat: in the tokenizer's chat template, where the answer's last block of code counts; else the model goes on with the
            prompt up to one of STOPS.
        new_tokens: of an answer, at most.
        batch: problems at a time.
    """

    chat: bool
    new_tokens: int
    batch: int


def read(path: str) -> list[Problem]:
    """Returns the problems of a file of JSON lines, plain or gzip; InputError for what is none."""
    try:
        data = Path(path).read_bytes()
        text = (gzip.decompress(data) if path.endswith(".gz") else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"--humaneval {path}: expected the JSON lines of HumanEval, plain or .gz: {error}") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise InputError(f"--humaneval {path} is empty: expected the JSON lines of HumanEval")
    return [_problem(line, f"--humaneval {path}, line {number}") for number, line in enumerate(lines, start=1)]


def _problem(line: str, where: str) -> Problem:
    raw, names = parse(line, source=where), [field.name for field in fields(Problem)]
    if not all(isinstance(raw.get(name), str) for name in names):
        raise InputError(f"{where}: expected {', '.join(names)}, all of them text")
    return Problem(**{name: raw[name] for name in names})


def check_sandbox() -> None:
    """Raises InputError where programs cannot be run, or not with the standard library."""
    try:
        if (end := sandbox.run("import collections, decimal, hashlib, heapq, json, math, random, re, typing")) == "passed":
            return
        missing = f"a program that only imports of the standard library {end}"
    except sandbox.Unsafe as error:
        missing = str(error)
    raise InputError(f"--run-code has no way to run programs safely here: {missing}; without it completions are only written")


def complete(
    model: icejax.CausalLM, tokenizer: Any, problems: list[Problem], policy: icejax.CachePolicy, asking: Asking
) -> Iterator[tuple[Problem, str]]:
    """Yields every problem with its completion; InputError if a prompt does not fit the model."""
    console = Console(stderr=True)
    starts = range(0, len(problems), asking.batch)
    for start in track(starts, "HumanEval", console=console, disable=not console.is_terminal):
        some = problems[start : start + asking.batch]
        if asking.chat:
            asked = [icejax.chat(tokenizer, ASKED.format(each.prompt)) for each in some]
        else:
            asked = [each.prompt for each in some]
        prompts = [tokenizer.encode(text, add_special_tokens=not asking.chat) for text in asked]
        limits = dict(max_new_tokens=asking.new_tokens, stop=() if asking.chat else STOPS)
        responses = icejax.generate(model, tokenizer, prompts, cache=policy, **limits)
        for each, prompt, response in zip(some, prompts, responses, strict=True):
            # Behind the prompt, or some tokenizers would drop the first space of an indented line.
            before, text = (
                tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                for ids in (prompt, [*prompt, *response.token_ids])
            )
            yield each, (last_block if asking.chat else cut)(text[len(before) :])


def cut(text: str) -> str:
    """Returns a completion up to what ends the function."""
    return text[: min((at for at in map(text.find, STOPS) if at >= 0), default=len(text))]


def last_block(answer: str) -> str:
    """Returns the last block of code, as a completion: behind the prompt it defines the function anew."""
    blocks = BLOCK.findall(answer)
    return "\n" + blocks[-1] if blocks else ""


def score(completions: Iterator[tuple[Problem, str]], file: Path, *, run_code: bool) -> dict[str, Any]:
    """Writes completions, with how each program ended if they are run, and returns pass@1 with its 95% interval.

    Raises:
        InputError: the file cannot be written.
    """
    ends = []
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = file.open("w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--completions: {file} cannot be written: {error.strerror}") from None
    with lines:
        for problem, completion in completions:
            ends.append(sandbox.run(problem.program(completion)) if run_code else "not run")
            line = dict(task_id=problem.task_id, completion=completion, result=ends[-1])
            print(json.dumps(line), file=lines, flush=True)
    row = dict(problems=len(ends), completions=str(file), ran=run_code)
    if not run_code:
        return dict(pass_at_1=None) | row
    low, high = wilson(passed := ends.count("passed"), len(ends))
    return dict(pass_at_1=round(passed / len(ends), 4), low=round(low, 4), high=round(high, 4)) | row
