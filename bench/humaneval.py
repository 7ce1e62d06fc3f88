"""HumanEval (Chen et al. 2021, arXiv 2107.03374) for `bench.weights`: a model completes 164 functions, tests run on them.

The model gives one greedy answer per function, so pass@1 is the share of answers that pass. The file of problems is
openai/human-eval's, and completions are written in the form that its evaluator reads.
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
from bench.needle.evaluate import wilson
from icejax.checks.errors import InputError
from icejax.checks.json_file import parse
from icejax.sandbox import programs

STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # §3.2 of the paper: lines that begin after the function
ASKED = "Complete this Python function. Answer with the whole function, in one block of code.\n\n```python\n{}```"
BLOCK = re.compile(r"```(?:python|py)?\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Problem:
    """A function to complete, with the fields of the file."""

    task_id: str
    prompt: str
    entry_point: str
    test: str

    def program(self, completion: str) -> str:
        """Returns the program to run: prompt, completion and test, as in openai/human-eval."""
        return f"{self.prompt}{completion}\n{self.test}\ncheck({self.entry_point})"


@dataclass(frozen=True)
class Asking:
    """How a model is asked.

    Attributes:
        chat: whether to ask in the tokenizer's chat template and take the answer's last block of code; else the model
            continues the prompt up to one of STOPS.
        new_tokens: most tokens of an answer.
        batch: problems per batch.
    """

    chat: bool
    new_tokens: int
    batch: int


def read(path: str) -> list[Problem]:
    """Returns the problems of a file of JSON lines, plain or gzip; InputError for another file."""
    try:
        data = Path(path).read_bytes()
        text = (gzip.decompress(data) if path.endswith(".gz") else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"--humaneval {path}: expected the JSON lines of HumanEval, plain or .gz: {error}") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise InputError(f"--humaneval {path} is empty: expected the JSON lines of HumanEval")
    return [_problem(line, f"--humaneval {path}, line {number}") for number, line in enumerate(lines, start=1)]


def _problem(line: str, source: str) -> Problem:
    raw, names = parse(line, source=source), [field.name for field in fields(Problem)]
    if not all(isinstance(raw.get(name), str) for name in names):
        raise InputError(f"{source}: expected {', '.join(names)}, all of them text")
    return Problem(**{name: raw[name] for name in names})


def check_sandbox() -> None:
    """Raises InputError if the sandbox cannot run programs that import the standard library."""
    try:
        if (end := programs.run("import collections, decimal, hashlib, heapq, json, math, random, re, typing")) == "passed":
            return
        fault = f"a program that only imports of the standard library {end}"
    except programs.Unsafe as error:
        fault = str(error)
    raise InputError(f"--run-code has no way to run programs safely here: {fault}; without it completions are only written")


def complete(
    model: icejax.CausalLM, tokenizer: Any, problems: list[Problem], policy: icejax.CachePolicy, asking: Asking
) -> Iterator[tuple[Problem, str]]:
    """Yields every problem with its completion; InputError if a prompt does not fit the model."""
    console = Console(stderr=True)
    starts = range(0, len(problems), asking.batch)
    for start in track(starts, "HumanEval", console=console, disable=not console.is_terminal):
        batch = problems[start : start + asking.batch]
        if asking.chat:
            texts = [icejax.chat(tokenizer, ASKED.format(problem.prompt)) for problem in batch]
        else:
            texts = [problem.prompt for problem in batch]
        prompts = [tokenizer.encode(text, add_special_tokens=not asking.chat) for text in texts]
        limits = dict(max_new_tokens=asking.new_tokens, stop=() if asking.chat else STOPS)
        responses = icejax.generate(model, tokenizer, prompts, cache=policy, **limits)
        for problem, prompt, response in zip(batch, prompts, responses, strict=True):
            # Decoded with the prompt, because some tokenizers drop the first space of a text.
            prompt_text, text = (
                tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                for ids in (prompt, [*prompt, *response.token_ids])
            )
            yield problem, (last_block if asking.chat else cut)(text[len(prompt_text) :])


def cut(text: str) -> str:
    """Returns a completion up to the first of STOPS; "    return 1\\n\\ndef g" becomes "    return 1\\n"."""
    return text[: min((position for position in map(text.find, STOPS) if position >= 0), default=len(text))]


def last_block(answer: str) -> str:
    """Returns the last block of code as a completion: after the prompt it defines the function again."""
    blocks = BLOCK.findall(answer)
    return "\n" + blocks[-1] if blocks else ""


def score(completions: Iterator[tuple[Problem, str]], file: Path, *, run_code: bool) -> dict[str, Any]:
    """Writes completions and, if they are run, the end of each program; returns pass@1 with its 95% Wilson interval.

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
            ends.append(programs.run(problem.program(completion)) if run_code else "not run")
            line = dict(task_id=problem.task_id, completion=completion, result=ends[-1])
            print(json.dumps(line), file=lines, flush=True)
    row = dict(problems=len(ends), completions=str(file), ran=run_code)
    if not run_code:
        return dict(pass_at_1=None) | row
    low, high = wilson(passed := ends.count("passed"), len(ends))
    return dict(pass_at_1=round(passed / len(ends), 4), low=round(low, 4), high=round(high, 4)) | row
