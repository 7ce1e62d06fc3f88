"""MiniLongBench: 237 prompts of LongBench v1 (Bai et al. 2023, arXiv 2308.14508) over its 21 data sets.

The files come from MilkThink-Lab/MiniLongBench, pred_data/example, a data set each, as JSON lines of prompt and gold, and
config/dataset2maxlen.json of THUDM/LongBench. Scores, numbers of new tokens and the cut of long prompts are LongBench's: a
prompt that does not fit loses its middle, and six data sets are continued without a chat template. LongBench also forbids that
an answer of samsum begins with the newline that ends it; here the answer continues, and its first line counts.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

from lm_eval.api.group import Group

from icejax.checks.errors import InputError
from icejax.evaluation.harness import HarnessModel
from icejax.evaluation.own_task import OwnTask
from icejax.evaluation.setting import Setting
from icejax.evaluation.tasks.files import json_document, json_lines
from icejax.evaluation.tasks.generation import generation_task, group
from icejax.evaluation.tasks.longbench_scores import PACKAGES, PARAGRAPH, SCORES, best, retrieval

GROUP = "minilongbench"
LENGTHS = "longbench/config/dataset2maxlen.json"
CONTINUED = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")


def has(name: str) -> bool:
    """Returns whether this file has a task or group of this name."""
    return name == GROUP or name.removeprefix(f"{GROUP}_") in SCORES and name.startswith(f"{GROUP}_")


def task(name: str, setting: Setting) -> OwnTask | Group:
    """Returns the group of all data sets, or the task of one.

    Raises:
        InputError: a file is missing or is another, or a scorer's package is not installed.
    """
    if name == GROUP:
        return group(name, [_task(dataset, setting) for dataset in SCORES])
    return _task(name.removeprefix(f"{GROUP}_"), setting)


def _task(dataset: str, setting: Setting) -> OwnTask:
    name, chat = f"{GROUP}_{dataset}", dataset not in CONTINUED
    for package in PACKAGES.get(SCORES[dataset], ()):
        if importlib.util.find_spec(package) is None:
            raise InputError(f"{name} is scored with {package}, which is not installed: pip install 'icejax[evaluate]'")
    lengths = json_document(setting.data / LENGTHS, _lengths, what="LongBench's file", fields="the new tokens of each data set")
    new_tokens = lengths[dataset]
    rows = samples(setting.data / GROUP / f"{dataset}.jsonl.gz", dataset)[: setting.limit]
    room = setting.model.max_length - new_tokens - (setting.chat_tokens if chat else 0)
    for row in rows:
        row["prompt"] = without_middle(setting.model, row["prompt"], room)
    return generation_task(name, rows, functools.partial(_score, dataset=dataset), new_tokens=new_tokens, chat=chat)


def _lengths(config: dict[str, int]) -> dict[str, int]:
    return {dataset: int(config[dataset]) for dataset in SCORES}


def _score(row: dict[str, Any], answer: str, *, dataset: str) -> float:
    return best(dataset, answer, row["answers"], row["classes"])


def samples(file: Path, dataset: str) -> list[dict[str, Any]]:
    """Returns the samples of a data set: `prompt`, `answers`, and `classes`, which data sets of classification have.

    Raises:
        InputError: the file is missing or is none of the data set's prompts.
    """
    sample, fields = functools.partial(_sample, dataset=dataset), "prompt and gold, a list of texts or classes with answers"
    return json_lines(file, sample, what="prompts", fields=fields)


def _sample(line: dict[str, Any], *, dataset: str) -> dict[str, Any]:
    gold = line["gold"] if isinstance(line["gold"], dict) else dict(answers=line["gold"], all_classes=[])
    row = dict(prompt=line["prompt"], answers=gold["answers"], classes=gold["all_classes"])
    if not (isinstance(row["answers"], list) and isinstance(row["classes"], list)):
        raise TypeError("a gold is no list")
    if not all(isinstance(x, str) for x in (row["prompt"], *row["answers"], *row["classes"])):
        raise TypeError("a prompt or a gold is no text")
    if SCORES[dataset] is retrieval and not all(map(PARAGRAPH.search, row["answers"])):
        raise ValueError("a gold has no 'Paragraph 3' or '段落3'")
    return row


def without_middle(model: HarnessModel, text: str, most: int) -> str:
    """Returns a text of at most `most` tokens: its first and last half as many, each decoded without special tokens.

    The text is tokenized again later, where it may have more tokens; then less of it stays.

    Raises:
        InputError: `most` is below 2.
    """
    tokens, half = model.tok_encode(text), most // 2
    while len(model.tok_encode(text)) > most:
        if half < 1:
            raise InputError("--context-length leaves no room for the prompts of MiniLongBench: raise it")
        text = "".join(model.tokenizer.decode(part, skip_special_tokens=True) for part in (tokens[:half], tokens[-half:]))
        half -= 1
    return text
