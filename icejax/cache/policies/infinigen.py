"""InfiniGen (arXiv 2406.19707): single tokens selected by scores in the few directions in which queries are largest.

`--cache infinigen`. Keys in these directions are [B, K, P, p, d], scores f32[B, K, G, S].
"""

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
    """InfiniGen: every query head attends to the window and to its best tokens, by scores in a few directions.

    The directions are the singular vectors of a KV head's prompt queries in which these are largest. A step takes as many
    tokens as have a score within `alpha` of the highest: their mean number over a layer's query heads, rounded down. With
    `prefetch` tokens are selected by queries guessed from the input of the layer before, so that they can be fetched while that
    layer runs; the authors' code always guesses.

    The authors' code rotates the weights of queries and keys to these directions beforehand, per query head and by a sample of
    text; here weights stay as they are, and the queries of a row's first text determine the directions. For OPT their code
    chooses channels by the prompt; for Llama they are fixed. Their guess uses the input of the previous layer's attention, and
    they take one number of tokens for all heads of a batch; here the guessed input is normalised as the layer's own input is,
    and each row has its own number. `alpha` counts from a query head's own highest score, as in their code for speed; in their
    code for quality it counts from the first head's for all heads. They cap the number at 400 tokens or a fifth of the text,
    here the budget caps it. Their window is the newest token alone, so that their highest score is over all tokens; here it is
    over the tokens in pages. In their code tokens leave host memory when it is full, and the first two layers are dense.

    Attributes:
        budget: most tokens attended exactly per query head and layer, window included.
        ratio: number of directions, as a share of the channels.
        alpha: largest distance to the highest score at which a token still counts.
        prefetch: whether guessed queries select tokens, except in the first layer; the bundled model's layers differ too much.
        dense_layers: first layers that keep the full cache; None: 2 for models of 16 layers and more (as in the authors'
            code), else 0.

    Raises:
        InputError: an option is out of range.
    """

    budget: int = 256
    ratio: float = 0.2
    alpha: float = 5.0
    prefetch: bool = False
    dense_layers: int | None = None

    def __post_init__(self) -> None:
        integer("budget", self.budget, least=self.window_layout.slots + 1)
        number("ratio", self.ratio, least=0, most=1, above=True)
        number("alpha", self.alpha, least=0, most=1e9)
        if not isinstance(self.prefetch, bool):
            raise InputError(f"prefetch must be true or false, got {quoted(self.prefetch)}")
        check_dense_layers(self.dense_layers)

    page_size = PAGE
    by_slot = True
    per_query_head = True

    @property
    def window_layout(self) -> Window:
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
        filled = slots_there(index.count, PAGE)[:, :, None]
        scores = jnp.where(filled, heads.scoring(EINSUM("bkgd,bksd->bkgs", q, codes)), -jnp.inf)
        close = filled & (scores > scores.max(-1, keepdims=True) - self.alpha)
        wanted = self.num_fetched(index.count.shape[2])
        num_close = jnp.floor(close.sum(-1, dtype=jnp.float32).mean((1, 2))).astype(jnp.int32)
        num_taken = jnp.minimum(num_close, wanted)
        room = jnp.broadcast_to(num_taken[:, None, None], scores.shape[:3])
        counts = jnp.broadcast_to(filled, scores.shape).astype(jnp.int32)
        ids, selected, (counts,) = best(scores, wanted, counts, room=room)
        within = jnp.arange(wanted)[None] < num_taken[:, None]
        return of_query_heads(ids, jnp.where(within[:, None, None], counts, 0), selected)
