"""The cache of a conversation: a first text is prefilled, later ones extend it, and its end can be forgotten.

`Session` calls it with lists of token ids. Example: the cache holds 1,000 tokens, and a chat template rewrites the last 200.
The first 784 stay, which end at a joint of the pages; 16 of the 800 equal tokens are computed again, with the new ones.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import Any

from icejax.api.choice import Choice
from icejax.cache.pool.host_pool import Pool
from icejax.cache.protocol import CachePolicy, KVCache
from icejax.cache.registry import IN_PAGES, display_name
from icejax.engine.decode.run import Run, resumed_run
from icejax.engine.decode.step import DecodePrograms
from icejax.engine.extend import extend
from icejax.engine.move import move
from icejax.engine.penalties import row_options
from icejax.engine.plan import Plan
from icejax.engine.prefill import pool_for, prefill
from icejax.engine.request import AnswerOptions
from icejax.engine.sampling import fold_in, row_keys
from icejax.engine.trim import Joint, joint_of, last_joint, trim
from icejax.models.decoder import CausalLM
from icejax.session.room import session_plan

LOG = logging.getLogger(__name__)


class TextCache:
    """The cache of one row, which texts enter one after another.

    Attributes:
        run: the generation that continues the newest text; None while the cache is empty.
        plan: the plan of the run.
        policy: the cache policy.
        room: number of tokens that the cache has room for; with more, its tokens move to pages (`make_room`).
        reason: why the policy was chosen, in a line; None: the caller named it.
        first: number of tokens of the first text, for which the plan was made.
        joints: places at which the cache can end, in order.
    """

    def __init__(
        self, model: CausalLM, begun: CachePolicy | Choice, *, context_length: int, host_memory_limit: int | None
    ) -> None:
        """Makes an empty cache.

        Args:
            begun: the policy, or the choice of one.
        """
        self._model, self._begun = model, begun
        self._context_length, self._limit = context_length, host_memory_limit
        choice = begun if isinstance(begun, Choice) else Choice(begun, None)
        self.policy, self.reason, self.room = choice.policy, choice.reason, choice.room or context_length
        self.run: Run | None = None
        self.plan: Plan | None = None
        self.first, self.joints = 0, list[Joint]()

    def plan_for(self, first: int) -> Plan:
        """Returns the plan of a conversation whose first text has `first` tokens."""
        return session_plan(self._model, self.policy, context_length=self.room, first=first)

    def fresh_copy(self) -> TextCache:
        """Returns an empty cache that begins as this one did."""
        options = dict(context_length=self._context_length, host_memory_limit=self._limit)
        return TextCache(self._model, self._begun, **options)

    def make_room(self, tokens: int, *, held: int, seen: int) -> None:
        """Moves the cache to pages if it has no room for `tokens` tokens; its log says so.

        Args:
            held: number of first tokens that stay; 0: the cache will be made again.
            seen: number of tokens in the cache.

        Raises:
            InputError: the host has too little memory for the pages; the cache is as it was.
        """
        if tokens <= self.room:
            return
        count, room, before = min(held, seen), self.room, self.plan
        if count:
            plan = session_plan(self._model, IN_PAGES, context_length=self._context_length, first=count)
            into = pool_for([count], plan, self._limit)
        self.policy, self.room = IN_PAGES, self._context_length
        names = room, display_name(self.policy)
        LOG.warning("the conversation outgrows the %d tokens that fit the device: it continues with the %s cache", *names)
        if not count:
            self.empty()  # or a text that is refused after this would leave a cache of the other policy
        else:
            states, self.run = list(self.run.state.cache.layers), None  # each layer is freed when it has moved
            self.restore(plan, count, [], *move(self._model, states, count, before, plan, into))

    def description(self) -> dict[str, Any]:
        """Returns a saved session's record of the cache."""
        pages, joints = int(self.run.state.cache.lengths.next_page), [astuple(joint) for joint in self.joints]
        room = None if self.room == self._context_length else self.room
        return dict(first=self.first, pages=pages, joints=joints, room=room)

    def restore(self, plan: Plan, first: int, joints: Sequence[Sequence[int]], cache: KVCache, pool: Pool | None) -> None:
        """Takes over a saved cache, which has been read for `plan`."""
        self.plan, self.first, self.joints = plan, first, [Joint(*joint) for joint in joints]
        self.run = resumed_run(self._model, plan, cache, pool)

    def empty(self) -> None:
        """Frees the cache."""
        self.run, self.joints = None, []

    def num_same(self, held: Sequence[int], whole: Sequence[int], *, seen: int) -> int:
        """Returns how many first tokens of a conversation can stay in the cache.

        Args:
            held: the tokens that entered the cache, of which it has `seen`.
            whole: the tokens of the conversation now; at least the last one enters again.
        """
        same = len(os.path.commonprefix([list(held), list(whole[:-1])]))
        # LongRoPE's keys have other factors in a shorter text.
        if self.run is None or (same < seen and self._model.config.short_context is not None):
            return 0
        joint = self.end(same, seen=seen)
        return 0 if joint is None else max(joint.tokens, same if same >= seen else 0)

    def end(self, held: int, *, seen: int) -> Joint | None:
        """Returns where the cache of `seen` tokens ends for a text after the first `held` tokens; None: it has to be empty."""
        if held >= seen:
            return Joint(seen, int(self.run.state.cache.lengths.next_page))
        return last_joint(self.plan, self.joints, same=held, seen=seen)

    def enter(
        self, held: list[int], new: list[int], answer: AnswerOptions, *, seen: int, progress: Callable[[int], None] | None
    ) -> Run:
        """Computes the tokens `new` after `held`, and returns the run that chooses the first token of an answer.

        Args:
            held: tokens before; empty: the cache is made again.
            seen: number of tokens in the cache.
            progress: called with the number of layers done.
        """
        if not held:
            self.empty()  # frees the old cache before the new one is made
            self.plan, self.first = self.plan_for(len(new)), len(new)
            options = dict(sampling=[answer.sampling], draws=[(answer.seed, 0)])
            options |= dict(progress=progress, host_memory_limit=self._limit)
            results = prefill(self._model, [new], self.plan, **options)
        else:
            sampling, penalties = row_options([answer.sampling], [held], self._model.config.vocab_size)
            end, state = self.end(len(held), seen=seen), self.run.state
            self._add_joint()
            if end.tokens < seen:
                state = trim(state, self.plan, end)
                self.joints = [joint for joint in self.joints if joint.tokens <= end.tokens]
            key = fold_in(row_keys([(answer.seed, 0)]), state.cache.lengths.seen)  # each text's answer draws differently
            state = replace(state, key=key, sampling=sampling, penalties=penalties)
            results = extend(self._model, (held + new)[end.tokens :], self.plan, state, self.run.pool, progress=progress)
        self.run = Run(DecodePrograms(self._model, self.plan), *results)
        self._add_joint()
        return self.run

    def _add_joint(self) -> None:
        joint = joint_of(self.plan, self.run.state.cache)
        if joint is not None and joint not in self.joints:
            self.joints.append(joint)
