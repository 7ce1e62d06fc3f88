"""Questions about one text in `icejax.Session`, in the two modes of SCBench (Li et al. 2024, arXiv 2412.10319).

The text has functions of Python's standard library, and each of three questions asks for another one by its name.
`multi_turn_code` asks one after another in a session, after the model's own answers; the first question is prefilled with the
text. `multi_request_code` prefills the text alone and saves the session; each question continues a copy of it, so no cache has
seen a question when it chooses the tokens to keep. There the model answers the text with one token. RepoQA's scores, by turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lm_eval.api.instance import Instance

from icejax.checks.errors import InputError
from icejax.evaluation.generated.library import Excerpt, Function, excerpt
from icejax.evaluation.generated.similarity import scores
from icejax.evaluation.own_task import OwnTask
from icejax.evaluation.setting import Setting

QUESTION = "Repeat the function `{}` of {} from the code above exactly, in a code block wrapped by ```:\n"
BEGUN, END = "```python\n", "\n```"
LENGTHS = (2048, 4096, 8192)
SAMPLES = 10  # of each length
DRAWS = 20  # texts that are tried for one with functions that fit their answers
TURNS = 3
CLOSED = 8  # tokens of an answer besides the function
ANSWER_TOKENS, QUESTION_TOKENS = 256, 96  # most of each; a question's with its chat template


class Turns(OwnTask):
    """A task whose requests are conversations (`HarnessModel.converse`).

    Attributes:
        asked: returns the questions of a sample, and how many tokens each answer may have.
        shared: whether each question stands after the text alone.
    """

    def __init__(
        self,
        rows: list[dict[str, Any]],
        *,
        asked: Callable[[dict[str, Any]], tuple[list[str], list[int]]],
        shared: bool,
        **config: Any,
    ) -> None:
        """Takes the samples, and the harness's config of the task."""
        self.asked, self.shared = asked, shared
        super().__init__(rows, **config)

    def fewshot_context(self, doc: dict[str, Any], *_: Any, system_instruction: str | None = None, **__: Any) -> str:
        """Returns the text; the session writes the chat template."""
        self._system = system_instruction
        return self.doc_to_text(doc)

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> Instance:
        """Returns the conversation about a text."""
        chat, _ = kwargs.pop("apply_chat_template", False), kwargs.pop("chat_template", None)
        questions, tokens = self.asked(doc)
        options = dict(questions=questions, max_gen_toks=tokens, chat=chat, system=self._system, length=doc["length"])
        options |= dict(shared=self.shared, begun=BEGUN, end=END)
        return Instance("converse", doc, (ctx, options), 0, **kwargs)


def multi_turn(setting: Setting) -> Turns:
    """Returns the task whose questions follow one another."""
    return _task("multi_turn_code", setting, shared=False)


def multi_request(setting: Setting) -> Turns:
    """Returns the task whose questions share the text alone."""
    return _task("multi_request_code", setting, shared=True)


def _task(name: str, setting: Setting, *, shared: bool) -> Turns:
    lengths = setting.lengths_for(name, LENGTHS, least=min(LENGTHS))
    rows = [dict(length=length, number=number) for number in range(SAMPLES) for length in lengths]

    @functools.cache
    def sample(length: int, number: int) -> tuple[Excerpt, tuple[Function, ...]]:
        return _sample(setting, length, number)

    def asked(doc: dict[str, Any]) -> tuple[list[str], list[int]]:
        functions = sample(doc["length"], doc["number"])[1]
        questions = [QUESTION.format(function.name, function.path) for function in functions]
        return questions, [_answer_tokens(setting, function) for function in functions]

    def results(doc: dict[str, Any], answers: list[list[str]]) -> dict[str, float]:
        code, functions = sample(doc["length"], doc["number"])
        values = [scores(answer, target, code.functions) for answer, target in zip(answers[0], functions, strict=True)]
        found = {f"turn_{turn}": value for turn, (value, _) in enumerate(values, 1)}
        return found | dict(similarity=sum(near for _, near in values) / len(values))

    names = [*(f"turn_{turn}" for turn in range(1, TURNS + 1)), "similarity"]
    return Turns(
        rows,
        asked=asked,
        shared=shared,
        task=name,
        output_type="generate_until",
        doc_to_text=lambda doc: sample(doc["length"], doc["number"])[0].text,
        doc_to_target=lambda doc: [function.source for function in sample(doc["length"], doc["number"])[1]],
        process_results=results,
        metric_list=[dict(metric=metric, aggregation="mean", higher_is_better=True) for metric in names],
        num_fewshot=0,
    )


def _answer_tokens(setting: Setting, function: Function) -> int:
    return setting.count(BEGUN + function.source + END) + CLOSED


def _sample(setting: Setting, length: int, number: int) -> tuple[Excerpt, tuple[Function, ...]]:
    """Returns functions, and the three that are asked for: from the end, the beginning and the middle of the text.

    The first stands after the others, so that each question goes back.
    """
    tokens = length - TURNS * (ANSWER_TOKENS + QUESTION_TOKENS) - setting.template_tokens
    for draw in range(DRAWS):
        code = excerpt(setting, tokens=tokens, number=DRAWS * number + draw)
        fitting = [function for function in code.functions if function.fits and code.alone(function)]
        fitting = [function for function in fitting if _answer_tokens(setting, function) <= ANSWER_TOKENS]
        if len(fitting) >= TURNS:
            chosen: list[Function] = []
            for depth in (85, 15, 50):
                chosen.append(code.nearest([function for function in fitting if function not in chosen], depth))
            places = [code.functions.index(function) for function in chosen]
            if max(places) == places[0]:
                return code, tuple(chosen)
    raise InputError(f"a text of {length} tokens has fewer than {TURNS} functions to ask for: give longer --lengths")
