"""RULER (Hsieh et al. 2024, arXiv 2404.06654) at any length, made with the model's own tokenizer: `ruler_vt_8192`.

Scores follow scripts/eval/synthetic/constants.py of NVIDIA/RULER: the fraction of the right texts that an answer has, and
for qa_1 and qa_2 whether it has any of them. The words come from the package wonderwords, as RULER's do.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from lm_eval.api.group import Group

from icejax.checks.errors import InputError
from icejax.evaluation.own_task import OwnTask
from icejax.evaluation.setting import Setting
from icejax.evaluation.tasks import ruler_needles, ruler_questions, ruler_words
from icejax.evaluation.tasks.files import json_document
from icejax.evaluation.tasks.generation import generation_task, group
from icejax.evaluation.tasks.ruler_prompts import SHORT, Sized

GROUP = "ruler"
SAMPLES = 500  # of each task
MADE = (*ruler_needles.TASKS, "vt", "cwe", "fwe")  # tasks of the group
NAME = re.compile(rf"{GROUP}(?:_({'|'.join((*MADE, *ruler_questions.FILES))}))?(?:_(\d{{1,9}}))?")
ESSAYS, MORE_WORDS = "ruler/essays/PaulGrahamEssays.json.gz", "ruler/english_words.json"


def has(name: str) -> bool:
    """Returns whether this file has a task or group of this name."""
    return NAME.fullmatch(name) is not None


def sized(name: str, lengths: Sequence[int] | None) -> list[str]:
    """Returns a name with each of the lengths after it, or the name alone if it is no task of this file or has a length."""
    match = NAME.fullmatch(name)
    return [name] if match is None or match[2] or not lengths else [f"{name}_{length}" for length in lengths]


def task(name: str, setting: Setting) -> OwnTask | Group:
    """Returns the task that a name and the length after it say, 4,096 tokens without one, or the group of all made tasks.

    Raises:
        InputError: a file is missing or is another, wonderwords is not installed, or the length does not suit.
    """
    kind, digits = NAME.fullmatch(name).groups()
    length = int(digits or SHORT)
    if length > setting.model.max_length:
        raise InputError(f"{name} needs {length} tokens, and --context-length is {setting.model.max_length}: raise it")
    if kind is None:
        return group(name, [_task(f"{GROUP}_{made}_{length}", made, length, setting) for made in MADE])
    return _task(name, kind, length, setting)


def _task(name: str, kind: str, length: int, setting: Setting) -> OwnTask:
    asked, samples = kind in ruler_questions.FILES, min(SAMPLES, setting.limit or SAMPLES)
    added = len(setting.encode("a")) - setting.count("a")
    if asked:
        source = ruler_questions.source(kind, setting.data)
        prompts, samples = ruler_questions.answers(source), min(samples, len(source.questions))
    else:
        prompts = _made(kind, length, setting)
    # `chat_tokens` counts the tokens that the tokenizer adds too.
    made = prompts.prompts(setting.count, length - max(setting.chat_tokens - added, 0), samples, added=added)
    rows = [dict(prompt=text, prefix=prefix, answers=answers) for text, prefix, answers in made]
    score = any_text if asked else all_texts
    return generation_task(name, rows, score, new_tokens=prompts.new_tokens, prefixed=True)


def _made(kind: str, length: int, setting: Setting) -> Sized | ruler_words.FrequentWords:
    if kind == "fwe":
        return ruler_words.FrequentWords()
    if kind == "vt":
        return ruler_words.variables(setting.count, length)
    if kind == "cwe":
        return ruler_words.common_words(words, functools.partial(_more_words, setting), length)
    return ruler_needles.needles(ruler_needles.TASKS[kind], words, functools.partial(_essays, setting), length)


@functools.cache
def words(kind: str) -> list[str]:
    """Returns the words of a list of wonderwords: "noun", "adjective" or "verb"; InputError without the package."""
    try:
        from wonderwords import RandomWord
    except ImportError:
        text = (
            "RULER's needles and common words are made of wonderwords, which is not installed: pip install 'icejax[evaluate]'"
        )
        raise InputError(text) from None
    return RandomWord.read_words(f"{kind}list.txt")


def _essays(setting: Setting) -> str:
    return json_document(setting.data / ESSAYS, lambda content: content["text"], what="RULER's essays", fields="text")


def _more_words(setting: Setting) -> list[str]:
    return json_document(setting.data / MORE_WORDS, lambda content: list(content.values()), what="a list", fields="words")


def all_texts(row: dict[str, Any], answer: str) -> float:
    """Returns the fraction of the right texts that an answer has, whatever their case."""
    return sum(_has(answer, text) for text in row["answers"]) / len(row["answers"])


def any_text(row: dict[str, Any], answer: str) -> float:
    """Returns whether an answer has one of the right texts, whatever their case."""
    return float(any(_has(answer, text) for text in row["answers"]))


def _has(answer: str, text: str) -> bool:
    return text.lower() in re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()
