"""ClusterKV (arXiv 2412.03213): tokens selected by whole clusters of keys with similar directions (`--cache clusterkv`).

Cluster scores are f32[B, K, G, S], one per slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from icejax.cache.bases.retrieval import PAGE, Retrieval
from icejax.cache.bases.selection import Selection, of_query_heads
from icejax.cache.bases.window import Window
from icejax.cache.index.base import slots_there
from icejax.cache.index.product_codes import ProductCodes, ProductCodesIndex, approximate
from icejax.cache.protocol import Heads, View, check_dense_layers
from icejax.checks.numbers import integer
from icejax.ops.topk import best


@dataclass(frozen=True)
class ClusterKV(Retrieval):
    """ClusterKV: every query head attends to the clusters whose centroids have the largest products with its query.

    A query attends to whole clusters until the budget is used, and to the first tokens of the last one. Clusters are made of a
    row's first text without its sinks. Later tokens join the nearest cluster, so a short first text leaves few clusters for all
    later tokens. In the authors' code k-means begins at random, a text shorter than the budget is attended to whole, decoded
    tokens come on top of the budget, and the faster version makes 8 clusters of every 320 decoded tokens. The tokens of their
    last step stay on the device; here all are fetched.

    Attributes:
        budget: tokens attended exactly per query head and layer, sinks and a window of up to 16 decoded tokens included.
        sinks: first tokens kept on the device.
        clusters: clusters of a KV head's keys.
        iterations: rounds of k-means, each of which reassigns tokens and moves centroids.
        dense_layers: first layers that keep the full cache; None: 2 for models of 16 layers and more (as in the authors'
            code), else 0.

    Raises:
        InputError: an option is out of range.
    """

    budget: int = 256
    sinks: int = 16
    clusters: int = 400
    iterations: int = 20
    dense_layers: int | None = None

    def __post_init__(self) -> None:
        integer("sinks", self.sinks, least=0, most=2**20)
        integer("budget", self.budget, least=self.sinks + PAGE + 1)
        integer("clusters", self.clusters, most=2**16)
        integer("iterations", self.iterations, least=0, most=1000)
        check_dense_layers(self.dense_layers)

    page_size = PAGE
    by_slot = True
    per_query_head = True

    @property
    def window_layout(self) -> Window:
        return Window(self.sinks, PAGE, PAGE)  # the window is empty after a text

    @property
    def index(self) -> ProductCodesIndex:
        return ProductCodesIndex(PAGE, 1, self.clusters, self.iterations, cosine=True)

    def find(self, heads: Heads, index: ProductCodes, view: View) -> Selection:
        # Tokens of a cluster have one score, so that the best tokens are whole clusters and the earliest tokens of the last.
        filled = slots_there(index.count, PAGE)[:, :, None]
        worth = jnp.where(filled, approximate(heads.by_group(), index), -jnp.inf)
        counts = jnp.broadcast_to(filled, worth.shape).astype(jnp.int32)
        ids, selected, (counts,) = best(worth, self.num_fetched(index.count.shape[2]), counts)
        return of_query_heads(ids, counts, selected)
