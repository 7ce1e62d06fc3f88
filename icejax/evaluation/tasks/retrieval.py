"""Retrieval of one line or value among many: LongChat's lines and lost-in-the-middle's key-value pairs.

LongChat's lines are of Li et al. 2023 (DachengLi1/LongChat, longeval/evaluation/lines/testcases), the pairs of Liu et al. 2023
(arXiv 2307.03172; nelson-liu/lost-in-the-middle, kv_retrieval_data). Prompts, scores and numbers of new tokens are theirs. The
pair that a prompt asks for stands where the file has it, which is all places about as often; the paper moves it to a few.
"""

from __future__ import annotations

import re
from typing import Any

from lm_eval.api.group import Group

from icejax.evaluation.own_task import OwnTask
from icejax.evaluation.setting import Setting
from icejax.evaluation.tasks.files import json_lines
from icejax.evaluation.tasks.generation import generation_task, group

LINES, COUNTS = "longchat_lines", (200, 300, 400, 500, 680)
PAIRS, FILE = "kv_retrieval", "kv_retrieval/kv-retrieval-75_keys.jsonl.gz"
NEW_TOKENS = 100  # of both
ASKED = """Extract the value corresponding to the specified key in the JSON object below.

JSON data:
{{{pairs}}}

Key: "{key}"
Corresponding value:"""


def has(name: str) -> bool:
    """Returns whether this file has a task or group of this name."""
    return name in (PAIRS, LINES, *(f"{LINES}_{count}" for count in COUNTS))


def task(name: str, setting: Setting) -> OwnTask | Group:
    """Returns the task of key-value pairs, that of one number of lines, or the group of all numbers of lines.

    Raises:
        InputError: a file is missing or is another.
    """
    if name == PAIRS:
        rows = json_lines(setting.data / FILE, _pairs, what="key-value pairs", fields="ordered_kv_records, key and value")
        return generation_task(name, rows, _has_value, new_tokens=NEW_TOKENS)
    if name == LINES:
        return group(name, [_lines_task(f"{LINES}_{count}", setting) for count in COUNTS])
    return _lines_task(name, setting)


def _lines_task(name: str, setting: Setting) -> OwnTask:
    file = setting.data / "longchat" / f"{name.removeprefix(LINES + '_')}_lines.jsonl.gz"
    rows = json_lines(file, _lines, what="lines", fields="prompt and expected_number")
    return generation_task(name, rows, _last_number, new_tokens=NEW_TOKENS)


def _lines(line: dict[str, Any]) -> dict[str, Any]:
    return dict(prompt=_text(line["prompt"]), answer=int(line["expected_number"]))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a prompt is no text")
    return value


def _last_number(row: dict[str, Any], answer: str) -> float:
    numbers = re.findall(r"\d+", answer)
    return float(bool(numbers) and int(numbers[-1]) == row["answer"])


def _pairs(line: dict[str, Any]) -> dict[str, str]:
    records = [(str(key), str(value)) for key, value in line["ordered_kv_records"]]
    if records.count((line["key"], line["value"])) != 1:
        raise ValueError("a key is not among the pairs once")
    pairs = ",\n ".join(f'"{key}": "{value}"' for key, value in records)
    return dict(prompt=ASKED.format(pairs=pairs, key=line["key"]), answer=line["value"])


def _has_value(row: dict[str, str], answer: str) -> float:
    return float(row["answer"].lower() in answer.lower())
