"""A conversation whose cache is kept: a document is prefilled once and questioned for weeks."""

from __future__ import annotations

import dataclasses
import json
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from icejax.cache import POLICIES, Clustered, host
from icejax.cache.policy import CachePolicy, KVCache, Lengths
from icejax.checkpoint import orbax
from icejax.checkpoint.folder import writing
from icejax.errors import InputError
from icejax.generation import MAX_NEW_TOKENS, GenerationResponse, Row, Run, check, join, still, stream
from icejax.inference import DecodeState, Decoding, Step, extend, prefill, row_keys
from icejax.models import CausalLM
from icejax.plan import SHORTEST, Plan, make_plan
from icejax.prompts import check_context, encode
from icejax.sampling import Sampling

BLOCK = 512  # pages that are read back at once
ABOUT = "session.json"  # everything but the arrays
STATE, POOL = "state", "pool"


class Session:
    """Texts and answers that follow one another in one cache of one row.

    The first text is prefilled. Later ones attend exactly to all tokens before them, which stay in the cache as they are:
    nothing is computed twice. A session that has been saved and loaded answers bit for bit as it would have.

    Attributes:
        token_ids: all tokens so far, the texts' and the answers'.
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
        self._context_length = check_context(model, context_length)
        self._limit = host_memory_limit
        self.token_ids: list[int] = []
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
        stop: str | Sequence[str] = (),
        seed: int = 0,
        special_tokens: bool = True,
    ) -> Iterator[GenerationResponse]:
        """Puts `text` behind all there is and yields the answer piece by piece.

        Args:
            special_tokens: whether the tokenizer adds its own, which it does before the first text only.

        Raises:
            InputError: the text is empty, there is no room for it, or the logits are not finite.
        """
        stop = check(stop, max_new_tokens, seed)
        first = self._run is None
        if not first and self._tokenizer.bos_token:
            text = text.removeprefix(self._tokenizer.bos_token)  # a chat template begins every turn as if it were the first
        (new,) = encode(
            self._model, self._tokenizer, [text], special_tokens=special_tokens and first, context_length=self._context_length
        )
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
        row = Row(self._tokenizer, stop, self._model.config.eos_token_ids, self.token_ids, min(max_new_tokens, room))
        fixed = still(self._model, self._cache, self._plan, self._run)
        for piece in stream([row], fixed, self._run, started):
            self.token_ids += piece.token_ids
            yield piece

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
        state = dataclasses.replace(run.state, key=row_keys(seed, 1), seen=None)
        if plan.sampling.needs_seen:
            seen = np.zeros((1, self._model.config.vocab_size), bool)
            seen[0, self.token_ids] = True
            state = dataclasses.replace(state, seen=jnp.asarray(seen))
        decoding = Decoding(self._model, plan)
        self._plan, self._run = plan, Run(decoding, *extend(self._model, tokens, plan, state, run.pool))

    def save(self, path: str | Path) -> None:
        """Writes the session to the folder `path`, in place of one that is there; it appears whole or not at all.

        Raises:
            InputError: nothing has been asked yet, or `path` is there and no session.
        """
        if self._run is None:
            raise InputError("the session is empty: ask something before saving it")
        cache, pool = self._run.state.cache, self._run.pool
        about = dict(
            identity=_identity(self._model, self._cache),
            context_length=self._context_length,
            first=self._first,
            token_ids=self.token_ids,
        )
        with writing(Path(path), force=True, mark=ABOUT) as part:
            (part / ABOUT).write_text(json.dumps(about))
            orbax.save(part / STATE, _leaves(cache))
            if pool is not None:
                orbax.save(part / POOL, {"pages": np.asarray(pool)[: int(cache.lengths.pages)]})

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
            InputError: there is none, or it was saved with another model or cache; the message names the difference.
        """
        path = Path(path)
        try:
            about = json.loads((path / ABOUT).read_text())
            saved = about["identity"]
            options = {key.removeprefix("cache."): value for key, value in saved.items() if key.startswith("cache.")}
            kind = POLICIES[options.pop("name")]
            unknown = sorted(options.keys() - {field.name for field in dataclasses.fields(kind)})
            policy = None if unknown else kind(**options)
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"{path} is no session: expected a folder that Session.save or --session wrote") from None
        if unknown:
            raise InputError(
                f"{path} was saved with cache.{unknown[0]} = {options[unknown[0]]}, which this version has not: "
                "use the version that saved it, or another folder"
            )
        for key, here in _identity(model, policy if cache is None else cache).items():
            if saved.get(key) != here:
                raise InputError(
                    f"{path} was saved with {key} = {saved.get(key)}, here it is {here}: use the same, or another folder"
                )
        limits = dict(context_length=about["context_length"], host_memory_limit=host_memory_limit)
        session = cls(model, tokenizer, cache=policy, **limits)
        session.token_ids, session._first = about["token_ids"], about["first"]
        session._plan = plan = session._plan_for(session._first, None)
        empty = jax.eval_shape(lambda: KVCache(tuple(p.init(plan.spec) for p in plan.policies), _no_tokens()))
        found = orbax.read(path / STATE, {name: x.shape for name, x in _leaves(empty).items()})
        kept = jax.tree.unflatten(
            jax.tree.structure(empty),
            [found[name] if x.size else jnp.zeros(x.shape, x.dtype) for name, x in _leaves(empty, of_size=False).items()],
        )
        pool = None
        if plan.pool_shape is not None:
            pool = host.allocate(plan.pool_shape, plan.pool_dtype, limit=host_memory_limit)
            shape = (int(kept.lengths.pages), *plan.pool_shape[1:])
            pages = orbax.read(path / POOL, {"pages": shape}, device=jax.devices("cpu")[0])["pages"]
            for first in range(0, shape[0], BLOCK):
                pool = host.write_pages(pool, np.asarray(pages[first : first + BLOCK]), jnp.int32(first))
        none = jnp.zeros(1, jnp.int32)
        state = DecodeState(kept, none, none > 0, row_keys(0, 1), None)
        session._run = Run(Decoding(model, plan), state, Step(jnp.stack([none] * 4), jnp.zeros((1, 1))), pool)
        return session


def _no_tokens() -> Lengths:
    return Lengths(jnp.zeros(1, jnp.int32), jnp.int32(0), jnp.int32(0))


def _leaves(tree: Any, *, of_size: bool = True) -> dict[str, Any]:
    """Returns the leaves of a pytree under the names of their paths, by default only those that are not empty."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path).strip("."): leaf for path, leaf in named if leaf.size or not of_size}


def _identity(model: CausalLM, cache: CachePolicy) -> dict[str, Any]:
    """Returns what must be the same for a saved cache to go on: the model's config, its weights and the cache's options."""
    config = {f"config.{key}": value for key, value in dataclasses.asdict(model.config).items()}
    options = {f"cache.{key}": value for key, value in dataclasses.asdict(cache).items()}
    weights = 0
    for leaf in jax.tree.leaves(nnx.state(model)):  # a piece of each tells one checkpoint from another
        weights = zlib.crc32(np.asarray(leaf.reshape(-1)[:1024]).tobytes(), weights)
    name = {"cache.name": type(cache).__name__.lower()}
    found = config | {"dtype": model.dtype, "weights": weights} | name | options
    return json.loads(json.dumps(found, default=str))  # as it is read back
