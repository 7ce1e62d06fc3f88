"""Runs tasks of lm-evaluation-harness on a model; the command ``icejax evaluate`` calls it."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lm_eval import evaluator
from lm_eval.tasks import TaskManager
from lm_eval.utils import simple_parse_args_string

from icejax.checks.errors import InputError
from icejax.evaluation.generated.tasks import TASKS
from icejax.evaluation.harness import HarnessModel
from icejax.evaluation.scores import Scores
from icejax.evaluation.setting import Setting
from icejax.evaluation.tasks import local, ruler

DRAWS = 1000  # for standard errors that have no formula; lm-eval's 100,000 would take minutes to an hour in one process
# How lm-eval's samplers of examples, and the `random.sample` in them, begin to say that a task has too few examples.
TOO_FEW = ("Sample larger than population", "Error: number of fewshot samples", "Error: no documents available")
TWICE = "Duplicate task"  # how lm-eval begins to say that two groups share a task
UNSAFE = ("confirm_run_unsafe_code", "executes untrusted")  # what it says of tasks that run the model's programs


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
    gen_kwargs: str | None = None,
    **options: Any,
) -> Scores:
    """Returns the scores of a model on tasks.

    Args:
        names: names of tasks or groups of tasks, or patterns such as mmlu_*, which stand for all single tasks of such names.
        data: folder of local files, for tasks that `tasks.local` has.
        include_path: a folder with task files of the user's own.
        lengths, text: of `generated.tasks.TASKS`, as in `Setting`; `lengths` also of RULER's tasks whose names have none.
        gen_kwargs: options of the answers, as in "max_gen_toks=64".
        options: of `lm_eval.simple_evaluate`: limit, num_fewshot, apply_chat_template, system_instruction.

    Raises:
        InputError: a task is unknown, its data or a package cannot be had, or an option is out of range.
    """
    generation = _generation(gen_kwargs)
    names = [sized for name in names for sized in ruler.sized(name, lengths)]
    manager = TaskManager(include_path=None if include_path is None else str(include_path))

    def is_local(name: str) -> bool:
        return data is not None and local.has(name)

    def matches(name: str) -> list[str]:
        is_name = name in TASKS or is_local(name) or name in manager.all_tasks
        return [name] if is_name else fnmatch.filter(manager.all_subtasks, name)

    unknown = [name for name in names if not matches(name)]
    if unknown and data is None and local.has(unknown[0]):
        raise InputError(f"the task {unknown[0]} is one of local files: give their folder by --data DIR")
    if unknown:
        raise InputError(f"no task is named {unknown[0]}: lm-eval ls tasks shows all names, and --include-path adds your own")
    setting = Setting(model, data, options.get("limit"), _chat_tokens(model, **options), lengths, text)

    def task(name: str) -> Any:
        if name in TASKS:
            return TASKS[name](setting)
        return local.local_task(name, setting) if is_local(name) else name

    os.environ["DISABLE_MULTIPROC"] = "1"  # lm-eval would fork to bootstrap, and JAX has threads
    options |= dict(task_manager=manager, gen_kwargs=generation, log_samples=True, bootstrap_iters=DRAWS)
    try:
        tasks = [task(match) for match in dict.fromkeys(match for name in names for match in matches(name))]
        with contextlib.redirect_stdout(sys.stderr):  # lm-eval prints what it does
            results = evaluator.simple_evaluate(model, tasks=tasks, **options)
    except ImportError as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"a task of lm-eval needs a package that is not there ({reason}): install it with pip") from None
    except (ConnectionError, FileNotFoundError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"the data of a task cannot be had: {reason}; --data reads local files") from None
    except (AssertionError, ValueError) as error:
        raise _refusal(error) from None
    return Scores.of(results)


def _generation(gen_kwargs: str | None) -> dict[str, Any] | None:
    """Returns the options of the answers; InputError for a temperature that would have no effect."""
    given = simple_parse_args_string(gen_kwargs)
    if given.get("do_sample"):
        return dict(temperature=1.0) | given  # tasks such as gsm8k set it to 0
    if given.get("temperature"):
        raise InputError("--gen-kwargs: a temperature has no effect without do_sample=True, so give both")
    return given or None


def _refusal(error: Exception) -> Exception:
    """Returns an InputError for an error by which lm-eval refuses what the user asked for, and any other error as it is."""
    text = str(error)
    if text.startswith(TOO_FEW):
        return InputError("a task has fewer examples than --num-fewshot asks for: give a smaller number")
    if text.startswith(TWICE):
        return InputError(f"{text}: leave one of them out of --tasks")
    if any(part in text for part in UNSAFE):
        ours = "with --data DIR, humaneval, humaneval_plus and mbpp_plus run them in a sandbox"
        return InputError(f"a task of lm-eval runs the model's programs unprotected: {ours}")
    return error


def _chat_tokens(
    model: HarnessModel, *, apply_chat_template: bool = False, system_instruction: str | None = None, **_: Any
) -> int:
    """Returns the tokens that the chat template and the system message add to a prompt, or at most one more."""
    if not apply_chat_template:
        return 0
    system = [] if system_instruction is None else [dict(role="system", content=system_instruction)]
    return len(model.tok_encode(model.apply_chat_template([*system, dict(role="user", content="a")])))
