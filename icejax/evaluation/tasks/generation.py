"""Tasks in which a model answers prompts with text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lm_eval.api.group import Group
from lm_eval.config.group import AggMetricConfig

from icejax.evaluation.own_task import OwnTask

SCORE = "score"  # the metric of our tasks, from 0 to 1


class UnchattedTask(OwnTask):
    """A task whose prompts no chat template wraps: a model continues them."""

    def fewshot_context(self, doc: dict, num_fewshot: int, *_: Any, gen_prefix: str | None = None, **__: Any) -> str:
        """Returns the prompt of a sample as it stands."""
        return super().fewshot_context(doc, num_fewshot, gen_prefix=gen_prefix)


def generation_task(
    name: str,
    rows: list[dict[str, Any]],
    score: Callable[[dict[str, Any], str], float],
    *,
    new_tokens: int,
    until: tuple[str, ...] = (),
    prefixed: bool = False,
    chat: bool = True,
) -> OwnTask:
    """Returns a task of the harness.

    Args:
        rows: samples, each with a `prompt`.
        score: the score of an answer to a sample, from 0 to 1.
        new_tokens: maximum number of tokens of an answer.
        until: strings that end an answer.
        prefixed: whether each sample has a `prefix` that its answer begins with.
        chat: whether prompts go into the chat template where one is asked for.
    """
    return (OwnTask if chat else UnchattedTask)(
        rows,
        task=name,
        output_type="generate_until",
        doc_to_text="prompt",
        doc_to_target="",
        target_delimiter="",
        gen_prefix="prefix" if prefixed else None,
        generation_kwargs=dict(until=list(until), max_gen_toks=new_tokens, do_sample=False),
        process_results=lambda row, answers: {SCORE: score(row, answers[0])},
        metric_list=[dict(metric=SCORE, aggregation="mean", higher_is_better=True)],
        num_fewshot=0,
    )


def group(name: str, tasks: list[OwnTask]) -> Group:
    """Returns tasks as a group, whose score is the mean of theirs, each of the same weight."""
    metric = AggMetricConfig(metric=SCORE, aggregation="mean", weight_by_size=False, filter_list=["none"])
    tasks_together = Group(name=name, aggregate_metric_list=[metric], metadata=dict(version=1.0))
    for task in tasks:
        tasks_together.add(task)
    return tasks_together
