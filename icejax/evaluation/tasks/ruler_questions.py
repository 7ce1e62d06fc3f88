"""RULER's questions about one document among many: qa_1 of SQuAD 2.0, qa_2 of HotpotQA, as scripts/data/synthetic/qa.py."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

from icejax.evaluation.tasks.files import json_document
from icejax.evaluation.tasks.ruler_prompts import SEED, Prompt, Sized

NEW_TOKENS = 32
ASKED = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\n"
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "Question: {question}"
)
PREFIX = " Answer:"
FILES = {"qa_1": "ruler/squad.json", "qa_2": "ruler/hotpotqa.json"}


class Question(NamedTuple):
    """A question, its right answers, and the numbers of the documents that tell them and of others of the same article."""

    text: str
    answers: list[str]
    documents: list[int]
    others: list[int]


class Source(NamedTuple):
    """Questions, and all documents."""

    questions: list[Question]
    documents: list[str]


def source(task: str, data: Path) -> Source:
    """Returns the questions of a task.

    Raises:
        InputError: the file is missing or is another.
    """
    file = data / FILES[task]
    if task == "qa_1":
        return json_document(file, _squad, what="SQuAD", fields="data, with paragraphs of context and qas")
    return json_document(file, _hotpotqa, what="HotpotQA", fields="question, answer and context of each question")


def _squad(content: dict[str, Any]) -> Source:
    articles = [[paragraph["context"] for paragraph in article["paragraphs"]] for article in content["data"]]
    documents = sorted({text for article in articles for text in article})
    numbers, questions = {text: i for i, text in enumerate(documents)}, []
    for article, texts in zip(content["data"], articles, strict=True):
        for paragraph in article["paragraphs"]:
            own = numbers[paragraph["context"]]
            others = [numbers[text] for text in texts if numbers[text] != own]
            for question in paragraph["qas"]:
                if not question["is_impossible"]:
                    answers = [answer["text"] for answer in question["answers"]]
                    questions.append(Question(question["question"], answers, [own], others))
    return Source(questions, documents)


def _hotpotqa(content: list[dict[str, Any]]) -> Source:
    texts = [[f"{title}\n{''.join(lines)}" for title, lines in question["context"]] for question in content]
    documents = sorted({text for several in texts for text in several})
    numbers = {text: i for i, text in enumerate(documents)}
    questions = [
        Question(question["question"], [question["answer"]], [numbers[text] for text in several], [])
        for question, several in zip(content, texts, strict=True)
    ]
    return Source(questions, documents)


def answers(source: Source) -> Sized:
    """Returns prompts of a question after documents; each has the documents that tell the answer."""
    draws = random.Random(SEED)

    def chosen(question: Question, size: int) -> list[str]:
        if size >= len(source.documents):
            return (source.documents * -(-size // len(source.documents)))[:size]
        numbers, missing = list(question.documents), max(0, size - len(question.documents))
        if missing > len(question.others):
            known = {*question.documents, *question.others}
            rest = [i for i in range(len(source.documents)) if i not in known]
            numbers += question.others + draws.sample(rest, missing - len(question.others))
        else:
            numbers += draws.sample(question.others, missing)
        return [source.documents[i] for i in numbers]

    def make(size: int, index: int) -> Prompt:
        question = source.questions[index]
        texts = chosen(question, size)
        random.Random(SEED).shuffle(texts)
        context = "\n\n".join(f"Document {i + 1}:\n{text}" for i, text in enumerate(texts))
        return Prompt(ASKED.format(context=context, question=question.text), PREFIX, question.answers)

    return Sized(make, NEW_TOKENS, step=10)
