"""The way of one prompt to its first token, piece by piece: a prefill, or a cached prefix and the text after it.

The core makes one for the prompt that has just got its place, and advances it between decode steps of other rows.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from icejax.cache.pool import host_pool
from icejax.cache.pool.host_pool import Pool
from icejax.cache.protocol import KVCache, Lengths
from icejax.checks.errors import InputError
from icejax.engine.batch import pages_used
from icejax.engine.decode.attention_map import AttentionMap
from icejax.engine.decode.state import DecodeState, Step, decode_cuts
from icejax.engine.extend import ExtendJob
from icejax.engine.first_token import choose_from
from icejax.engine.penalties import row_options
from icejax.engine.plan import Plan
from icejax.engine.prefill import prefill
from icejax.engine.sampling import Sampling, row_keys
from icejax.engine.serving.cropped import layers_in
from icejax.engine.serving.prefix_cache import PrefixCache
from icejax.engine.serving.prefix_folder import LOGITS, StoredPrefix
from icejax.engine.serving.prefixes import Entry
from icejax.engine.serving.prompt_logprobs import prompt_logprobs
from icejax.engine.serving.route import Route, pieces
from icejax.engine.snapshot.row_arrays import pages_in, saved_extents
from icejax.engine.units.job import PrefillJob
from icejax.models.decoder import CausalLM
from icejax.runtime.mesh import home, placed

LOG = logging.getLogger(__name__)


class HasPool(Protocol):
    """What holds the pool between two pieces of work."""

    pool: Pool | None


class RowStart:
    """A row on its way to its first token.

    Attributes:
        done: whether `result` is there.
        cached: number of tokens that came from the prefix store.
        prompt_logprobs: one entry per prompt token but the first; None unless requested.
        attention: where the tokens of the prompt are, for the steps to come; None unless requested.
    """

    def __init__(
        self,
        model: CausalLM,
        plan: Plan,
        tokens: Sequence[int],
        route: Route,
        table: np.ndarray | None,
        *,
        sampling: Sampling,
        draw: tuple[int, int],
        in_units: bool,
        prefixes: PrefixCache | None = None,
        salt: str | None = None,
        progress: Callable[[int], None] | None = None,
        logprobs: int | None = None,
        tokenizer: Any = None,
        explain: bool = False,
    ) -> None:
        """Prepares the row; nothing runs yet.

        Args:
            plan: the plan of a batch of one row.
            tokens: the whole prompt.
            table: i32[X], the row's extents in the pool; None without a pool.
            in_units: whether the prefill runs in units inside a layer; False: it is one piece.
            prefixes: the prefix store.
            salt: salt of the entries that the row leaves in the store; None: it leaves none.
            progress: called with the number of layers done, where the prefill is one piece.
            logprobs: most likely tokens to report with each prompt token, which uses no cached prefix; None: none.
            tokenizer: names these tokens.
            explain: whether to make `attention`, which uses no cached prefix.
        """
        self._model, self._plan, self._tokens, self._route, self._table = model, plan, tokens, route, table
        self._sampling, self._draw, self._in_units = sampling, draw, in_units
        self._prefixes, self._salt, self._progress, self.cached = prefixes, salt, progress, 0
        self._logprobs, self._tokenizer, self.prompt_logprobs = logprobs, tokenizer, None
        self._explain, self.attention = explain, None
        self._pool: Pool | None = None
        self._result: tuple[DecodeState, Step] | None = None
        self._pieces = self._run()
        next(self._pieces)  # stops before the first piece

    @property
    def done(self) -> bool:
        """Whether all pieces have run."""
        return self._result is not None

    def advance(self, holder: HasPool) -> None:
        """Runs the next piece, which may donate the holder's pool; InputError: the tokenizer fails, and the pool is whole."""
        self._pool, holder.pool = holder.pool, None
        try:
            next(self._pieces, None)
        finally:
            holder.pool, self._pool = self._pool, None

    def close(self) -> None:
        """Ends the row before its first token: open files are closed, and half-written ones removed."""
        self._pieces.close()

    def result(self) -> tuple[DecodeState, Step]:
        """Returns the row, and the step with its first token; called when done."""
        return self._result

    def _run(self) -> Iterator[None]:
        """Runs the pieces: a `yield` comes before every piece, and the code up to the next one is the piece."""
        entry, cuts, state, step, kept = self._route.entry, self._route.cuts, None, None, None
        if isinstance(entry, StoredPrefix):
            loaded = yield from self._loaded(entry)
            if loaded is None:
                entry, cuts = None, (len(self._tokens),)
            else:
                state, logits = loaded
        elif entry is not None:
            yield
            if self._route.held == entry.length:
                entry.followers += bool(cuts)
                yield from self._to_disk(entry)
            state, logits = self._restored(entry), jnp.asarray(entry.logits)
        if entry is not None:
            self.cached = self._route.held
            LOG.info("%d of %d tokens are in the prefix store", self.cached, len(self._tokens))
            if not cuts:
                state, step = choose_from(logits, state, self._plan)
        end = self.cached
        for cut in cuts:
            if state is not None:
                for start, stop in pieces(end, cut):
                    job = ExtendJob(self._model, self._tokens[start:stop], self._plan, state)
                    while not job.done:
                        yield
                        self._pool = job.advance(self._pool)
                        job.hidden.block_until_ready()  # what still runs would delay the next step
                    state, step = job.result()
                    step.logits.block_until_ready()
                    state = self._with_options(state, stop) if stop < cut else state
            elif self._in_units or self._logprobs is not None or self._explain:
                table = None if self._table is None else self._table[None]
                options = dict(sampling=self._sampling, draw=self._draw)
                job = PrefillJob(self._model, self._tokens[:cut], self._plan, table, locate=self._explain, **options)
                while not job.done:
                    yield
                    self._pool = job.advance(self._pool)
                if self._logprobs is not None:
                    scored = prompt_logprobs(self._model, job.hidden, self._tokens, self._logprobs, tokenizer=self._tokenizer)
                    self.prompt_logprobs = tuple((yield from scored))
                if self._explain:
                    self.attention = AttentionMap(job.positions, len(self._tokens), renewal=self._plan.renewal)
                state, step = job.result()
            else:
                yield
                into = None if self._table is None else (self._pool, self._table[None])
                options = dict(sampling=[self._sampling], draws=[self._draw], progress=self._progress, into=into)
                state, step, self._pool = prefill(self._model, [self._tokens[:cut]], self._plan, **options)
            yield from self._to_disk(kept := self._keep(cut, state, step.logits, before=kept))
            if cut < len(self._tokens):
                state = self._with_options(self._before_text(state), cut)
            end = cut
        self._result = self._with_next_page(state, self._plan.prompt_pages), step

    def _loaded(self, stored: StoredPrefix) -> Generator[None, None, tuple[DecodeState, jax.Array] | None]:
        """Reads a cached prefix from the disk in pieces; returns the row and its logits, or None if it cannot be read."""
        folder, leaves = self._prefixes.folder, []
        yield
        try:
            with folder.open(stored) as arrays:
                logits = jnp.asarray(arrays.read(LOGITS))
                for leaf in folder.leaves(arrays):
                    leaves.append(leaf)
                    yield
                if self._table is not None:
                    for (name, _), extent in zip(saved_extents(stored.pages), self._table, strict=False):
                        self._pool = pages_in(self._pool, extent, name, arrays.read, plan=self._plan)
                        yield
        except (InputError, OSError) as error:
            folder.forget(stored, error)
            return None
        layers = folder.layers(leaves)
        state = self._row_of(layers, stored.length, stored.pages)
        self._keep(stored.length, state, logits, layers=layers, followers=2)  # or it would not be on the disk
        return state, logits

    def _keep(self, count: int, state: DecodeState, logits: jax.Array, **options: Any) -> Entry | None:
        """Puts the cache of the first `count` tokens into the store; returns its entry, or None.

        Args:
            options: options of `PrefixCache.keep`.
        """
        if self._salt is None:
            return None
        route = self._route
        options = dict(followers=(count < len(self._tokens)) + (count <= route.shared)) | options
        options |= dict(behind=route.entry if isinstance(route.entry, Entry) else None)
        return self._prefixes.keep(self._tokens, self._salt, count, state, logits, **options)

    def _to_disk(self, entry: Entry | None) -> Iterator[None]:
        """Writes an entry to the disk in pieces, if it belongs there."""
        if entry is not None:
            for _ in self._prefixes.to_disk(entry, lambda: self._pool):
                yield

    def _before_text(self, state: DecodeState) -> DecodeState:
        """Returns a row whose later text goes to prompt pages, as the pages after them are filled by new tokens."""
        return self._with_next_page(state, pages_used(state, self._plan)) if self._plan.pooled else state

    def _with_next_page(self, state: DecodeState, page: int) -> DecodeState:
        """Returns a row whose next page is `page`."""
        if not self._plan.pooled:
            return state
        # Committed to the device as the results of a step are, or the step would compile twice.
        next_page = jax.device_put(jnp.int32(page), home(self._plan.mesh))
        lengths = dataclasses.replace(state.cache.lengths, next_page=next_page)
        return dataclasses.replace(state, cache=dataclasses.replace(state.cache, lengths=lengths))

    def _restored(self, entry: Entry) -> DecodeState:
        """Returns the row of a cached prefix; the pages of its last extent, which is not full, are copied to the row's own."""
        last = entry.pages // host_pool.EXTENT
        is_copied = self._table is not None and entry.pages % host_pool.EXTENT and entry.table[last] != self._table[last]
        if is_copied:
            mesh = self._plan.mesh
            bits = host_pool.read_extent(self._pool, jnp.int32(entry.table[last]), mesh=mesh)
            self._pool = host_pool.write_extent(self._pool, bits, jnp.int32(self._table[last]), mesh=mesh)
        return self._row_of(entry.cache, entry.length, entry.pages)

    def _row_of(self, layers: tuple[Any, ...], length: int, pages: int) -> DecodeState:
        """Returns the row whose cache has these layers, cropped, and so many pages; it begins with the route's tokens.

        Args:
            length: the tokens of the cached prefix.
        """
        tokens, layers = self._route.held, layers_in(layers, self._plan)
        table = None if self._table is None else jnp.asarray(self._table[None])
        counts, zeros = jnp.asarray([tokens], jnp.int32), jnp.zeros(1, jnp.int32)
        if tokens < length:  # no array may be part of the row twice, since a step donates all
            pairs = zip(self._plan.policies, layers, strict=True)
            layers = tuple(policy.trimmed(layer, jnp.copy(counts), jnp.int32(0)) for policy, layer in pairs)
        cache = KVCache(layers, Lengths.of(counts, pages), table)
        # Draws count from the end of the prompt, as after a prefill.
        state = DecodeState(cache, zeros, zeros > 0, row_keys([self._draw]), jnp.copy(counts))
        return self._with_options(state, tokens)

    def _with_options(self, state: DecodeState, tokens: int) -> DecodeState:
        """Returns a row of so many tokens with the request's key and options, for `extend` to draw the first token with."""
        sampling, penalties = row_options([self._sampling], [self._tokens[:tokens]], self._model.config.vocab_size)
        state = dataclasses.replace(state, key=row_keys([self._draw]), sampling=sampling, penalties=penalties)
        # As the state after a prefill is, or what takes it compiles twice.
        return placed(self._plan.mesh, state, decode_cuts(self._plan))
