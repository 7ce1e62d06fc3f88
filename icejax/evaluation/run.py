"""Runs tasks of lm-evaluation-harness on a model; the command ``icejax evaluate`` calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

from icejax.checks.errors import InputError
from icejax.evaluation import code
from icejax.evaluation.generated.setting import Setting
from icejax.evaluation.generated.tasks import TASKS
from icejax.evaluation.harness import HarnessModel
from icejax.evaluation.scores import Scores
from icejax.evaluation.tasks import with_local_data


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
        data: folder of local files, for tasks of `tasks.LOCAL`.
        include_path: a folder with task files of the user's own.
        lengths, text: of `generated.tasks.TASKS`, as in `Setting`.
        options: of `lm_eval.simple_evaluate`: limit, num_fewshot, gen_kwargs, apply_chat_template, system_instruction.

    Raises:
        InputError: a task is unknown, its data cannot be had, or an option is out of range.
    """
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    setting = Setting(model.tok_encode, model.max_length, lengths, data, text)
    generated = {name: TASKS[name](setting) for name in names if name in TASKS}
    others = [name for name in names if name not in TASKS]
    unknown = [name for name in others if not (manager.match_tasks([name]) or (data is not None and name in code.FILES))]
    if unknown:
        raise InputError(f"no task is named {unknown[0]}: lm-eval ls tasks shows all names, and --include-path adds your own")
    try:
        results = lm_eval.simple_evaluate(
            model,
            tasks=with_local_data(others, data) + [*generated.values()],
            task_manager=manager,
            log_samples=True,
            **options,
        )
    except (ConnectionError, FileNotFoundError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"the data of a task cannot be had: {reason}; --data reads local files") from None
    return Scores.of(results)
