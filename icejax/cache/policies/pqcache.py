"""PQCache (arXiv 2407.12820): tokens chosen one by one, by products with their keys as product quantization has them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from icejax.cache.bases.retrieval import PAGE, Retrieval
from icejax.cache.bases.selection import Selection
from icejax.cache.bases.window import Window
from icejax.cache.index.base import slots_there
from icejax.cache.index.product_codes import ProductCodes, ProductCodesIndex, approximate
from icejax.cache.protocol import Heads, View, check_dense_layers
from icejax.cache.sizes import CacheSpec, PoolSpec
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer
from icejax.ops.topk import best


@dataclass(frozen=True)
class PQCache(Retrieval):
    """PQCache: sinks, window, and the tokens whose approximate keys have most of a KV head's approximate attention.

    A key is cut into parts, and each part is taken for the nearest of its centroids, which k-means makes of a row's first text.
    In its code k-means sees the tokens of the window too, begins at random tokens and has as many iterations as there is time
    for; sizes are shares of the prompt, half of it window, and no layer is dense. There codes are in host memory and come
    to the device in every step, where the tokens asked for most of late stay; here codes are on the device, and all chosen
    tokens are fetched.

    Attributes:
        budget: tokens attended exactly per KV head and layer, sinks and window included.
        sinks: first tokens kept on the device.
        window: newest tokens kept on the device, up to 15 fewer while a page of them fills; None: half of the budget beside the
            sinks, but at least 17.
        parts: parts of a key.
        bits: of a part's code: it has 2^bits centroids.
        iterations: rounds of k-means, in which tokens and centroids move.
        dense_layers: first layers that keep the full cache; None: 2 for models of 16 layers and more, else 0.

    Raises:
        InputError: an option is out of range, or a key cannot be cut into so many parts.
    """

    budget: int = 256
    sinks: int = 32
    window: int | None = None
    parts: int = 2
    bits: int = 6
    iterations: int = 10
    dense_layers: int | None = None

    def __post_init__(self) -> None:
        integer("sinks", self.sinks, least=0, most=2**20)
        if self.window is not None:
            integer("window", self.window, least=PAGE + 1, most=2**20)
        integer("budget", self.budget, least=self.sinks + (self.window or PAGE + 1) + 1)
        integer("parts", self.parts, most=1024)
        integer("bits", self.bits, most=12)
        integer("iterations", self.iterations, least=0, most=1000)
        check_dense_layers(self.dense_layers)

    page_size = PAGE
    by_slot = True

    def pool(self, spec: CacheSpec) -> PoolSpec:
        if spec.head_dim % self.parts:
            raise InputError(f"parts must divide the {spec.head_dim} channels of a key, got {self.parts}")
        return super().pool(spec)

    @property
    def window_of(self) -> Window:
        window = max(PAGE + 1, (self.budget - self.sinks) // 2) if self.window is None else self.window
        return Window(self.sinks, window, PAGE)

    @property
    def index(self) -> ProductCodesIndex:
        return ProductCodesIndex(PAGE, self.parts, 2**self.bits, self.iterations)

    def find(self, heads: Heads, index: ProductCodes, view: View) -> Selection:
        there = slots_there(index.count, PAGE)
        scores = heads.scoring(approximate(heads.by_group(), index))
        # A row without a token in pages has no weights that mean anything, and none that are looked at.
        weights = jax.nn.softmax(jnp.where(there[:, :, None], scores, -jnp.inf), axis=-1).sum(2)
        worth = jnp.where(there, weights, -jnp.inf)
        ids, _, (counts,) = best(worth, self.num_fetched(index.count.shape[2]), there.astype(jnp.int32))
        return Selection(ids, counts)
