"""Base of the clustered caches that can look at pages in codes first: `Clustered` and `Tolerant` build on it.

Codes are planes of the pages in the pool, u8[P, B, K, 1, 1, n].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from jaxtyping import Array, Bool

from icejax.cache.bases.digest_pages import DigestPages
from icejax.cache.bases.page_reads import InCodes
from icejax.cache.bases.similar_pages import ScaledState
from icejax.cache.bases.two_precisions import BITS
from icejax.cache.pool.page_format import PagePlanes, Stored
from icejax.cache.protocol import Lengths, Report
from icejax.cache.sizes import CacheSpec, PoolSpec
from icejax.checks.errors import InputError, quoted
from icejax.checks.numbers import integer, one_of


@dataclass(frozen=True)
class LookedPages(DigestPages):
    """Pages with digests, of which the selected ones are read exactly, or first in codes.

    Attributes:
        look: bits in which the tokens of the selected pages are looked at: 2, 3, 4 or 8. Their keys and values come in codes,
            which host memory holds beside the pages; then keys and values of the best tokens come exactly. None: pages are
            looked at exactly.
        looked: pages looked at in codes; None: as many as bring, with the exact tokens, at most 1.05 times the bytes of a step
            that fetches keys first.

    Raises:
        InputError: an option is out of range, or does not go with `look`.
    """

    look: int | None = None
    looked: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("look", self.look, (None, *BITS))
        if self.look is not None:
            self._check_needs(f"look={self.look}", "look", dict(page_dtype=None))
        if self.looked is not None:
            integer("looked", self.looked, most=2**20)
            if self.look is None:
                raise InputError(f"looked={self.looked} needs look, the bits of the codes: set look=4, or leave looked out")
            if self.looked < (fewest := self.in_codes.fewest):
                raise InputError(f"looked must be at least {fewest}, whose tokens fill the budget, got {self.looked}")

    def _check_needs(self, option: str, name: str, needed: dict[str, bool | None]) -> None:
        """Raises InputError if another option is not as `option`, whose name is `name`, needs it."""
        for other, value in needed.items():
            if getattr(self, other) != value:
                got = quoted(getattr(self, other))
                raise InputError(f"{option} needs {other}={str(value).lower()}, got {got}: leave {name} out")

    @property
    def in_codes(self) -> InCodes:
        """How a step with `look` reads pages."""
        return InCodes(self, bits=self.look, looked=self.looked)

    @property
    def by_slot(self) -> bool:
        return self.look is not None

    def for_platform(self, platform: str, *, latent: bool) -> Self:
        if self.look and platform == "tpu":
            raise InputError(f"look={self.look} is not possible on TPU, which cannot fetch single tokens: leave look out")
        return self

    def pool(self, spec: CacheSpec) -> PoolSpec:
        return replace(super().pool(spec), codes=self.in_codes.code_bytes(spec.planes) if self.look else 0)

    def stored(self, planes: PagePlanes, mask: Bool[Array, "B K P p"]) -> Stored:
        pages = super().stored(planes, mask)
        return self.in_codes.stored(pages, planes, mask) if self.look else pages

    def report(self, state: ScaledState, lengths: Lengths) -> Report:
        report = super().report(state, lengths)
        if not self.by_slot:
            return report
        return replace(report, pages=report.pages.at[2].set(state.fetched))  # all that was fetched was needed
