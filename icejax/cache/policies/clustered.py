"""The clustered cache: pages of tokens with similar keys, in host memory, fetched by need (arXiv 2604.10539)."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Array, Bool, Float, Int

from icejax.cache.bases.reranking import Reranked
from icejax.cache.bases.selection import Found
from icejax.cache.bases.window import Window
from icejax.cache.index.digest_tree import Digested, DigestTree
from icejax.cache.protocol import CachePolicy, Heads, View
from icejax.checks.errors import InputError, quoted
from icejax.checks.numbers import one_of, power_of_two, whole
from icejax.ops.attention.dense import Attended
from icejax.ops.pages import tree
from icejax.ops.pages.digests import NARROW, Score
from icejax.ops.pages.packing import pack
from icejax.ops.pages.tree_walk import Group, WalkRules, walk

RANGES = dict(
    budget=(1, 2**30), page_size=(4, 128), sinks=(0, 2**20), window=(1, 2**20), candidates=(1, 2**20), opened=(1, 2**20),
    compact_every=(0, 2**20), dense_layers=(0, 1024), reuse=(1, 1024),
)  # fmt: skip


@dataclass(frozen=True)
class Clustered(Reranked):
    """IceCache's budgeted cache, with a second-order page score that knows a page's outlier, a digest tree and a tail.

    A step attends exactly to the sinks, to the best tokens of the pages of highest score, and to the window; never to more
    than `budget` tokens per KV head and layer. All others contribute by means, and by what keys tell of values.

    Attributes:
        budget: tokens attended exactly per KV head and layer, sinks and window included.
        page_size: tokens of a page.
        sinks: first tokens kept on the device; None: an eighth of the budget, at most 32 (the paper's two pages).
        window: newest tokens kept on the device; None: an eighth of the budget and a page, at most two pages.
        candidates: pages fetched for every page of tokens attended exactly; the best tokens of all of them are. None: 4, and
            never fewer pages than at a budget of 256.
        rerank: whether of all tokens of the pages fetched the best are attended exactly, so that there can be more pages than
            the budget holds; IceCache attends to whole pages.
        tail: whether tokens not attended exactly contribute the mean value of their page or node; IceCache's do not.
        value_fit: whether that value is moved by what keys tell of values, one matrix per KV head, fitted to the text; not
            by the score `mean`, nor where it is more than a quarter of the bytes of digests. Of latent layers it is known.
        score: how a page is scored by its digest; `mean` is by the mean of all its keys alone.
        group: how the query heads of a KV head agree on pages; `interleave` is IceCache's rule.
        digest_dtype: `int8` or `float8_e4m3fn`, with a scale per vector; None: the model's.
        page_dtype: `int8` stores pages with a scale per page and channel, in 56% of a 16-bit model's host memory (not on TPU);
            None: in the model's dtype.
        resident: whether the pages of the newest step stay on the device, so that only others are fetched; their memory
            is that of the fetched pages.
        opened: nodes of the digest tree opened per level, or as many more as bring to light twice the pages that are ranked.
        compact_every: decoded tokens after which the pages that hold them are packed anew; 0: never.
        dense_layers: first layers that keep the full cache; None: 2 for models of 16 layers and more (as in the
            paper), else 0.
        reuse: clustered layers that share pages: the first of so many packs and selects by its own keys and queries, the
            others follow it. IceCache(reuse) has 3.
        prefetch: whether pages are selected by a guess of the queries by the layer before (IceCache's), while that layer runs.

    Raises:
        InputError: an option is out of range, or the budget leaves no room for a page.
    """

    budget: int = 256
    page_size: int = 16
    sinks: int | None = None
    window: int | None = None
    candidates: int | None = None
    rerank: bool = True
    tail: bool = True
    value_fit: bool = True
    balance: bool = True
    keys_first: bool | None = None
    score: Score = "second-order"
    group: Group = "sum"
    digest_dtype: str | None = None
    page_dtype: str | None = None
    resident: bool = False
    opened: int = 88
    compact_every: int = 1024
    dense_layers: int | None = None
    reuse: int = 1
    prefetch: bool = False

    def __post_init__(self) -> None:
        for name, default in ((field.name, field.default) for field in dataclasses.fields(self)):
            value = getattr(self, name)
            if name in RANGES and not (value is None and default is None):
                whole(name, value, least=RANGES[name][0], most=RANGES[name][1])
            if isinstance(default, bool) and not isinstance(value, bool):
                raise InputError(f"{name} must be true or false, got {quoted(value)}")
        one_of("keys_first", self.keys_first, (None, True, False))
        one_of("score", self.score, typing.get_args(Score))
        one_of("group", self.group, typing.get_args(Group))
        one_of("digest_dtype", self.digest_dtype, (None, *NARROW))
        one_of("page_dtype", self.page_dtype, (None, "int8"))
        if self.keys_first:
            self._needs("keys_first=true needs", "leave it out", rerank=True, tail=True, resident=False, page_dtype=None)
        power_of_two("page_size", self.page_size)
        power_of_two("compact_every", self.compact_every, least=0)
        if 0 < self.compact_every < 2 * self.page_size:
            raise InputError(f"compact_every must be 0 or at least two pages ({2 * self.page_size}), got {self.compact_every}")
        if self.window is not None and self.window <= self.page_size:
            raise InputError(f"window must be larger than page_size ({self.page_size}), got {self.window}")
        least = max(8, (self.sinks or 0) + (self.window or 0) + self.page_size)
        while sum(self._resident(least)) + self.page_size > least:
            least += 1
        if self.budget < least:
            sinks, window = self._resident(least)
            raise InputError(
                f"budget must hold {sinks} sinks, a window of {window} and a page of {self.page_size}: "
                f"at least {least}, got {self.budget}"
            )

    def _needs(self, what: str, advice: str, **needed: bool | int | str | None) -> None:
        for name, value in needed.items():
            if getattr(self, name) != value:
                got = quoted(getattr(self, name))
                raise InputError(f"{what} {name}={str(value).lower()}, got {got}: {advice}")

    def _resident(self, budget: int) -> tuple[int, int]:
        """Returns the sinks and the window of a budget."""
        sinks = min(32, budget // 8) if self.sinks is None else self.sinks
        return sinks, min(2 * self.page_size, budget // 8 + self.page_size) if self.window is None else self.window

    @property
    def window_of(self) -> Window:
        return Window(*self._resident(self.budget), self.page_size)

    @property
    def shares(self) -> bool:
        return self.reuse > 1

    def for_layers(self, full: Sequence[int], *, of: int) -> list[CachePolicy]:
        if self.reuse == 1:
            return [self] * len(full)
        follower = Follower(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        return [follower if rank % self.reuse else self for rank in range(len(full))]

    def order(self, k: Float[Array, "B K T H"], valid: Bool[Array, "B T"]) -> Int[Array, "B K T"]:
        return pack(k, valid, page_size=self.page_size)

    @property
    def index(self) -> DigestTree:
        return DigestTree(self.digest_dtype, self.value_fit and self.tail and self.score == "second-order")

    def find(self, heads: Heads, index: Digested, view: View) -> Found:
        pages = index.levels[0].count.shape[-1]
        return self._found(heads, index, view, self.num_ranked(pages) if self.rerank else self.num_fetched(pages))

    def _found(self, heads: Heads, index: Digested, view: View, fetched: int) -> Found:
        """Returns the best `fetched` pages, best first: of those that come to light for the most that are ever fetched."""
        most = max(fetched, self.num_ranked(index.levels[0].count.shape[-1]))
        from_keys = self.index.from_keys(index)
        walked = walk(
            heads.by_group(),
            index.levels,
            index.scatter,
            scoring=heads.scoring,
            rules=WalkRules(
                opened=tree.num_opened(most, least=self.opened),
                selected=fetched,
                tail=self.tail,
                score=self.score,
                group=self.group,
            ),
            guess=self._guess(heads, view),
            path=view.shared.choice if self.follows else None,
            from_keys=from_keys,
        )
        rest = Attended(walked.tail_out[..., : heads.v.shape[-1]], walked.tail_lse)  # of a latent layer whole keys
        return Found(walked.page_ids, walked.counts, None, rest, walked.tail_uneven, from_keys, walked.path)

    def _guess(self, heads: Heads, view: View) -> Float[Array, "B K G H"] | None:
        """Returns the queries to select by in the place of the layer's own, if there are any."""
        return view.guess().reshape(heads.by_group().shape) if self.prefetch and view.guess is not None else None


class Follower(Clustered):
    """A layer that takes partition and pages of the clustered layer before it."""

    follows = True
