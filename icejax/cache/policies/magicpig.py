"""MagicPIG (arXiv 2410.16179): tokens sampled by hashes of their keys, each weighed by how likely it was to be."""

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

LEAST = 1e-4  # what its code adds to the probability of a token, so that none weighs without bound


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled(Selection):
    """Tokens that were found by chance, and the mean that their keys were hashed around."""

    mean: jax.Array | None = None  # f32[B, K, H]


@dataclass(frozen=True)
class MagicPIG(Retrieval):
    """MagicPIG: every query head attends to sinks, window and the tokens that have its hash in two tables at least.

    A sampled token's weight is divided by the probability that it is sampled, so that the attention is that to all tokens in
    the mean over planes; no budget makes it exact. In its code there is no end to how many are sampled; here, of more than the
    budget holds, those that agree in most tables are taken. There decoded tokens are all kept, and layers 0, 16, 32 and so on
    are dense; hash tables, keys and values are the CPU's, which finds the sample and attends to it, so that the device keeps
    nothing of them and receives outputs alone. Here hashes are on the device, and the sample is moved there.

    Attributes:
        budget: tokens attended to per query head and layer at most, sinks and window included.
        sinks: first tokens kept on the device.
        window: newest tokens kept on the device, up to 15 fewer while a page of them fills.
        bits: planes of a table, on whose sides a key and a query must agree.
        tables: hashes of a key, all of which are on the device.
        seed: of the random planes, the same in all layers.
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

    @property
    def window_of(self) -> Window:
        return Window(self.sinks, self.window, PAGE)

    @property
    def index(self) -> HashIndex:
        return HashIndex(PAGE, self.bits, self.tables, self.seed)

    def find(self, heads: Heads, index: Hashes, view: View) -> Sampled:
        batch, kv_heads, pages = index.count.shape
        own = self.index.hashed(heads.by_group().astype(jnp.float32))[:, :, :, None]
        codes = index.codes.reshape(batch, kv_heads, 1, pages * PAGE, self.tables)
        agree = (codes == own).sum(-1, dtype=jnp.int32)
        sampled = slots_there(index.count, PAGE)[:, :, None] & (agree >= 2)
        worth = jnp.where(sampled, agree.astype(jnp.float32), -jnp.inf)
        ids, which, (counts,) = best(worth, self.num_fetched(pages), sampled.astype(jnp.int32))
        found = of_query_heads(ids, counts, which & sampled)
        return Sampled(**{field.name: getattr(found, field.name) for field in fields(found)}, mean=index.mean)

    def attend(self, heads: Heads, near: Near, pages: Pages, found: Sampled) -> tuple[Attended, Float[Array, "B K M p"]]:
        q, keys = heads.by_group().astype(jnp.float32), pages[0][:, :, :, 0].astype(jnp.float32) - found.mean[:, :, None]
        lengths = jnp.linalg.norm(q, axis=-1)[..., None] * jnp.linalg.norm(keys, axis=-1)[:, :, None]
        cosine = EINSUM("bkgh,bkmh->bkgm", q, keys) / jnp.maximum(lengths, 1e-30)
        bias = found.bias - jnp.log(self._likely(cosine) + LEAST)
        return super().attend(heads, near, pages, replace(found, bias=bias))

    def _likely(self, cosine: Float[Array, "*R"]) -> Float[Array, "*R"]:
        """Returns how likely a key at an angle of a query has its hash in two tables at least."""
        same = (1 - jnp.arccos(jnp.clip(cosine, -1, 1)) / jnp.pi) ** self.bits  # in one table
        other = jnp.log1p(-jnp.minimum(same, 1 - 1e-7))
        return -jnp.expm1(self.tables * other) - self.tables * same * jnp.exp((self.tables - 1) * other)
