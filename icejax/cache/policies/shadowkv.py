"""ShadowKV (arXiv 2410.21465): pages of consecutive tokens selected by their mean keys, with keys of a low rank.

`--cache shadowkv`. Mean keys are [B, K, P, H], page scores f32[B, K, P].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.cache.bases.retrieval import PagedState, Retrieval
from icejax.cache.bases.selection import Selection
from icejax.cache.bases.window import Window
from icejax.cache.index.mean_keys import LandmarkIndex, Landmarks, least_cosine
from icejax.cache.protocol import Heads, Outcome, View, check_dense_layers
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer, power_of_two
from icejax.ops.attention.dense import Attended, products
from icejax.ops.low_rank import low_rank
from icejax.ops.topk import best


@dataclass(frozen=True)
class ShadowKV(Retrieval):
    """ShadowKV: attends to the newest pages, to a prompt's outlier pages, and to pages whose mean keys fit the queries.

    The keys of a prompt's other pages are approximated before RoPE in `rank` directions, shared by all KV heads of the layer.
    The authors' code rebuilds these keys on the device and fetches values alone. Here the rebuilt keys are stored and fetched
    with the values, so that answers are those of the method, but not memory and time. Their budget excludes the window, the
    outlier pages and decoded tokens, which all stay on the device; here decoded tokens leave the window in pages, with exact
    keys. The last tokens of their prompt, which fill no page, stay too; here they are a page like the others. They do not fetch
    a page again that the previous step fetched.

    Attributes:
        budget: tokens attended exactly per KV head and layer, window and outlier pages included.
        page_size: consecutive tokens in a page.
        window: newest pages kept on the device, and up to one more.
        outliers: pages of a prompt that every step attends to, with exact keys: those with the least cosine between a key and
            the page's mean; None: 24 for every 1,024 tokens of the budget, and in proportion for a part of 1,024 (for which the
            authors' code has none).
        rank: directions in which keys are approximated, at most the channels of all KV heads (1,024 in the authors' models).
        dense_layers: first layers that keep the full cache; None: 2 for models of 16 layers and more, else 0 (as in the
            authors' code).

    Raises:
        InputError: an option is out of range, or the budget leaves no room for a page.
    """

    budget: int = 256
    page_size: int = 8
    window: int = 4
    outliers: int | None = None
    rank: int = 160
    dense_layers: int | None = None

    def __post_init__(self) -> None:
        power_of_two("page_size", self.page_size, least=4, most=128)
        integer("budget", self.budget)
        integer("window", self.window, least=0, most=1024)
        if self.outliers is not None:
            integer("outliers", self.outliers, least=0, most=2**20)
        integer("rank", self.rank)
        check_dense_layers(self.dense_layers)
        if self._selected < 1:
            least = (self.window + self._outliers + 2) * self.page_size
            parts = f"a window of {self.window + 1} pages, {self._outliers} outlier pages and one page to select"
            raise InputError(f"budget must hold {parts}, of {self.page_size} tokens each: at least {least}, got {self.budget}")

    rerotates = True
    packs_by_head = False  # the keys of all KV heads are approximated together

    @property
    def _outliers(self) -> int:
        return self.budget * 24 // 1024 if self.outliers is None else self.outliers

    @property
    def _selected(self) -> int:
        """Number of pages that a query selects."""
        return self.budget // self.page_size - self.window - 1 - self._outliers

    @property
    def window_layout(self) -> Window:
        return Window(0, (self.window + 1) * self.page_size, self.page_size)

    @property
    def index(self) -> LandmarkIndex:
        return LandmarkIndex()

    def num_fetched(self, pages: int) -> int:
        return min(pages, self._outliers + self._selected)

    def prefill(self, state: PagedState, heads: Heads, attended: Attended, view: View) -> Outcome:
        outcome = super().prefill(state, heads, attended, view)
        rebuilt = super().prefill(state, replace(heads, k=self._rebuilt(heads, view)), attended, view).pages
        index, pages = outcome.state.index, len(outcome.pages)
        cosines = least_cosine(outcome.pages[:, :, :, 0, :, : heads.k.shape[3]], index)
        outliers = best(-cosines, min(self._outliers, pages))[1] & (index.count[:, :, :pages] > 0)
        index = replace(index, kept=index.kept.at[:, :, :pages].set(outliers))
        written = jnp.where(outliers.transpose(2, 0, 1)[..., None, None, None], outcome.pages, rebuilt)
        return replace(outcome, state=replace(outcome.state, index=index), pages=written)

    def _rebuilt(self, heads: Heads, view: View) -> Float[Array, "B T K H"]:
        """Returns the keys of a prompt, approximated in `rank` directions before RoPE."""
        batch, tokens, kv_heads, size = heads.k.shape
        position = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[None], (batch, tokens))
        mask = (position < heads.lengths[:, None])[..., None, None]
        plain = view.rerotate(jnp.where(mask, heads.k, 0).astype(jnp.float32), -position).reshape(batch, tokens, -1)
        approximate = low_rank(plain, min(self.rank, kv_heads * size)).reshape(heads.k.shape)
        return view.rerotate(approximate, position).astype(heads.k.dtype)

    def find(self, heads: Heads, index: Landmarks, view: View) -> Selection:
        free = (index.count > 0) & ~index.kept
        q, mean = heads.by_group().astype(jnp.float32), index.mean.astype(jnp.float32)
        scores = jnp.where(free[:, :, None], heads.scoring(products(q, mean)), -jnp.inf)
        # A row without free pages has weights of NaN, which the masks hide.
        worth = jnp.where(free, jax.nn.softmax(scores, axis=-1).max(2), -jnp.inf)
        worth = jnp.where(index.kept, jnp.inf, worth)
        page_ids, _, (counts,) = best(worth, self.num_fetched(worth.shape[-1]), index.count)
        return Selection(page_ids, counts)
