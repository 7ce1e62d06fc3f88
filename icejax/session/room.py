"""The room of a session: its plan, the answer tokens that fit behind a text, and the bytes that saving it can take.

`Session` calls it. Example: 10 pool pages are free behind a new text and a page holds 16 tokens: 160 answer tokens fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from icejax.cache.protocol import CachePolicy
from icejax.checks.errors import InputError
from icejax.engine.decode_loop import Run
from icejax.engine.plan import Plan, make_plan
from icejax.models.decoder import CausalLM
from icejax.session import storage


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


def saved_size(plan: Plan, *, pages: int, seen: int, tokens: int, limit: int) -> int:
    """Returns the most bytes that saving can write after the session grew to `tokens` tokens and `limit` answer tokens.

    Args:
        pages: number of pool pages in use before.
        seen: number of tokens in the cache before.
    """
    if plan.pooled:
        pages = min(plan.pool.pages, pages + (plan.padded(tokens - seen) + limit) // plan.page_size)
    return storage.size(plan, tokens=tokens + limit, pages=pages)
