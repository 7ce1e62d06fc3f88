"""Questions about one text in `icejax.Session`: one after another, or each after the text alone."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from icejax.cache.protocol import CachePolicy
from icejax.engine.response import GenerationResponse
from icejax.models.decoder import CausalLM
from icejax.session.session import Session

# 11:00 UTC on 26 July 2024, one date in nearly all time zones: templates that name the date give equal prompts on all days.
STARTED = 1721991600.0


def answers(
    model: CausalLM,
    tokenizer: Any,
    text: str,
    *,
    cache: CachePolicy,
    host_memory_limit: int | None,
    questions: list[str],
    max_gen_toks: list[int],
    length: int,
    shared: bool,
    chat: bool,
    system: str | None,
    begun: str,
    end: str,
) -> list[GenerationResponse]:
    """Returns the answers to the questions, greedily.

    Args:
        max_gen_toks: how many tokens each answer may have.
        length: maximum number of tokens of text, questions and answers.
        shared: whether each question stands after the text alone; else after the questions and answers before it too.
        chat: whether text and questions are messages in the chat template.
        system: the system message of a chat.
        begun, end: text before an answer in plain text, and the text that ends it; neither is in its text.
    """
    limits = dict(host_memory_limit=host_memory_limit)
    session = Session(model, tokenizer, cache=cache, context_length=length, system=system, **limits)
    session.started = STARTED

    def ask(session: Session, question: str, count: int) -> GenerationResponse:
        if chat:  # an answer that ended at a stop string would be prefilled again
            return session.chat(question, max_new_tokens=count)
        return session.ask(question + begun, max_new_tokens=count, stop=end)

    asked = list(zip(questions, max_gen_toks, strict=True))
    if not shared:
        texts = [text, *[""] * len(asked[1:])]
        return [ask(session, f"{before}\n{question}", count) for before, (question, count) in zip(texts, asked, strict=True)]
    (session.chat if chat else session.ask)(text, max_new_tokens=1)
    with tempfile.TemporaryDirectory() as folder:
        session.save(Path(folder) / "text")
        return [
            ask(Session.load(Path(folder) / "text", model, tokenizer, **limits), f"\n{question}", count)
            for question, count in asked
        ]
