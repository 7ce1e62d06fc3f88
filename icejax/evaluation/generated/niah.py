"""Needle in a haystack (Kamradt 2023): one sentence in a long text, at each length and depth.

Needle, question and prompt are the usual ones. The answer is begun for the model, because small models often end it at once.
The score is that of Fu et al. 2024 (arXiv 2402.10171, their published `visualize.py`): the share of the answer's words that the
model's line has. The haystack is Paul Graham's essays where the data folder has RULER's file of them, else the prose of
Python's language reference.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from pathlib import Path

import numpy as np

from icejax.checks.errors import InputError
from icejax.evaluation.own_task import OwnTask
from icejax.evaluation.setting import Setting

ESSAYS = "ruler/essays/PaulGrahamEssays.json.gz"
NEEDLE = "\nThe best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.\n"
ANSWER = "eat a sandwich and sit in Dolores Park on a sunny day."
PROMPT = (
    "This is a very long story book: <book> {} </book>.\n"
    "Based on the content of the book, Question: What is the best thing to do in San Francisco?\nAnswer:"
)
BEGUN = "The best thing to do in San Francisco is"
LENGTHS = (1024, 2048, 4096, 8192)
DEPTHS = tuple(range(0, 101, 10))  # percent
ANSWER_TOKENS = 50
SENTENCE = re.compile(r"(?<=[.!?])(?=\s)|(?=\n\n)")  # or a paragraph, such as a heading
LONGEST = 8  # characters of a token, on average


def task(setting: Setting) -> OwnTask:
    """Returns the task: a sample for each depth and length.

    Raises:
        InputError: a length is out of range, or the file of essays cannot be read.
    """
    lengths = setting.lengths_for("niah", LENGTHS, least=512)
    hay = Haystack(setting, most=max(lengths))
    rows = [dict(length=length, depth=depth) for length in lengths for depth in DEPTHS]
    return OwnTask(
        rows,
        task="niah",
        output_type="generate_until",
        doc_to_text=lambda doc: hay.prompt(doc["length"], doc["depth"]),
        doc_to_target=lambda _: ANSWER,
        gen_prefix=BEGUN,
        generation_kwargs=dict(until=["\n"], max_gen_toks=ANSWER_TOKENS, do_sample=False),
        process_results=lambda _, answers: dict(found=score(answers[0])),
        metric_list=[dict(metric="found", aggregation="mean", higher_is_better=True)],
        num_fewshot=0,
    )


def score(answer: str) -> float:
    """Returns the share of the expected words, in lower case, that an answer has."""
    expected = set(ANSWER.lower().split())
    return len(expected & set(answer.lower().split())) / len(expected)


class Haystack:
    """Sentences, and their tokens."""

    def __init__(self, setting: Setting, *, most: int) -> None:
        """Takes enough text for prompts of `most` tokens; a text that is too short is repeated."""
        self._setting, text = setting, prose(setting.data)
        sentences = SENTENCE.split((text * (1 + LONGEST * most // len(text)))[: LONGEST * most])[:-1]
        self._sentences = sentences
        self._ends = np.cumsum([setting.count(sentence) for sentence in sentences])

    def prompt(self, length: int, depth: float) -> str:
        """Returns a prompt that leaves room for its answer and a chat template in `length` tokens.

        The needle stands between the two sentences nearest to `depth` percent of the text's tokens.
        """
        room = length - ANSWER_TOKENS - self._setting.template_tokens - self._setting.count(f" {BEGUN}")
        count = int(np.searchsorted(self._ends, room - len(self._setting.encode(PROMPT.format(NEEDLE))), side="right"))
        while True:
            starts = np.append(0, self._ends[:count])
            place = int(np.abs(starts - depth / 100 * starts[-1]).argmin())
            text = "".join([*self._sentences[:place], NEEDLE, *self._sentences[place:count]])
            if len(self._setting.encode(PROMPT.format(text))) <= room:
                return PROMPT.format(text)
            count -= 1


def prose(data: Path | None) -> str:
    """Returns the text of the haystack.

    Raises:
        InputError: the data folder has the file of essays, which cannot be read.
    """
    if data is None or not (data / ESSAYS).exists():
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics)).expandtabs()
    try:
        text = json.loads(gzip.decompress((data / ESSAYS).read_bytes()))["text"]
        if not isinstance(text, str) or not text.strip():
            raise ValueError("no text")
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{data / ESSAYS} is no file of essays ({error}): expected JSON in gzip with the key text") from None
    return text
