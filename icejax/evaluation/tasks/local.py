"""Tasks of lm-evaluation-harness whose data come from local files, for machines that reach no hub.

`--data DIR` names a folder with the files below; docs/how-to/evaluate.md says where each is had. Prompts and scorers are the
harness's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lm_eval
import yaml

from icejax.checks.errors import InputError
from icejax.evaluation.tasks import code

# The harness's own description of a task, and the file of each split in the data folder.
LOCAL = {
    "gsm8k": ("gsm8k/gsm8k.yaml", dict(train="gsm8k/train-head.jsonl", test="gsm8k/test.jsonl")),
    "gsm8k_cot": ("gsm8k/gsm8k-cot.yaml", dict(test="gsm8k/test.jsonl")),
}


def with_local_data(names: list[str], data: Path | None) -> list[str | dict[str, Any]]:
    """Returns the tasks; one in `LOCAL` or of `code` reads its files in `data`, unless `data` is None.

    Raises:
        InputError: a file is missing.
    """
    if data is None:
        return names
    return [code.task(name, data) if name in code.FILES else _local(name, data) if name in LOCAL else name for name in names]


def _local(name: str, data: Path) -> dict[str, Any]:
    description, files = LOCAL[name]
    for file in files.values():
        if not (data / file).is_file():
            raise InputError(f"--data has no {file}, which the task {name} reads: expected it in {data}")
    config = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks" / description).read_text())
    paths = {split: str((data / file).resolve()) for split, file in files.items()}
    return config | dict(dataset_path="json", dataset_name=None, dataset_kwargs=dict(data_files=paths))
