"""Runs tasks of lm-evaluation-harness on a model; the command ``icejax evaluate`` calls it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from lm_eval import evaluator
from lm_eval.tasks import TaskManager

from icejax.checks.errors import InputError
from icejax.evaluation.generated.tasks import TASKS
from icejax.evaluation.harness import HarnessModel
from icejax.evaluation.scores import Scores
from icejax.evaluation.setting import Setting
from icejax.evaluation.tasks import local, ruler

# How lm-eval's samplers of examples, and the `random.sample` in them, begin to say that a task has too few examples.
TOO_FEW = ("Sample larger than population", "Error: number of fewshot samples", "Error: no documents available")


def _commit() -> str | None:
    """Returns the commit of the working folder, or None."""
    try:
        return subprocess.run(["git", "describe", "--always"], capture_output=True, text=True).stdout.strip() or None
    except FileNotFoundError:
        return None  # git is not installed


# lm-eval records the commit too, but its own function lets git complain on stderr outside of a repository.
evaluator.get_git_commit_hash = _commit


def evaluate(
    model: HarnessModel,
    names: list[str],
    *,
    data: Path | None = None,
    include_path: Path | None = None,
    lengths: tuple[int, ...] | None = None,
    text: Path | None = None,
    **options: Any,
) -> Scores:
    """Returns the scores of a model on tasks.

    Args:
        names: names of tasks or groups of tasks.
        data: folder of local files, for tasks that `tasks.local` has.
        include_path: a folder with task files of the user's own.
        lengths, text: of `generated.tasks.TASKS`, as in `Setting`; `lengths` also of RULER's tasks whose names have none.
        options: of `lm_eval.simple_evaluate`: limit, num_fewshot, gen_kwargs, apply_chat_template, system_instruction.

    Raises:
        InputError: a task is unknown, its data cannot be had, or an option is out of range.
    """
    names = [sized for name in names for sized in ruler.sized(name, lengths)]
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    local_names = {name for name in names if data is not None and local.has(name)}
    unknown = [name for name in names if not (name in TASKS or name in local_names or manager.match_tasks([name]))]
    if unknown and data is None and local.has(unknown[0]):
        raise InputError(f"the task {unknown[0]} is one of local files: give their folder by --data DIR")
    if unknown:
        raise InputError(f"no task is named {unknown[0]}: lm-eval ls tasks shows all names, and --include-path adds your own")
    setting = Setting(model, data, options.get("limit"), _chat_tokens(model, **options), lengths, text)

    def task(name: str) -> Any:
        if name in TASKS:
            return TASKS[name](setting)
        return local.local_task(name, setting) if name in local_names else name

    try:
        tasks = [task(name) for name in names]
        results = evaluator.simple_evaluate(model, tasks=tasks, task_manager=manager, log_samples=True, **options)
    except (ConnectionError, FileNotFoundError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"the data of a task cannot be had: {reason}; --data reads local files") from None
    except (AssertionError, ValueError) as error:
        if not str(error).startswith(TOO_FEW):
            raise
        raise InputError("a task has fewer examples than --num-fewshot asks for: give a smaller number") from None
    return Scores.of(results)


def _chat_tokens(
    model: HarnessModel, *, apply_chat_template: bool = False, system_instruction: str | None = None, **_: Any
) -> int:
    """Returns the tokens that the chat template and the system message add to a prompt, or at most one more."""
    if not apply_chat_template:
        return 0
    system = [] if system_instruction is None else [dict(role="system", content=system_instruction)]
    return len(model.tok_encode(model.apply_chat_template([*system, dict(role="user", content="a")])))
