"""ClusterKV (arXiv 2412.03213): tokens chosen by whole clusters of keys of a like direction."""

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
    """ClusterKV: every query head attends to the clusters whose centroids have the largest products with it.

    Whole clusters are taken until the budget is used, of the last one the first tokens. Clusters are of a row's first text,
    less its sinks; later tokens join the nearest, so that a short first text leaves few clusters for all that follows. In its
    code k-means begins at random, what is shorter than the budget is attended to whole, decoded tokens are attended to besides
    the budget, and the faster form of it makes 8 clusters of every 320 of them. Its tokens of the last step stay on the device;
    here all are fetched.

    Attributes:
        budget: tokens attended exactly per query head and layer, sinks and a window of up to 16 decoded tokens included.
        sinks: first tokens kept on the device.
        clusters: of the keys of a KV head.
        iterations: rounds of k-means, in which tokens and centroids move.
        dense_layers: first layers that keep the full cache; None: 2 for models of 16 layers and more (as in its code), else 0.

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
    def window_of(self) -> Window:
        return Window(self.sinks, PAGE, PAGE)  # a text leaves nothing in it

    @property
    def index(self) -> ProductCodesIndex:
        return ProductCodesIndex(PAGE, 1, self.clusters, self.iterations, cosine=True)

    def find(self, heads: Heads, index: ProductCodes, view: View) -> Selection:
        # A token is worth what its cluster is: the best are whole clusters, and of the last one the earliest tokens.
        there = slots_there(index.count, PAGE)[:, :, None]
        worth = jnp.where(there, approximate(heads.by_group(), index), -jnp.inf)
        counts = jnp.broadcast_to(there, worth.shape).astype(jnp.int32)
        ids, which, (counts,) = best(worth, self.num_fetched(index.count.shape[2]), counts)
        return of_query_heads(ids, counts, which)
