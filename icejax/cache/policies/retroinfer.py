"""RetroInfer (arXiv 2505.02922): whole clusters of tokens exactly, and more of them by their means."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from icejax.cache.bases.retrieval import PAGE, Retrieval
from icejax.cache.bases.selection import Selection
from icejax.cache.bases.window import Window
from icejax.cache.index.base import slots_there
from icejax.cache.index.clusters import Clusters, ClustersIndex
from icejax.cache.protocol import Heads, View, check_dense_layers
from icejax.checks.numbers import integer, number
from icejax.ops.attention.dense import EINSUM, Attended, products
from icejax.ops.topk import best, largest


@dataclass(frozen=True)
class RetroInfer(Retrieval):
    """RetroInfer: sinks, window, the clusters of largest weight, and the next ones as if their tokens were at their means.

    There is a cluster for every 16 tokens. Clusters are ranked by the softmax of their mean keys' scores, summed over the query
    heads of a KV head; of those that follow on the ones attended exactly, a share of all is estimated, and the rest left out.
    In its code 1.8% of the clusters are attended exactly; here they are as many as the budget holds whole. There k-means begins
    at the middle of every 16 tokens, whose length counts in the first round, the last round looks beyond a stretch of 8,192, a
    text of less than 1,092 tokens is attended to whole, and of the decoded tokens 1,024 are clustered at once; here each 16
    that leave the window are a cluster. There the share that is estimated is rounded, here it is rounded up. There
    clusters that were asked for of late stay on the device; here all are fetched.

    Attributes:
        budget: tokens attended exactly per KV head and layer, sinks and window included.
        sinks: first tokens kept on the device.
        window: newest tokens kept on the device, up to 15 fewer while a page of them fills.
        estimated: share of the clusters that are estimated.
        iterations: rounds of k-means, in which tokens and centroids move.
        dense_layers: first layers that keep the full cache; None: 2 for models of 16 layers and more, else 0 (as in its code).

    Raises:
        InputError: an option is out of range.
    """

    budget: int = 256
    sinks: int = 4
    window: int = 64
    estimated: float = 0.232
    iterations: int = 10
    dense_layers: int | None = None

    def __post_init__(self) -> None:
        integer("sinks", self.sinks, least=0, most=2**20)
        integer("window", self.window, least=PAGE, most=2**20)
        integer("budget", self.budget, least=self.sinks + self.window + 1)
        number("estimated", self.estimated, least=0, most=1)
        integer("iterations", self.iterations, most=1000)
        check_dense_layers(self.dense_layers)

    page_size = PAGE
    by_slot = True

    @property
    def window_of(self) -> Window:
        return Window(self.sinks, self.window, PAGE)

    @property
    def index(self) -> ClustersIndex:
        return ClustersIndex(PAGE, self.iterations)

    def find(self, heads: Heads, index: Clusters, view: View) -> Selection:
        scores = heads.scoring(products(heads.by_group().astype(jnp.float32), index.key.astype(jnp.float32)))
        scores = jnp.where(index.size[:, :, None] > 0, scores, -jnp.inf)
        wanted = self.num_fetched(index.count.shape[2])
        exact, estimated = self._taken(scores, index, wanted)
        there = slots_there(index.count, PAGE)
        there &= jnp.take_along_axis(exact, jnp.where(there, index.of_slots, 0), axis=2)
        ids, _, (counts,) = best(jnp.where(there, 1.0, -jnp.inf), wanted, there.astype(jnp.int32))
        # A mean counts as often as its cluster has tokens.
        scores = jnp.where(estimated[:, :, None], scores + jnp.log(index.size.astype(jnp.float32))[:, :, None], -jnp.inf)
        highest = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - jnp.where(jnp.isneginf(highest), 0.0, highest))
        total = weights.sum(-1, keepdims=True)
        means = (index.key if index.value is None else index.value)[..., : heads.v.shape[-1]].astype(jnp.float32)
        out = EINSUM("bkgp,bkph->bkgh", weights / jnp.maximum(total, 1e-30), means)
        return Selection(ids, counts, tail=Attended(out, (jnp.log(total) + highest)[..., 0]))

    def _taken(
        self, scores: Float[Array, "B K G P"], index: Clusters, wanted: int
    ) -> tuple[Bool[Array, "B K P"], Bool[Array, "B K P"]]:
        """Returns the first clusters, as many as have no more than `wanted` tokens together, and those to be estimated."""
        # Without a cluster no weight means anything, and none is looked at.
        there, clusters = index.size > 0, index.size.shape[2]
        worth = jnp.where(there, jax.nn.softmax(scores, axis=-1).sum(2), -jnp.inf)
        # Each has a token at least, so that no more than `wanted` can be taken.
        _, _, (sizes,) = best(worth, min(wanted, clusters), index.size)
        taken = ((jnp.cumsum(sizes, axis=2) <= wanted) & (sizes > 0)).sum(-1, dtype=jnp.int32)
        estimated = jnp.ceil(there.sum(-1, dtype=jnp.float32) * self.estimated).astype(jnp.int32)
        most = min(wanted + math.ceil(clusters * self.estimated) + 1, clusters)  # one more, or rounding could pass it
        first = largest(worth, taken, most=min(wanted, clusters)) & there
        looked_at = largest(worth, jnp.minimum(taken + estimated, most), most=most) & there
        return first, looked_at & ~first
