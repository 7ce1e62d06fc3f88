"""InfiniGen (arXiv 2406.19707): tokens chosen one by one, by products in the directions that matter most to the queries."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp

from icejax.cache.bases.retrieval import PAGE, PagedState, Retrieval
from icejax.cache.bases.selection import Selection, of_query_heads
from icejax.cache.bases.window import Window
from icejax.cache.index.base import slots_there
from icejax.cache.index.partial_keys import Partial, PartialIndex, directions_of
from icejax.cache.protocol import Heads, Outcome, View, check_dense_layers
from icejax.checks.errors import InputError, quoted
from icejax.checks.numbers import integer, number
from icejax.ops.attention.dense import EINSUM, Attended
from icejax.ops.topk import best


@dataclass(frozen=True)
class InfiniGen(Retrieval):
    """InfiniGen: every query head attends to the window and to its best tokens, by scores of a part of queries and keys.

    That part are a few directions: of the singular vectors of a KV head's queries in the prompt those in which they have most.
    How many tokens a step takes is the number whose score comes within `alpha` of the highest, mean over the query heads of a
    layer, and rounded down. With `prefetch` the queries that choose are a guess, of the input of the layer before, so that
    tokens can be on their way while that layer runs; its code always guesses.

    In its code weights of queries and keys are turned to these directions beforehand, for each query head and by a sample of
    text; here no weight is touched and the queries of a row's first text say them. There channels are chosen for OPT by the
    prompt; for Llama they are fixed. The guess is of what enters the attention of the layer before, and all heads of a batch
    count as one; here it is normed as the layer's own input is, and each row has its number. A query head counts from its own
    highest score, as in its code for speed; that for quality has all of them count from the first head's. There the number is
    capped at 400 tokens or a fifth of the text, here by the budget; there is no window but the newest token, so that the
    highest score is of all tokens and here of those in pages; tokens leave the host memory when it is full, and the first two
    layers are dense.

    Attributes:
        budget: tokens attended exactly per query head and layer at most, window included.
        ratio: how many directions there are, of as many as channels.
        alpha: by how much a score may lie below the highest one and count.
        prefetch: whether a guess of the queries chooses, but in the first layer; the bundled model's layers share too little.
        dense_layers: first layers that keep the full cache; None: 2 for models of 16 layers and more (as in its code), else 0.

    Raises:
        InputError: an option is out of range.
    """

    budget: int = 256
    ratio: float = 0.2
    alpha: float = 5.0
    prefetch: bool = False
    dense_layers: int | None = None

    def __post_init__(self) -> None:
        integer("budget", self.budget, least=self.window_of.slots + 1)
        number("ratio", self.ratio, least=0, most=1, above=True)
        number("alpha", self.alpha, least=0, most=1e9)
        if not isinstance(self.prefetch, bool):
            raise InputError(f"prefetch must be true or false, got {quoted(self.prefetch)}")
        check_dense_layers(self.dense_layers)

    page_size = PAGE
    by_slot = True
    per_query_head = True

    @property
    def window_of(self) -> Window:
        return Window(0, PAGE + 1, PAGE)

    @property
    def index(self) -> PartialIndex:
        return PartialIndex(PAGE, self.ratio)

    def prefill(self, state: PagedState, heads: Heads, attended: Attended, view: View) -> Outcome:
        batch, tokens, kv_heads, size = heads.k.shape
        queries = heads.q.reshape(batch, tokens, kv_heads, -1, size)
        directions = directions_of(queries, heads.lengths, count=state.index.directions.shape[3])
        return super().prefill(replace(state, index=replace(state.index, directions=directions)), heads, attended, view)

    def find(self, heads: Heads, index: Partial, view: View) -> Selection:
        if self.prefetch and view.guess is not None:
            heads = replace(heads, q=view.guess())
        q = EINSUM("bkgh,bkhd->bkgd", heads.by_group().astype(jnp.float32), index.directions)
        codes = index.codes.reshape(*q.shape[:2], -1, q.shape[3]).astype(jnp.float32)
        there = slots_there(index.count, PAGE)[:, :, None]
        scores = jnp.where(there, heads.scoring(EINSUM("bkgd,bksd->bkgs", q, codes)), -jnp.inf)
        close = there & (scores > scores.max(-1, keepdims=True) - self.alpha)
        wanted = self.num_fetched(index.count.shape[2])
        near = jnp.floor(close.sum(-1, dtype=jnp.float32).mean((1, 2))).astype(jnp.int32)
        several = jnp.minimum(near, wanted)
        room = jnp.broadcast_to(several[:, None, None], scores.shape[:3])
        counts = jnp.broadcast_to(there, scores.shape).astype(jnp.int32)
        ids, which, (counts,) = best(scores, wanted, counts, room=room)
        within = jnp.arange(wanted)[None] < several[:, None]
        return of_query_heads(ids, jnp.where(within[:, None, None], counts, 0), which)
