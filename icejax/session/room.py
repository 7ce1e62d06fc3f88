"""The room of a session: its plan, the answer tokens that fit after a text, and the bytes that saving it can take.

`Session` calls it. Example: a context of 600 tokens, 500 tokens held and a text of 20: 80 answer tokens fit.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

from icejax.api.prompts import ContextFull
from icejax.cache.protocol import CachePolicy
from icejax.engine.plan import Plan, make_plan
from icejax.engine.trim import Joint
from icejax.models.decoder import CausalLM
from icejax.session import storage
from icejax.session.messages import has_answer

LOG = logging.getLogger(__name__)


def session_plan(model: CausalLM, cache: CachePolicy, *, context_length: int, first: int) -> Plan:
    """Returns the plan of a session of `context_length` tokens whose first text has `first` tokens."""
    sizes = dict(batch_size=1, prompt_tokens=first, new_tokens=max(0, context_length - first))
    return make_plan(model, cache, **sizes, extends=True)


def answer_limit(wanted: int, *, context_length: int, held: int, new: int, chat: bool) -> int:
    """Returns how many of the `wanted` answer tokens have room after `held` tokens and a text of `new`.

    Logs a warning if fewer have room than are wanted.

    Raises:
        ContextFull: none has.
    """
    room = context_length - held - new
    if room < 1:
        raise _full(f"holds {held} tokens and the text has {new}", context_length, held=held, new=new, chat=chat)
    if room < wanted:
        LOG.warning("the context of %d tokens has room for an answer of %d, not %d", context_length, room, wanted)
    return min(wanted, room)


@contextlib.contextmanager
def of_whole_chat(messages: list[dict[str, str]]) -> Iterator[None]:
    """Makes the error of a whole chat that is too long speak of the chat; `messages`: the messages before the last one."""
    try:
        yield
    except ContextFull as error:
        if not has_answer(messages):  # the message by itself is too long
            raise
        counts = dict(held=0, new=error.new, chat=True)
        raise _full(f"and the text have {error.new} tokens", error.context_length, **counts) from None


@contextlib.contextmanager
def behind(held: int, *, chat: bool) -> Iterator[None]:
    """Adds the `held` tokens before a text to the error of a text that is too long by itself."""
    try:
        yield
    except ContextFull as error:
        if not held:
            raise
        counts = dict(held=held, new=error.new, chat=chat)
        raise _full(f"holds {held} tokens and the text has {error.new}", error.context_length, **counts) from None


def _full(count: str, context_length: int, *, held: int, new: int, chat: bool) -> ContextFull:
    """Returns the error of a text without room; the turns of a chat can be taken back."""
    ways = "take a turn back (undo), or load the saved chat" if chat else "or begin a session"
    message = (
        f"the session {count}: its context of {context_length} is full; shorten the text, {ways} with a larger context_length"
    )
    return ContextFull(message, context_length=context_length, held=held, new=new)


def pool_is_full(plan: Plan, pages: int, tokens: Sequence[int], limit: int) -> bool:
    """Says whether the pool, with `pages` in use, lacks pages for new `tokens` and `limit` answer tokens; logs it if so.

    Every text begins a new page, so hundreds of short texts fill a pool whose context has room.
    """
    full = plan.room_for_answer(len(tokens), pages=pages) < limit
    if full:
        LOG.warning("many short texts have filled the pool of pages: the conversation is prefilled again")
    return full


def outgrows(model: CausalLM, seen: int, tokens: int) -> bool:
    """Says whether a text of `tokens` tokens outgrows LongRoPE's original context, within which a cache of `seen` tokens is.

    All keys have other factors then; the log says that the conversation is prefilled again.
    """
    short = model.config.short_context
    if short is None or not seen <= short < tokens:
        return False
    LOG.warning("the conversation outgrows the model's original context of %d tokens: it is prefilled again", short)
    return True


def saved_size(plan: Plan, end: Joint | None, *, held: int, new: int, limit: int) -> int:
    """Returns the most bytes that saving can write after `new` tokens were appended and answered with `limit` tokens.

    Args:
        end: where the cache ends before the new text; None: the new text is the first.
        held: number of tokens before the new text.
    """
    pages, seen = (0, 0) if end is None else (end.page, end.tokens)
    if plan.pooled:
        text = max(plan.text_slots(held - seen + new), plan.spec.prompt_capacity if end is None else 0)
        pages = min(plan.pool.pages, pages + (text + limit) // plan.page_size)
    return storage.size(plan, tokens=held + new + limit, pages=pages)
