"""A session keeps a conversation's cache: a document is prefilled once and questioned for weeks. Users and commands call it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from icejax.api.choice import Choice, session_choice
from icejax.api.prompts import ContextFull, check_context, encode_prompts, first_messages
from icejax.cache.protocol import CachePolicy
from icejax.cache.registry import checked_policy
from icejax.checks.errors import InputError
from icejax.engine.decode.loop import decode_row
from icejax.engine.decode.row import Row
from icejax.engine.request import AnswerOptions, Request, answer_options
from icejax.engine.response import GenerationResponse, join
from icejax.engine.sampling import check_bias
from icejax.engine.snapshot.fingerprint import check_registered, fingerprint
from icejax.files.atomic_folder import Claim, as_claim, as_path, claim
from icejax.models.decoder import CausalLM
from icejax.runtime import devices, mesh
from icejax.runtime.compile_clock import Mark
from icejax.runtime.progress import Progress, prefilling
from icejax.session import storage
from icejax.session.messages import asked, grow, has_answer, take_back, tell_anew
from icejax.session.room import answer_limit, behind, of_whole_chat, outgrows, pool_is_full, saved_size
from icejax.session.text_cache import TextCache
from icejax.text.chat_messages import template_variables
from icejax.text.chat_template import render
from icejax.text.chat_turns import next_turn, with_one_end


class Session:
    """Texts and answers that follow one another in one cache of one row.

    The first text is prefilled. Later texts attend exactly to all earlier tokens, which stay in the cache: nothing is computed
    twice. A session that was saved and loaded answers bit for bit like one that was not. `ask` and `stream` take plain text;
    `chat` and `stream_chat` hold a chat in the tokenizer's template. A session does one or the other.

    Attributes:
        token_ids: all tokens so far, of texts and answers.
        messages: the chat's messages, each with a role and a content, and `reasoning` where the model wrote thoughts.
        context_length: maximum number of tokens of all texts and answers together.
        template_variables: tools and arguments of the chat template, fixed when the session begins.
        started: unix time when the session began; chat templates take it as the current time.
        cache_choice: a line that says which cache was chosen and why; None: the caller named one, or it was saved.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Any,
        *,
        cache: CachePolicy | None = None,
        context_length: int | None = None,
        device_memory: int | None = None,
        host_memory_limit: int | None = None,
        system: str | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Begins an empty session.

        Args:
            cache: the cache policy; None: `Full()` where it fits and is no slower, else `Clustered()`. Where `Full` fits in
                part, the session begins with it and moves on when it outgrows the device.
            context_length: maximum number of tokens, for which memory is allocated; None: the model's own.
            device_memory: bytes of the device's memory, for the choice of a cache, as in `stream_generate`.
            host_memory_limit: bytes of host memory that the cache may take; None: all free memory.
            system: the system message of a chat; None: the template's own, if it has one.
            tools, chat_template_kwargs: of the chat template, as in `icejax.chat`.
        """
        self._model, self._tokenizer, policy = model, tokenizer, checked_policy(cache)
        self.context_length = check_context(model, context_length)
        mesh.check_one_process(model.mesh, "a session")
        limits = dict(context_length=self.context_length, host_memory_limit=devices.check_limit(host_memory_limit))
        self._cache = TextCache(model, policy or session_choice(model, device_memory=device_memory, **limits), **limits)
        self.cache_choice = self._cache.reason
        self.started, self.token_ids = time.time(), list[int]()
        self.messages, self.template_variables = first_messages(system), template_variables(tools, chat_template_kwargs)
        self._outdated = False  # whether the cache holds what the chat leaves out: thoughts, a stop string, a turn taken back
        self._warned = False  # whether the log has a warning that the chat is prefilled again
        self._newest: Row | None = None

    @property
    def room(self) -> int:
        """Number of tokens that fit: the next text, with what a chat template adds to it, and its answer together."""
        if not has_answer(self.messages) or (self._cache.run is not None and not self._outdated):
            return self.context_length - len(self.token_ids)
        with contextlib.suppress(ContextFull):  # the whole chat will be prefilled again, without what it leaves out
            whole = render(self._tokenizer, self.messages, self.template_variables, now=self.started)
            return self.context_length - len(self._encode(whole, AnswerOptions()))
        return 0

    def fresh_copy(self) -> Session:
        """Returns an empty session with the same cache, context length, system message and template variables."""
        session = Session(self._model, self._tokenizer, cache=self._cache.policy, context_length=self.context_length)
        session._cache = self._cache.fresh_copy()
        session.messages = [message for message in self.messages[:1] if message["role"] == "system"]
        session.template_variables = self.template_variables
        return session

    def ask(self, text: str, **options: Any) -> GenerationResponse:
        """Returns the whole answer to `text`; the options are those of `stream`."""
        return join(list(self.stream(text, **options)))

    def stream(
        self, text: str, *, progress: Progress | None = None, save_to: Claim | None = None, **options: Any
    ) -> Iterator[GenerationResponse]:
        """Appends `text` to the session and yields the answer piece by piece.

        Args:
            progress: as in `stream_generate`. If it raises while `token_ids` is empty, the session stays without the text;
                later, the session is broken and only a saved copy can be continued.
            save_to: the folder that the session will be saved to; its disk is checked for room before anything runs.
            options: options of `AnswerOptions`; the tokenizer adds special tokens to the first text only.

        Raises:
            ContextFull: the context has no room for an answer to the text; the session is as it was.
            InputError: the text is empty, the disk of `save_to` has no room for it, the session holds a chat, or the logits
                are not finite.
        """
        if self.messages:
            raise InputError("the session holds a chat: continue with chat, or begin another session for text as it is")
        started, answer = Mark.now(), answer_options(options)
        new = self._encode(text, answer, continues=bool(self.token_ids))
        with prefilling(progress, self._model.config.num_hidden_layers) as layer_done:
            yield from self._answer(self.token_ids, new, [], answer, started=started, progress=layer_done, save_to=save_to)

    def chat(self, text: str, **options: Any) -> GenerationResponse:
        """Returns the whole answer to the message `text`; the options are those of `stream_chat`."""
        return join(list(self.stream_chat(text, **options)))

    def stream_chat(
        self, text: str | None, *, progress: Progress | None = None, save_to: Claim | None = None, **options: Any
    ) -> Iterator[GenerationResponse]:
        """Appends `text` to the chat as the user's next message and yields the answer; None: answers the last message again.

        Options are those of `stream`; the template writes its own special tokens. The session's tokens stay, and the text
        after the last answer is appended, even if that answer was cut off. If the template rewrites turns, or the last answer
        had thoughts, ended at a stop string or is given again, the tokens before the first one that differs stay; a cache that
        has evicted tokens is prefilled again, and the log warns once. A refusal leaves the session as it was.

        Raises:
            ContextFull: as in `stream`.
            InputError: the message is empty, the template fails, the session holds plain text, or there is no answer yet.
        """
        if self.token_ids and not self.messages:
            raise InputError("the session is not a chat: continue with ask, or begin another session for a chat")
        started, answer = Mark.now(), answer_options(options)
        messages, held, new = self._chat_turn(text, answer)
        with prefilling(progress, self._model.config.num_hidden_layers) as layer_done:
            yield from self._answer(held, new, messages, answer, started=started, progress=layer_done, save_to=save_to)

    def _chat_turn(self, text: str | None, answer: AnswerOptions) -> tuple[list[dict[str, str]], list[int], list[int]]:
        """Returns the messages with the turn, the tokens that stay, and the tokens to append."""
        before, question = asked(self.messages, text)
        messages, outdated = [*before, question, {"role": "assistant", "content": ""}], self._outdated or text is None
        whole, added = next_turn(self._tokenizer, before, question, self.template_variables, now=self.started)
        if self._cache.run is not None and added is not None and not outdated:
            ends, addition = self._model.config.eos_token_ids, self._encode(added, answer, continues=True)
            return messages, *with_one_end(self.token_ids, addition, seen=self._seen, ends=ends)
        with of_whole_chat(before):
            tokens = self._encode(whole, answer)
        if text is None and not has_answer(before):
            return messages, [], tokens
        num_same = self._cache.num_same(self.token_ids, tokens, seen=self._seen)
        if self._cache.run is not None and not num_same and not self._warned:
            self._warned = tell_anew(outdated, tokens=len(tokens))
        return messages, tokens[:num_same], tokens[num_same:]

    def undo(self) -> str:
        """Takes the last question and its answer out of the chat and returns the question.

        The cache keeps their tokens until the next message.

        Raises:
            InputError: the session has no answer, or holds plain text.
        """
        question = take_back(self.messages)
        self._newest, self._outdated = None, True
        if not has_answer(self.messages):
            self._cache.empty()
            self.token_ids, self._outdated = [], False
        return question

    def _encode(self, text: str, answer: AnswerOptions, *, continues: bool = False) -> list[int]:
        flags = dict(special_tokens=answer.special_tokens, parse_special=answer.parse_special, continues=continues)
        flags |= dict(context_length=self.context_length)
        with behind(len(self.token_ids) if continues else 0, chat=bool(self.messages)):
            return encode_prompts(self._model, self._tokenizer, [Request(prompt=text, index=0)], **flags)[0]

    def _answer(
        self, held: list[int], new: list[int], messages: list[dict[str, str]], answer: AnswerOptions, *, started: Mark,
        progress: Callable[[int], None] | None, save_to: Claim | None,
    ) -> Iterator[GenerationResponse]:  # fmt: skip
        """Appends `new` to the tokens `held`, or prefills it if none are held; yields the answer, the last of `messages`."""
        check_bias(answer.sampling, self._model.config.vocab_size)
        sizes = dict(context_length=self.context_length, held=len(held), new=len(new), chat=bool(messages))
        limit = answer_limit(answer.max_new_tokens, **sizes)
        if held and (self._cache.run is None or outgrows(self._model, self._seen, len(held) + len(new))):
            held, new = [], held + new
        self._cache.make_room(len(held) + len(new) + limit, held=len(held), seen=self._seen)
        end = self._cache.end(len(held), seen=self._seen) if held else None
        tokens = held + new if end is None else (held + new)[end.tokens :]
        if not tokens:
            raise InputError("the chat template leaves the message out: say something else, or begin a new session")
        if end is not None and pool_is_full(self._cache.plan, end.page, tokens, limit):
            held, new, tokens, end = [], held + new, held + new, None
        if save_to is not None:
            plan = self._cache.plan if held else self._cache.plan_for(len(new))
            as_claim(save_to).check_room(saved_size(plan, end, held=len(held), new=len(new), limit=limit))
        counts = dict(fed=len(tokens), logprobs=answer.logprobs, started=started)
        row = Row(self._tokenizer, answer.stop, self._model.config.eos_token_ids, held + new, limit, **counts)
        self._newest = None
        run = self._cache.enter(held, new, answer, seen=self._seen, progress=progress)
        self.token_ids, self.messages, self._newest, self._outdated = held + new, messages, row, False
        try:
            for piece in decode_row(row, run, self._cache.policy):
                self.token_ids += piece.token_ids
                if messages:
                    grow(messages[-1], piece)
                    self._outdated = self._outdated or row.holds_more
                yield piece
                if self._newest is not row and row.finish_reason is None:
                    raise InputError("the session has been asked something else since: this answer cannot continue")
        except BaseException:
            if self._newest is row and run.renewing:
                self._cache.empty()  # the next text is prefilled with all tokens so far
            elif self._newest is row:
                self.token_ids += run.unread_token(len(self.token_ids))
            raise

    @property
    def _seen(self) -> int:
        """Number of tokens in the cache; InputError if an interrupt left the cache incomplete."""
        if self._cache.run is None:
            return 0
        self._cache.run.check(len(self.token_ids))
        return self._cache.run.seen

    def save(self, path: str | Path | Claim) -> None:
        """Writes the session to the folder `path`, whole or not at all; it replaces a session that is there.

        Args:
            path: the folder, or the caller's claim on it (`files.atomic_folder.claim` with the mark `storage.ABOUT`).

        Raises:
            InputError: the session is empty, its cache policy is not registered, another process writes `path`, `path` is not
                a session, or it cannot be written. Files that were at `path` before are then kept.
        """
        if not self._seen:
            raise InputError("the session is empty: ask something before saving it")
        check_registered(self._cache.policy)
        fields = dict(context_length=self.context_length, tokens=len(self.token_ids), started=self.started)
        chat = dict(messages=self.messages, template_variables=self.template_variables, outdated=self._outdated)
        about = storage.SessionInfo(**fields, **chat, **self._cache.description())
        run, identity = self._cache.run, fingerprint(self._model, self._cache.policy, self._tokenizer)
        claimed = contextlib.nullcontext(path) if isinstance(path, Claim) else claim(as_path(path), mark=storage.ABOUT)
        with claimed as folder, folder.writing(private=True) as part:
            storage.write(part, identity, about, self.token_ids, run.state.cache, run.pool, plan=self._cache.plan)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: CausalLM,
        tokenizer: Any,
        *,
        cache: CachePolicy | None = None,
        context_length: int | None = None,
        device_memory: int | None = None,
        host_memory_limit: int | None = None,
    ) -> Session:
        """Returns the session saved at `path`.

        Args:
            cache: the cache policy that the session must have; None: any.
            context_length: None: the saved one. With another one a chat continues, which the next message prefills again.
            device_memory, host_memory_limit: as in `Session`.

        Raises:
            InputError: there is no session, it is damaged, or it was saved with another model, tokenizer or cache; the message
                names the difference.
        """
        stored = storage.open_session(as_path(path), model, tokenizer, cache if cache is None else checked_policy(cache))
        about, limits, length = stored.about, dict(host_memory_limit=host_memory_limit), stored.context_for(context_length)
        begun = None if length != about.context_length and about.moves else stored.policy
        session = cls(model, tokenizer, cache=begun, context_length=length, device_memory=device_memory, **limits)
        session.messages, session.started, session.template_variables = about.messages, about.started, about.template_variables
        if session.context_length != about.context_length:
            return session
        session._cache = TextCache(model, Choice(stored.policy, None, about.room), context_length=length, **limits)
        session._outdated, plan = about.outdated, session._cache.plan_for(about.first)
        session.token_ids, *arrays = stored.read(plan, vocab_size=model.config.vocab_size, **limits)
        session._cache.restore(plan, about.first, about.joints, *arrays)
        return session
