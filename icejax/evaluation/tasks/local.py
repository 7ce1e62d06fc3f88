"""Tasks whose data come from local files, for machines that reach no hub, and tasks that lm-evaluation-harness lacks.

`--data DIR` names a folder with the files; docs/how-to/evaluate.md says where each is had.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lm_eval
import yaml
from lm_eval.api.group import Group

from icejax.evaluation.own_task import OwnTask
from icejax.evaluation.setting import Setting
from icejax.evaluation.tasks import code, longbench, mbpp, retrieval, ruler
from icejax.evaluation.tasks.files import json_lines

# The harness's own description of a task, and the file of each split in the data folder.
LOCAL = {
    "gsm8k": ("gsm8k/gsm8k.yaml", dict(train="gsm8k/train-head.jsonl", test="gsm8k/test.jsonl")),
    "gsm8k_cot": ("gsm8k/gsm8k-cot.yaml", dict(test="gsm8k/test.jsonl")),
}
OURS = (code, mbpp, longbench, retrieval, ruler)


def has(name: str) -> bool:
    """Returns whether a task or group of this name comes from local files."""
    return name in LOCAL or any(module.has(name) for module in OURS)


def local_task(name: str, setting: Setting) -> dict[str, Any] | OwnTask | Group:
    """Returns a task or group that `has` knows.

    Raises:
        InputError: a file is missing or is another, or this machine lacks what a score needs.
    """
    if name in LOCAL:
        return _described(name, setting.data)
    [module] = [module for module in OURS if module.has(name)]
    return module.task(name, setting)


def _problem(line: dict[str, Any]) -> dict[str, Any]:
    if not (isinstance(line["question"], str) and isinstance(line["answer"], str)):
        raise TypeError("a question or an answer is no text")
    return line


def _described(name: str, data: Path) -> dict[str, Any]:
    description, files = LOCAL[name]
    for file in files.values():
        json_lines(data / file, _problem, what="GSM8K's problems", fields="question and answer")
    config = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks" / description).read_text())
    paths = {split: str((data / file).resolve()) for split, file in files.items()}
    return config | dict(dataset_path="json", dataset_name=None, dataset_kwargs=dict(data_files=paths))
