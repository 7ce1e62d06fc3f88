"""The room of a session: its plan, the answer tokens that fit behind a text, and the bytes that saving it can take.

`Session` calls it. Example: 10 pool pages are free behind a new text and a page holds 16 tokens: 160 answer tokens fit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from icejax.cache.protocol import CachePolicy
from icejax.checks.errors import InputError
from icejax.engine.decode_loop import Run
from icejax.engine.plan import Plan, make_plan
from icejax.models.decoder import CausalLM
from icejax.session import storage

LOG = logging.getLogger(__name__)


def session_plan(model: CausalLM, cache: CachePolicy, *, context_length: int, first: int) -> Plan:
    """Returns the plan of a session of `context_length` tokens whose first text has `first` tokens."""
    sizes = dict(batch_size=1, prompt_tokens=first, new_tokens=max(0, context_length - first))
    return make_plan(model, cache, **sizes, extends=True)


def room_behind(plan: Plan, run: Run, tokens: Sequence[int]) -> int:
    """Returns how many answer tokens have room behind the new `tokens`; InputError if none has."""
    room = plan.room_for_answer(len(tokens), pages=int(run.state.cache.lengths.next_page))
    if room < 1:
        raise InputError("the session's pool of pages is full: begin a new one, or one with a larger context_length")
    return room


def outgrows(model: CausalLM, seen: int, tokens: int) -> bool:
    """Says whether a text of `tokens` tokens outgrows LongRoPE's original context, within which a cache of `seen` tokens is.

    All keys have other factors then; the log says that the conversation is prefilled anew.
    """
    short = model.config.short_context
    if short is None or not seen <= short < tokens:
        return False
    LOG.warning("the conversation outgrows the model's original context of %d tokens: it is prefilled anew", short)
    return True


def saved_size(plan: Plan, run: Run | None, *, held: int, new: int, limit: int) -> int:
    """Returns the most bytes that saving can write after `new` tokens were appended and answered with `limit` tokens.

    Args:
        run: the run so far; None: the new text is the first.
        held: number of tokens before the new text.
    """
    pages, seen = (0, 0) if run is None else (int(run.state.cache.lengths.next_page), run.seen)
    if plan.pooled:
        text = max(plan.text_slots(held - seen + new), plan.spec.prompt_capacity if run is None else 0)
        pages = min(plan.pool.pages, pages + (text + limit) // plan.page_size)
    return storage.size(plan, tokens=held + new + limit, pages=pages)
