"""Perplexity of a text file by position: how well the text is predicted after so many tokens of it, with a cache.

For each position p the first p tokens are prefilled, exactly, and the next `SCORED` tokens are forced into the decode steps one
after another, so the cache decides their log-likelihoods. Later windows of the file begin where the one before ended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from lm_eval.api.instance import Instance

from icejax.checks.errors import InputError
from icejax.evaluation.own_task import OwnTask
from icejax.evaluation.setting import Setting

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
SCORED = 128  # tokens after each position
WINDOWS = 4  # most of each position


class Forced(OwnTask):
    """A task whose requests are forced tokens (`HarnessModel.token_logprobs`).

    Attributes:
        window: returns the tokens of a sample, those in front and the scored ones.
    """

    def __init__(self, rows: list[dict[str, Any]], *, window: Callable[[dict[str, Any]], list[int]], **config: Any) -> None:
        """Takes the samples, and the harness's config of the task."""
        self.window = window
        super().__init__(rows, **config)

    def fewshot_context(self, doc: dict[str, Any], *_: Any, **__: Any) -> str:
        """Returns the name of a window; a chat template has no place in the text."""
        return self.doc_to_text(doc)

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> Instance:
        """Returns the tokens of a window, and how many of them are scored."""
        del kwargs["apply_chat_template"], kwargs["chat_template"]
        return Instance("token_logprobs", doc, (ctx, self.window(doc), SCORED), 0, **kwargs)


def task(setting: Setting) -> Forced:
    """Returns the task: up to `WINDOWS` windows of the file for each position.

    Raises:
        InputError: no file is given, it cannot be read, or it is too short.
    """
    if setting.text is None:
        raise InputError("the task perplexity needs --text FILE, the text that is scored")
    text = read(setting)
    begin, tokens = _tokens(setting, text)
    proposed = [length for length in LENGTHS if length + SCORED <= min(setting.context_length, len(begin) + len(tokens))]
    lengths = list(setting.lengths or proposed)
    most = min(setting.context_length, len(begin) + len(tokens)) - SCORED
    if not lengths or max(lengths) > most or min(lengths) < max(1, len(begin)):
        raise InputError(
            f"--text has {len(tokens)} tokens and the context {setting.context_length}, and {SCORED} are scored behind each "
            f"position: --lengths must be at most {most}"
        )

    def window(doc: dict[str, Any]) -> list[int]:
        return begin + tokens[doc["first"] : doc["first"] + doc["length"] - len(begin) + SCORED]

    rows = [
        dict(length=length, first=first)
        for number in range(WINDOWS)
        for length in lengths
        if (first := number * (length - len(begin) + SCORED)) + length - len(begin) + SCORED <= len(tokens)
    ]
    name = f"{setting.text.name} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return Forced(
        rows,
        window=window,
        task="perplexity",
        output_type="generate_until",
        doc_to_text=lambda doc: f"{name}, {doc['length']} tokens from {doc['first']}",
        doc_to_target=lambda _: "",
        process_results=lambda _, answers: dict(nll=-sum(answers[0]) / len(answers[0])),
        metric_list=[dict(metric="nll", aggregation="mean", higher_is_better=False)],
        num_fewshot=0,
    )


def read(setting: Setting) -> str:
    """Returns the text of the file.

    Raises:
        InputError: it cannot be read, is not UTF-8, or is empty.
    """
    try:
        text = setting.text.read_bytes().decode()
    except OSError as error:
        raise InputError(f"--text {setting.text} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"--text {setting.text} is not UTF-8 (byte {error.start}): expected a text file") from None
    if not text.strip():
        raise InputError(f"--text {setting.text} is empty: expected a text file")
    return text


def _tokens(setting: Setting, text: str) -> tuple[list[int], list[int]]:
    """Returns the tokens that the tokenizer puts before a text, such as bos, and the text's own."""
    plain, whole = setting.encode("x", add_special_tokens=False), setting.encode("x")
    return whole[: whole.index(plain[0])], setting.encode(text, add_special_tokens=False)
