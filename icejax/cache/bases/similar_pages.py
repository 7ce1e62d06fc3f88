"""Base of the caches whose pages hold tokens of similar keys (IceCache, arXiv 2604.10539).

`DigestPages` and `Packed` build on it. Pages are [P, B, K, planes, p, W].
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.bases.channel_scaling import scaled
from icejax.cache.bases.retrieval import PagedState, Retrieval
from icejax.cache.bases.window import Window
from icejax.cache.protocol import Heads, Lengths, Outcome, Report, View
from icejax.cache.sizes import CacheSpec
from icejax.checks.errors import InputError, quoted
from icejax.checks.numbers import integer, power_of_two
from icejax.ops.attention.dense import Attended
from icejax.ops.pages.channel_scaling import factors_of
from icejax.ops.pages.packing import pack

RANGES = dict(
    budget=(1, 2**30), page_size=(4, 128), sinks=(0, 2**20), window=(1, 2**20), candidates=(1, 2**20), opened=(1, 2**20),
    compact_every=(0, 2**20), dense_layers=(0, 1024), reuse=(1, 1024),
)  # fmt: skip


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaledState(PagedState):
    """The device state of a layer.

    Attributes:
        factors: powers of two by which the channels of keys are multiplied, set by a row's first text; None: no scaling.
    """

    factors: jax.Array | None  # f32[B, K, H]


@dataclass(frozen=True)
class SimilarPages(Retrieval):
    """Sinks, a window, and pages of tokens with similar keys, by channels of like size.

    Attributes:
        budget: tokens attended exactly per KV head and layer, sinks and window included.
        page_size: tokens of a page.
        sinks: first tokens kept on the device; None: an eighth of the budget, at most 32 (the paper's two pages).
        window: newest tokens kept on the device; None: an eighth of the budget and a page, at most two pages.
        balance: whether channels whose keys are far larger or smaller than their queries are scaled to like size: attention
            stays the same, distances between keys change; not in latent layers, whose keys hold the values.
        compact_every: decoded tokens after which their pages are packed again, by meaning; 0: never.
        dense_layers: first layers that keep the full cache; None: 2 for models of 16 layers and more (as in the
            paper), else 0.

    Raises:
        InputError: an option is out of range, or the budget leaves no room for a page.
    """

    budget: int = 256
    page_size: int = 16
    sinks: int | None = None
    window: int | None = None
    balance: bool = True
    compact_every: int = 1024
    dense_layers: int | None = None

    def __post_init__(self) -> None:
        for name, default in ((field.name, field.default) for field in dataclasses.fields(self)):
            value = getattr(self, name)
            if name in RANGES and not (value is None and default is None):
                integer(name, value, least=RANGES[name][0], most=RANGES[name][1])
            if isinstance(default, bool) and not isinstance(value, bool):
                raise InputError(f"{name} must be true or false, got {quoted(value)}")
        power_of_two("page_size", self.page_size)
        power_of_two("compact_every", self.compact_every, least=0)
        if 0 < self.compact_every < 2 * self.page_size:
            raise InputError(f"compact_every must be 0 or at least two pages ({2 * self.page_size}), got {self.compact_every}")
        if self.window is not None and self.window <= self.page_size:
            raise InputError(f"window must be larger than page_size ({self.page_size}), got {self.window}")
        least = max(8, (self.sinks or 0) + (self.window or 0) + self.page_size)
        while sum(self._sinks_and_window(least)) + self.page_size > least:
            least += 1
        if self.budget < least:
            sinks, window = self._sinks_and_window(least)
            raise InputError(
                f"budget must hold {sinks} sinks, a window of {window} and a page of {self.page_size}: "
                f"at least {least}, got {self.budget}"
            )

    def _sinks_and_window(self, budget: int) -> tuple[int, int]:
        """Returns the number of sinks and of window slots for a budget."""
        sinks = min(32, budget // 8) if self.sinks is None else self.sinks
        return sinks, min(2 * self.page_size, budget // 8 + self.page_size) if self.window is None else self.window

    @property
    def window_layout(self) -> Window:
        return Window(*self._sinks_and_window(self.budget), self.page_size)

    def order(self, k: Float[Array, "B K T H"], valid: Bool[Array, "B T"]) -> Int[Array, "B K T"]:
        return pack(k, valid, page_size=self.page_size)

    def init(self, spec: CacheSpec) -> ScaledState:
        ones = jnp.ones((spec.batch_size, spec.num_kv_heads, spec.head_dim))
        factors = ones if self.balance and not spec.latent else None
        return ScaledState(**vars(super().init(spec)), factors=factors)

    def prefill(self, state: ScaledState, heads: Heads, attended: Attended, view: View) -> Outcome:
        if state.factors is not None:
            state = replace(state, factors=factors_of(heads.q, heads.k, heads.lengths))
        return super().prefill(state, scaled(heads, state.factors), attended, view)

    def decode(self, state: ScaledState, heads: Heads, view: View) -> Outcome:
        if view.guess is not None:
            view = replace(view, guess=lambda guess=view.guess: scaled(replace(heads, q=guess()), state.factors).q)
        return super().decode(state, scaled(heads, state.factors), view)

    def extend(self, state: ScaledState, heads: Heads, view: View) -> Outcome:
        return super().extend(state, scaled(heads, state.factors), view)

    def exact_tokens(self, state: ScaledState, lengths: Lengths) -> Float[Array, " B"]:
        """Returns how many tokens the newest step attended exactly, mean over KV heads."""
        masks = self.window_layout.masks(state.window, lengths, seen=lengths.seen)
        near = sum(mask.sum(1, dtype=jnp.float32) for mask in masks)
        return near + (state.weights > 0).sum((2, 3), dtype=jnp.float32).mean(1)

    def report(self, state: ScaledState, lengths: Lengths) -> Report:
        report = super().report(state, lengths)
        return replace(report, digest_bytes=report.digest_bytes + sum(x.nbytes for x in jax.tree.leaves(state.factors)))
