"""PQCache (arXiv 2407.12820): single tokens selected by approximate attention, from product-quantized keys (`--cache pqcache`).

Codes are [B, K, P, p, parts], approximate scores f32[B, K, G, S].
"""

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
    """PQCache: attends to sinks, window and the tokens with most of a KV head's attention, by approximate keys.

    A key is cut into parts, and each part is replaced by its nearest centroid; k-means makes the centroids from a row's first
    text. In the authors' code k-means also sees the tokens of the window, begins at random tokens, and runs as many iterations
    as time allows; sizes are shares of the prompt, half of it window, and no layer is dense. Their codes are in host memory and
    are copied to the device in every step, and recently requested tokens stay on the device; here codes are on the device, and
    all selected tokens are fetched.

    Attributes:
        budget: tokens attended exactly per KV head and layer, sinks and window included.
        sinks: first tokens kept on the device.
        window: newest tokens kept on the device, up to 15 fewer while a page of them fills; None: half of the budget beside the
            sinks, but at least 17.
        parts: parts of a key, each with its own code.
        bits: bits of a code; a part has 2^bits centroids.
        iterations: rounds of k-means, each of which reassigns tokens and moves centroids.
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
    def window_layout(self) -> Window:
        window = max(PAGE + 1, (self.budget - self.sinks) // 2) if self.window is None else self.window
        return Window(self.sinks, window, PAGE)

    @property
    def index(self) -> ProductCodesIndex:
        return ProductCodesIndex(PAGE, self.parts, 2**self.bits, self.iterations)

    def find(self, heads: Heads, index: ProductCodes, view: View) -> Selection:
        filled = slots_there(index.count, PAGE)
        scores = heads.scoring(approximate(heads.by_group(), index))
        # A row without a token in pages has weights of NaN, which the mask hides.
        weights = jax.nn.softmax(jnp.where(filled[:, :, None], scores, -jnp.inf), axis=-1).sum(2)
        worth = jnp.where(filled, weights, -jnp.inf)
        ids, _, (counts,) = best(worth, self.num_fetched(index.count.shape[2]), filled.astype(jnp.int32))
        return Selection(ids, counts)
