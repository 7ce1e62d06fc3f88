"""Runs tasks of lm-evaluation-harness on a model; the command ``icejax evaluate`` calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

from icejax.checks.errors import InputError
from icejax.evaluation.harness import HarnessModel
from icejax.evaluation.scores import Scores
from icejax.evaluation.tasks import code
from icejax.evaluation.tasks.local import with_local_data


def evaluate(
    model: HarnessModel, names: list[str], *, data: Path | None = None, include_path: Path | None = None, **options: Any
) -> Scores:
    """Returns the scores of a model on tasks.

    Args:
        names: names of tasks or groups of tasks.
        data: folder of local files, for tasks of `tasks.local.LOCAL`.
        include_path: a folder with task files of the user's own.
        options: of `lm_eval.simple_evaluate`: limit, num_fewshot, gen_kwargs, apply_chat_template, system_instruction.

    Raises:
        InputError: a task is unknown, its data cannot be had, or an option is out of range.
    """
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    unknown = [name for name in names if not (manager.match_tasks([name]) or (data is not None and name in code.FILES))]
    if unknown:
        raise InputError(f"no task is named {unknown[0]}: lm-eval ls tasks shows all names, and --include-path adds your own")
    try:
        results = lm_eval.simple_evaluate(
            model, tasks=with_local_data(names, data), task_manager=manager, log_samples=True, **options
        )
    except (ConnectionError, FileNotFoundError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"the data of a task cannot be had: {reason}; --data reads local files") from None
    return Scores.of(results)
