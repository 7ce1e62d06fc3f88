"""The generated tasks by name."""

from __future__ import annotations

from collections.abc import Callable

from icejax.evaluation.generated import find_function, niah, perplexity, turns
from icejax.evaluation.own_task import OwnTask
from icejax.evaluation.setting import Setting

TASKS: dict[str, Callable[[Setting], OwnTask]] = {
    "niah": niah.task,
    "find_function": find_function.task,
    "multi_turn_code": turns.multi_turn,
    "multi_request_code": turns.multi_request,
    "perplexity": perplexity.task,
}
