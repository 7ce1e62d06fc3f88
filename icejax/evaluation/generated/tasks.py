"""The generated tasks by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lm_eval.api.task import Task

from icejax.evaluation.generated import find_function, niah, perplexity, turns
from icejax.evaluation.setting import Setting

TASKS: dict[str, Callable[[Setting], dict[str, Any] | Task]] = {
    "niah": niah.task,
    "find_function": find_function.task,
    "multi_turn_code": turns.multi_turn,
    "multi_request_code": turns.multi_request,
    "perplexity": perplexity.task,
}
