"""RetroInfer (arXiv 2505.02922): attends to whole clusters of tokens exactly, and to more clusters by their means.

`--cache retroinfer`. Cluster scores are f32[B, K, G, P], the exactly attended slots are a `Selection`.
"""

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
    """RetroInfer: attends exactly to sinks, window and the clusters of largest weight, and to the next clusters by their means.

    There is a cluster for every 16 tokens. Clusters are ranked by the softmax of their mean keys' scores, summed over the query
    heads of a KV head. After the exactly attended clusters the next ones are estimated, a share `estimated` of all clusters,
    and the rest are left out. The authors' code attends exactly to 1.8% of the clusters; here to as many whole clusters as the
    budget holds. Their k-means begins with the middle token of every 16, unnormalised in the first round, and its last round
    is not limited to a stretch of 8,192 tokens. They attend to the whole of a text of less than 1,092 tokens, and cluster
    1,024 decoded tokens at a time; here every 16 tokens that leave the window are a cluster. They round the number of estimated
    clusters, here it is rounded up. Their recently used clusters stay on the device; here all are fetched.

    Attributes:
        budget: tokens attended exactly per KV head and layer, sinks and window included.
        sinks: first tokens kept on the device.
        window: newest tokens kept on the device, up to 15 fewer while a page of them fills.
        estimated: share of all clusters that are estimated by their means.
        iterations: rounds of k-means, each of which reassigns tokens and moves centroids.
        dense_layers: first layers that keep the full cache; None: 2 for models of 16 layers and more, else 0 (as in the
            authors' code).

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
    by_head = True

    @property
    def window_layout(self) -> Window:
        return Window(self.sinks, self.window, PAGE)

    @property
    def index(self) -> ClustersIndex:
        return ClustersIndex(PAGE, self.iterations)

    def find(self, heads: Heads, index: Clusters, view: View) -> Selection:
        scores = heads.scoring(products(heads.by_group().astype(jnp.float32), index.key.astype(jnp.float32)))
        scores = jnp.where(index.size[:, :, None] > 0, scores, -jnp.inf)
        wanted = self.num_fetched(index.count.shape[2])
        exact, estimated = self._ranked_clusters(scores, index, wanted)
        selected = slots_there(index.count, PAGE)
        selected &= jnp.take_along_axis(exact, jnp.where(selected, index.of_slots, 0), axis=2)
        ids, _, (counts,) = best(jnp.where(selected, 1.0, -jnp.inf), wanted, selected.astype(jnp.int32))
        # A mean weighs as much as all tokens of its cluster, so that log(size) is added to its score.
        scores = jnp.where(estimated[:, :, None], scores + jnp.log(index.size.astype(jnp.float32))[:, :, None], -jnp.inf)
        highest = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - jnp.where(jnp.isneginf(highest), 0.0, highest))
        total = weights.sum(-1, keepdims=True)
        means = (index.key if index.value is None else index.value)[..., : heads.v.shape[-1]].astype(jnp.float32)
        out = EINSUM("bkgp,bkph->bkgh", weights / jnp.maximum(total, 1e-30), means)
        return Selection(ids, counts, tail=Attended(out, (jnp.log(total) + highest)[..., 0]))

    def _ranked_clusters(
        self, scores: Float[Array, "B K G P"], index: Clusters, wanted: int
    ) -> tuple[Bool[Array, "B K P"], Bool[Array, "B K P"]]:
        """Returns the masks of the clusters to attend to exactly and of those to estimate.

        Of 4 clusters of 10, 8, 6 and 12 tokens, best first, wanted=20 takes the first two (18 tokens); with a share of 0.25 the
        third one is estimated.
        """
        # A row without clusters has weights of NaN, which the mask hides.
        exists, clusters = index.size > 0, index.size.shape[2]
        worth = jnp.where(exists, jax.nn.softmax(scores, axis=-1).sum(2), -jnp.inf)
        # A cluster has a token at least, so that at most `wanted` clusters are attended exactly.
        _, _, (sizes,) = best(worth, min(wanted, clusters), index.size)
        num_exact = ((jnp.cumsum(sizes, axis=2) <= wanted) & (sizes > 0)).sum(-1, dtype=jnp.int32)
        estimated = jnp.ceil(exists.sum(-1, dtype=jnp.float32) * self.estimated).astype(jnp.int32)
        limit = min(wanted + math.ceil(clusters * self.estimated) + 1, clusters)  # plus 1: rounding in fp32 may give one more
        exact = largest(worth, num_exact, most=min(wanted, clusters)) & exists
        exact_or_estimated = largest(worth, jnp.minimum(num_exact + estimated, limit), most=limit) & exists
        return exact, exact_or_estimated & ~exact
