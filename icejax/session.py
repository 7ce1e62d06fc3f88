"""A conversation whose cache is kept: a document is prefilled once and questioned for weeks."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from icejax import saved
from icejax.cache import Clustered, name_of
from icejax.cache.policy import CachePolicy
from icejax.errors import InputError
from icejax.folder import Claim, claim
from icejax.generation import MAX_NEW_TOKENS, GenerationResponse, Row, Run, check, join, still, stream
from icejax.identity import identity
from icejax.inference import DecodeState, Decoding, Step, extend, prefill
from icejax.models import CausalLM
from icejax.plan import SHORTEST, Plan, make_plan
from icejax.prompts import encode
from icejax.sampling import Sampling


class Session:
    """Texts and answers that follow one another in one cache of one row.

    The first text is prefilled. Later ones attend exactly to all tokens before them, which stay in the cache as they are:
    nothing is computed twice. A session that has been saved and loaded answers bit for bit as it would have.

    Attributes:
        token_ids: all tokens so far, the texts' and the answers'.
        messages: the chat so far, a role and a content each, where the caller keeps them.
        started: when the session began, in seconds since 1970.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Any,
        *,
        cache: CachePolicy | None = None,
        context_length: int | None = None,
        host_memory_limit: int | None = None,
    ) -> None:
        """Begins an empty session.

        Args:
            cache: the cache policy; None: `Clustered()`.
            context_length: tokens of all texts and answers together, for which host memory is taken; None: the model's own.
            host_memory_limit: bytes of it that may be taken; None: what is free.
        """
        self._model, self._tokenizer = model, tokenizer
        self._cache = Clustered() if cache is None else cache
        self._context_length = model.config.context_length if context_length is None else context_length
        self._limit = host_memory_limit
        self.token_ids: list[int] = []
        self.messages: list[dict[str, str]] = []
        self.started = time.time()
        self._first = 0  # tokens of the first text
        self._plan: Plan | None = None
        self._run: Run | None = None

    def ask(self, text: str, **options: Any) -> GenerationResponse:
        """Returns the whole answer to `text`; the options are those of `stream`."""
        return join(list(self.stream(text, **options)))

    def stream(
        self,
        text: str,
        *,
        sampling: Sampling | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        stop: Sequence[str] = (),
        seed: int = 0,
        special_tokens: bool = True,
    ) -> Iterator[GenerationResponse]:
        """Puts `text` behind all there is and yields the answer piece by piece.

        Args:
            special_tokens: whether the tokenizer adds its own, which it does before the first text only.

        Raises:
            InputError: the text is empty, or there is no room for it.
        """
        check(stop, max_new_tokens, seed)
        first, new = self._run is None, self._encode(text, special_tokens)
        pending = self.token_ids[self._seen :] + new
        room = self._context_length - len(self.token_ids) - len(new)
        if room < 1:
            raise InputError(
                f"the session holds {len(self.token_ids)} tokens and the text has {len(new)}: its context of "
                f"{self._context_length} is full; begin a new one, or one with a larger context_length"
            )
        started = time.perf_counter()
        if first:
            self._first = len(new)
            self._plan = self._plan_for(len(new), sampling)
            begun = prefill(self._model, [new], self._plan, seed=seed, host_memory_limit=self._limit)
            self._run = Run(Decoding(self._model, self._plan), *begun)
        else:
            self._extend(pending, sampling, seed)
        self.token_ids += new
        row = Row(self._tokenizer, stop, self._model.config.eos_token_ids, len(self.token_ids), min(max_new_tokens, room))
        fixed = still(self._model, self._cache, self._plan, self._run)
        for piece in stream([row], fixed, self._plan, self._run, started):
            self.token_ids += piece.token_ids
            yield piece

    def _encode(self, text: str, special_tokens: bool) -> list[int]:
        first = self._run is None
        if not first and self._tokenizer.bos_token:
            text = text.removeprefix(self._tokenizer.bos_token)  # a chat template begins every turn as if it were the first
        (new,) = encode(
            self._model, self._tokenizer, [text], special_tokens=special_tokens and first, context_length=self._context_length
        )
        return new

    @property
    def _seen(self) -> int:
        """Tokens in the cache."""
        return 0 if self._run is None else int(self._run.state.cache.lengths.seen[0])

    def _plan_for(self, tokens: int, sampling: Sampling | None) -> Plan:
        """Returns the plan of a session whose first text has so many tokens."""
        # Later texts come padded, and each begins a page anew: half as much again is kept free.
        new_tokens = max(0, self._context_length - tokens) * 3 // 2 + 2 * SHORTEST
        sampling = sampling or Sampling()
        return make_plan(self._model, self._cache, sampling, batch_size=1, prompt_tokens=tokens, new_tokens=new_tokens)

    def _extend(self, tokens: Sequence[int], sampling: Sampling | None, seed: int) -> None:
        run, plan = self._run, dataclasses.replace(self._plan, sampling=sampling or Sampling())
        if not plan.room_for(len(tokens), pages=int(run.state.cache.lengths.pages)):
            raise InputError("the session's pool of pages is full: begin a new one, or one with a larger context_length")
        state = dataclasses.replace(run.state, key=jax.random.key(seed), seen=None)
        if plan.sampling.needs_seen:
            seen = np.zeros((1, self._model.config.vocab_size), bool)
            seen[0, self.token_ids] = True
            state = dataclasses.replace(state, seen=jnp.asarray(seen))
        decoding = Decoding(self._model, plan)
        self._plan, self._run = plan, Run(decoding, *extend(self._model, tokens, plan, state, run.pool))

    def size_with(self, text: str, *, max_new_tokens: int = MAX_NEW_TOKENS, special_tokens: bool = True) -> int:
        """Returns the bytes that `save` will write, at most, once `text` has been answered; see `stream`."""
        new = len(self._encode(text, special_tokens))
        plan, pages = self._plan, 0
        if plan is None:
            plan = self._plan_for(new, None)
        else:
            pages, new = int(self._run.state.cache.lengths.pages), len(self.token_ids) - self._seen + new
        if plan.pooled:
            pages = min(plan.pool_shape[0], pages + (plan.padded(new) + max_new_tokens) // plan.page_size)
        return saved.size(plan, tokens=len(self.token_ids) + new + max_new_tokens, pages=pages)

    def save(self, path: str | Path | Claim) -> None:
        """Writes the session to the folder `path`, in place of one that is there; it appears whole or not at all.

        Args:
            path: the folder, or the claim on it that the caller holds (`icejax.folder.claim`, marked `saved.ABOUT`).

        Raises:
            InputError: nothing has been asked yet, the cache is not registered, another process writes `path`, or it is there
                and no session, or cannot be written: then what was there before is kept.
        """
        if self._run is None:
            raise InputError("the session is empty: ask something before saving it")
        if name_of(self._cache) is None:
            raise InputError(
                f"a session with a {type(self._cache).__name__} cache cannot be saved: register it in icejax.POLICIES"
            )
        cache = self._run.state.cache
        about = saved.About(
            context_length=self._context_length,
            first=self._first,
            tokens=len(self.token_ids),
            pages=int(cache.lengths.pages),
            started=self.started,
            messages=self.messages,
        )
        same = identity(self._model, self._cache)
        claimed = contextlib.nullcontext(path) if isinstance(path, Claim) else claim(Path(path), mark=saved.ABOUT)
        with claimed as held, held.writing() as part:
            saved.write(part, same, about, self.token_ids, cache, self._run.pool)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: CausalLM,
        tokenizer: Any,
        *,
        cache: CachePolicy | None = None,
        host_memory_limit: int | None = None,
    ) -> Session:
        """Returns the session saved at `path`.

        Args:
            cache: what the session's cache policy must be; None: whatever it is.
            host_memory_limit: as of a new session.

        Raises:
            InputError: there is none, it is damaged, or it was saved with another model or cache; the message names the
                difference.
        """
        found = saved.find(Path(path), model, cache)
        limits = dict(context_length=found.about.context_length, host_memory_limit=host_memory_limit)
        session = cls(model, tokenizer, cache=found.policy, **limits)
        session.messages, session.started, session._first = found.about.messages, found.about.started, found.about.first
        session._plan = plan = session._plan_for(session._first, None)
        session.token_ids, kept, pool = found.read(
            plan, vocab_size=model.config.vocab_size, host_memory_limit=host_memory_limit
        )
        none = jnp.zeros(1, jnp.int32)
        state = DecodeState(kept, none, none > 0, jax.random.key(0), None)
        session._run = Run(Decoding(model, plan), state, Step(jnp.stack([none] * 3), jnp.zeros((1, 1))), pool)
        return session
