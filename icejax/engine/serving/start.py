"""The way of one prompt to its first token, piece by piece: a prefill, or a cached prefix and the text behind it.

The core makes one for the prompt that has just got its place, and advances it between decode steps of other rows.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from icejax.cache.pool import host_pool
from icejax.cache.protocol import KVCache, Lengths
from icejax.engine.batch import pages_used
from icejax.engine.decode.step import DecodeState, Step
from icejax.engine.extend import extend
from icejax.engine.first_token import choose_from
from icejax.engine.penalties import row_options
from icejax.engine.plan import Plan
from icejax.engine.prefill import prefill
from icejax.engine.sampling import Sampling, row_keys
from icejax.engine.serving.cropped import Cropped, whole
from icejax.engine.serving.prefixes import Entry
from icejax.engine.units.job import PrefillJob
from icejax.models.decoder import CausalLM
from icejax.runtime import devices

LOG = logging.getLogger(__name__)
PIECE = 512  # tokens of a text behind a cached prefix that are computed between two steps of other rows


@dataclasses.dataclass(frozen=True)
class Route:
    """How a prompt gets into a cache.

    Attributes:
        entry: the cached prefix; None: no prefix is stored.
        cuts: numbers of first tokens after which the cache is stored, in order; the last is the whole prompt's. None if the
            cached prefix is the whole prompt.
    """

    entry: Entry | None
    cuts: tuple[int, ...]


def pieces(start: int, stop: int) -> list[tuple[int, int]]:
    """Returns the beginnings and ends of the pieces in which the tokens from `start` to `stop` are computed."""
    return [(first, min(first + PIECE, stop)) for first in range(start, stop, PIECE)]


class RowStart:
    """A row on its way to its first token.

    Attributes:
        done: whether `result` is there.
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
        keep: Callable[[int, DecodeState, Step], None] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Prepares the row; nothing runs yet.

        Args:
            plan: the plan of a batch of one row.
            tokens: the whole prompt.
            table: i32[X], the row's extents in the pool; None without a pool.
            in_units: whether the prefill runs in units inside a layer; False: it is one piece.
            keep: called with the number of tokens in the cache, the row and its step, after each cut.
            progress: called with the number of layers done, where the prefill is one piece.
        """
        self._model, self._plan, self._tokens, self._route, self._table = model, plan, tokens, route, table
        self._sampling, self._draw, self._in_units = sampling, draw, in_units
        self._keep, self._progress = keep, progress
        self._pool: jax.Array | None = None
        self._result: tuple[DecodeState, Step] | None = None
        self._pieces = self._run()
        next(self._pieces)  # stops before the first piece

    @property
    def done(self) -> bool:
        """Whether all pieces have run."""
        return self._result is not None

    def advance(self, pool: jax.Array | None) -> jax.Array | None:
        """Runs the next piece and returns the pool, which it may donate."""
        self._pool = pool
        next(self._pieces, None)
        pool, self._pool = self._pool, None
        return pool

    def result(self) -> tuple[DecodeState, Step]:
        """Returns the row, and the step with its first token; called when done."""
        return self._result

    def _run(self) -> Iterator[None]:
        """Runs the pieces: a `yield` stands before every piece, and the code up to the next one is the piece."""
        entry, end, state, step = self._route.entry, 0, None, None
        if entry is not None:
            yield
            state, end = self._restored(entry), len(entry.tokens)
            LOG.info("%d of %d tokens are in the prefix store", end, len(self._tokens))
            if end == len(self._tokens):
                state, step = choose_from(jnp.asarray(entry.logits), state, self._plan)
        for cut in self._route.cuts:
            if state is not None:
                for start, stop in pieces(end, cut):
                    yield
                    tokens = self._tokens[start:stop]
                    state, step, self._pool = extend(self._model, tokens, self._plan, state, self._pool)
                    state = self._with_options(state, stop) if stop < cut else state
            elif self._in_units:
                table = None if self._table is None else self._table[None]
                options = dict(sampling=self._sampling, draw=self._draw)
                job = PrefillJob(self._model, self._tokens[:cut], self._plan, table, **options)
                while not job.done:
                    yield
                    self._pool = job.advance(self._pool)
                state, step = job.result()
            else:
                yield
                into = None if self._table is None else (self._pool, self._table[None])
                options = dict(sampling=[self._sampling], draws=[self._draw], progress=self._progress, into=into)
                state, step, self._pool = prefill(self._model, [self._tokens[:cut]], self._plan, **options)
            if self._keep is not None:
                self._keep(cut, state, step)
            if cut < len(self._tokens):
                state = self._with_options(self._before_text(state), cut)
            end = cut
        self._result = self._with_next_page(state, self._plan.prompt_pages), step

    def _before_text(self, state: DecodeState) -> DecodeState:
        """Returns a row whose later text goes to prompt pages, as the pages behind them are filled by new tokens."""
        return self._with_next_page(state, pages_used(state, self._plan)) if self._plan.pooled else state

    def _with_next_page(self, state: DecodeState, page: int) -> DecodeState:
        """Returns a row whose next page is `page`."""
        if not self._plan.pooled:
            return state
        # Committed to the device as the results of a step are, or the step would compile twice.
        next_page = jax.device_put(jnp.int32(page), devices.device())
        lengths = dataclasses.replace(state.cache.lengths, next_page=next_page)
        return dataclasses.replace(state, cache=dataclasses.replace(state.cache, lengths=lengths))

    def _restored(self, entry: Entry) -> DecodeState:
        """Returns the row of a cached prefix; the pages of its last extent, which is not full, are copied to the row's own."""
        last = entry.pages // host_pool.EXTENT
        is_copied = self._table is not None and entry.pages % host_pool.EXTENT and entry.table[last] != self._table[last]
        if is_copied:
            bits = host_pool.read_extent(self._pool, jnp.int32(entry.table[last]))
            self._pool = host_pool.write_extent(self._pool, bits, jnp.int32(self._table[last]))
        cache = jax.tree.map(whole, entry.cache, is_leaf=lambda x: isinstance(x, Cropped))
        layers = jax.device_put(cache, devices.device(), may_alias=False)
        table = None if self._table is None else jnp.asarray(self._table[None])
        tokens, zeros = jnp.asarray([len(entry.tokens)], jnp.int32), jnp.zeros(1, jnp.int32)
        cache = KVCache(layers, Lengths.of(tokens, entry.pages), table)
        # Draws count from the end of the prompt, as behind a prefill.
        state = DecodeState(cache, zeros, zeros > 0, row_keys([self._draw]), jnp.copy(tokens))
        return self._with_options(state, len(entry.tokens))

    def _with_options(self, state: DecodeState, tokens: int) -> DecodeState:
        """Returns a row of so many tokens with the request's key and options, for `extend` to draw the first token with."""
        sampling, penalties = row_options([self._sampling], [self._tokens[:tokens]], self._model.config.vocab_size)
        return dataclasses.replace(state, key=row_keys([self._draw]), sampling=sampling, penalties=penalties)
