"""MagicPIG (arXiv 2410.16179): tokens sampled by hashes of their keys, weighted by the inverse of their sampling probability.

`--cache magicpig`. Hashes are u16[B, K, P, p, tables], the sample is a `Selection` of slots.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.cache.bases.retrieval import PAGE, Near, Pages, Retrieval
from icejax.cache.bases.selection import Selection, of_query_heads
from icejax.cache.bases.window import Window
from icejax.cache.index.base import slots_there
from icejax.cache.index.hashes import Hashes, HashIndex
from icejax.cache.protocol import Heads, View, check_dense_layers
from icejax.checks.numbers import integer
from icejax.ops.attention.dense import EINSUM, Attended
from icejax.ops.topk import best

LEAST = 1e-4  # added to a token's probability, so that weights are bounded (as in the authors' code)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled(Selection):
    """Sampled tokens, and the mean that is subtracted from keys before hashing."""

    mean: jax.Array | None = None  # f32[B, K, H]


@dataclass(frozen=True)
class MagicPIG(Retrieval):
    """MagicPIG: every query head attends to sinks, window and the tokens that share its query's hash in two or more tables.

    A sampled token's weight is divided by its probability of being sampled, so that the mean over random planes is the
    attention to all tokens; no budget makes a single step exact. The authors' code does not limit the sample; here, if it
    exceeds the budget, the tokens that agree in most tables are chosen. Their code keeps all decoded tokens, and the full cache
    in layers 0, 16, 32 and so on. Their hash tables, keys and values are on the CPU, which samples and attends, so that the
    device receives outputs alone; here hashes are on the device, and the sample is fetched to it.

    Attributes:
        budget: most tokens attended to per query head and layer, sinks and window included.
        sinks: first tokens kept on the device.
        window: newest tokens kept on the device, up to 15 fewer while a page of them fills.
        bits: random planes of a table; a key and a query share its hash if they are on the same side of all.
        tables: hashes of a key, all of which are on the device.
        seed: seed of the random planes, which are the same in all layers.
        dense_layers: first layers that keep the full cache; None: 2 for models of 16 layers and more, else 0.

    Raises:
        InputError: an option is out of range.
    """

    budget: int = 256
    sinks: int = 4
    window: int = 64
    bits: int = 10
    tables: int = 150
    seed: int = 0
    dense_layers: int | None = None

    def __post_init__(self) -> None:
        integer("sinks", self.sinks, least=0, most=2**20)
        integer("window", self.window, least=PAGE, most=2**20)
        integer("budget", self.budget, least=self.sinks + self.window + 1)
        integer("bits", self.bits, most=16)
        integer("tables", self.tables, least=2, most=4096)
        integer("seed", self.seed, least=0)
        check_dense_layers(self.dense_layers)

    page_size = PAGE
    by_slot = True
    per_query_head = True
    packs_by_head = False  # the hashes of all KV heads are drawn together

    @property
    def window_layout(self) -> Window:
        return Window(self.sinks, self.window, PAGE)

    @property
    def index(self) -> HashIndex:
        return HashIndex(PAGE, self.bits, self.tables, self.seed)

    def find(self, heads: Heads, index: Hashes, view: View) -> Sampled:
        batch, kv_heads, pages = index.count.shape
        query_hashes = self.index.hashed(heads.by_group().astype(jnp.float32))[:, :, :, None]
        codes = index.codes.reshape(batch, kv_heads, 1, pages * PAGE, self.tables)
        agree = (codes == query_hashes).sum(-1, dtype=jnp.int32)
        sampled = slots_there(index.count, PAGE)[:, :, None] & (agree >= 2)
        worth = jnp.where(sampled, agree.astype(jnp.float32), -jnp.inf)
        ids, selected, (counts,) = best(worth, self.num_fetched(pages), sampled.astype(jnp.int32))
        selection = of_query_heads(ids, counts, selected & sampled)
        return Sampled(**{field.name: getattr(selection, field.name) for field in fields(selection)}, mean=index.mean)

    def attend(self, heads: Heads, near: Near, pages: Pages, found: Sampled) -> tuple[Attended, Float[Array, "B K M p"]]:
        q, keys = heads.by_group().astype(jnp.float32), pages[0][:, :, :, 0].astype(jnp.float32) - found.mean[:, :, None]
        norms = jnp.linalg.norm(q, axis=-1)[..., None] * jnp.linalg.norm(keys, axis=-1)[:, :, None]
        cosine = EINSUM("bkgh,bkmh->bkgm", q, keys) / jnp.maximum(norms, 1e-30)
        bias = found.bias - jnp.log(self._likely(cosine) + LEAST)
        return super().attend(heads, near, pages, replace(found, bias=bias))

    def _likely(self, cosine: Float[Array, "*R"]) -> Float[Array, "*R"]:
        """Returns the probability that a key with this cosine to a query shares its hash in two or more tables.

        With 10 bits and 150 tables it is 1.00 for a cosine of 0.8, 0.74 for 0.5 and 0.01 for 0.
        """
        agrees = (1 - jnp.arccos(jnp.clip(cosine, -1, 1)) / jnp.pi) ** self.bits  # probability in one table
        log_differs = jnp.log1p(-jnp.minimum(agrees, 1 - 1e-7))
        return -jnp.expm1(self.tables * log_differs) - self.tables * agrees * jnp.exp((self.tables - 1) * log_differs)
