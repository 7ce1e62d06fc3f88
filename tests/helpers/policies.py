"""The table of cache policies under test: one row per policy, with a small budget and with room for every token.

The contract tests run on every row (`by_row`); rows marked slow run with the slow tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from icejax.cache.protocol import CachePolicy
from icejax.cache.registry import (
    H2O,
    PRESETS,
    Q4_0,
    Q8_0,
    TOVA,
    AdaKV,
    ArkVale,
    Clustered,
    ClusterKV,
    Coded,
    ExpectedAttention,
    Full,
    InfiniGen,
    KeyDiff,
    Kivi,
    LaCache,
    MagicPIG,
    OmniKV,
    Packed,
    ParisKV,
    PQCache,
    PyramidKV,
    Quest,
    ReSTKV,
    RetroInfer,
    RocketKV,
    ShadowKV,
    SnapKV,
    Streaming,
    Tolerant,
    TopK,
    TopKPages,
    TopP,
    VAttention,
)


@dataclass(frozen=True)
class Row:
    """A policy under test.

    Attributes:
        small: the policy at a budget far below the tested lengths.
        exact: returns the policy with room for that many tokens, when it must equal dense attention; None: it samples.
        keeps_all: whether text added by `extend` attends exactly to all earlier tokens, whatever the budget.
        rounding: largest error of a decoded token's own value.
        slow: whether the row's tests are slow tests; another row with the same base then runs by default.
    """

    name: str
    small: CachePolicy
    exact: Callable[[int], CachePolicy] | None
    keeps_all: bool = True
    rounding: float = 1e-3
    slow: bool = False

    def __str__(self) -> str:
        return self.name


POLICIES = (
    Row("full", Full(), lambda budget: Full()),
    Row("q8_0", Q8_0(), None, keeps_all=False, rounding=0.02, slow=True),
    Row("q4_0", Q4_0(), None, keeps_all=False, rounding=0.5),
    Row("kivi", Kivi(residual=32), lambda n: Kivi(residual=-n // 32 * -32), keeps_all=False, slow=True),
    Row("kivi-2", Kivi(bits=2, residual=64), lambda n: Kivi(bits=2, residual=-n // 32 * -32), keeps_all=False, slow=True),
    Row("clustered", Clustered(budget=64), lambda budget: Clustered(budget=budget)),
    Row("clustered-page-8", Clustered(budget=48, page_size=8), lambda budget: Clustered(budget=budget, page_size=8), slow=True),
    Row("clustered-no-tail", Clustered(budget=64, tail=False), lambda budget: Clustered(budget=budget, tail=False), slow=True),
    Row(
        "clustered-int8",
        Clustered(budget=64, digest_dtype="int8"),
        lambda n: Clustered(budget=n, digest_dtype="int8"),
        slow=True,
    ),
    Row(
        "clustered-resident",
        Clustered(budget=64, resident=True, compact_every=32),
        lambda n: Clustered(budget=n, resident=True, compact_every=32),
        slow=True,
    ),
    Row(
        "clustered-look",
        Clustered(budget=64, look=4, compact_every=32),
        lambda n: Clustered(budget=2 * n, look=4, compact_every=32),
        slow=True,
    ),
    Row(
        "clustered-as-icecache",
        Clustered(budget=64, **PRESETS["icecache"][1]),
        lambda n: Clustered(budget=2 * n, **PRESETS["icecache"][1]),  # pages may be partly filled
        slow=True,
    ),
    Row(
        "clustered-no-sinks-compacted",
        Clustered(budget=64, sinks=0, compact_every=32),
        lambda n: Clustered(budget=n, sinks=0, compact_every=32),
        slow=True,
    ),
    Row(
        "tolerant", Tolerant(budget=64, tolerance=0.2), lambda n: Tolerant(budget=64, tolerance=1e-12, max_budget=n), slow=True
    ),
    Row(
        "tolerant-look",
        Tolerant(budget=64, tolerance=0.05, look=4, compact_every=32),
        lambda n: Tolerant(budget=64, tolerance=1e-12, look=4, compact_every=32, max_budget=2 * n),
        slow=True,
    ),
    Row("coded", Coded(budget=64, compact_every=32), lambda n: Coded(budget=2 * n, compact_every=32), slow=True),
    Row("coded-pages", Coded(budget=64, singly=False), lambda n: Coded(budget=2 * n, singly=False), slow=True),
    Row("packed", Packed(budget=64, compact_every=32), lambda n: Packed(budget=2 * n, compact_every=32), slow=True),
    Row("packed-alone", Packed(budget=64, exact=0), None, keeps_all=False, slow=True),
    Row("quest", Quest(budget=64), lambda n: Quest(budget=2 * n)),
    Row("snapkv", SnapKV(budget=64, window=16), lambda n: SnapKV(budget=n), keeps_all=False),
    Row("h2o", H2O(budget=64, recent=16), lambda n: H2O(budget=n), keeps_all=False, slow=True),
    Row("keydiff", KeyDiff(budget=64), lambda n: KeyDiff(budget=n), keeps_all=False, slow=True),
    Row(
        "pyramidkv",
        PyramidKV(budget=64, window=16),
        lambda n: PyramidKV(budget=4 * n, beta=4),  # the last layer has the smallest budget
        keeps_all=False,
        slow=True,
    ),
    Row("adakv", AdaKV(budget=64, window=16), lambda n: AdaKV(budget=n), keeps_all=False, slow=True),
    Row("expected-attention", ExpectedAttention(budget=64), lambda n: ExpectedAttention(budget=n), keeps_all=False, slow=True),
    Row("restkv", ReSTKV(budget=64, window=16), lambda n: ReSTKV(budget=n), keeps_all=False, slow=True),
    Row("rocketkv", RocketKV(budget=32, kept=100), lambda n: RocketKV(budget=n), keeps_all=False, slow=True),
    Row("lacache", LaCache(budget=64, recent=32), lambda n: LaCache(budget=n, recent=32), keeps_all=False, slow=True),
    Row("tova", TOVA(budget=64), lambda n: TOVA(budget=n), keeps_all=False, slow=True),
    Row("streaming", Streaming(budget=64), lambda n: Streaming(budget=n), keeps_all=False, slow=True),
    Row("arkvale", ArkVale(budget=64, page_size=8), lambda n: ArkVale(budget=2 * n, page_size=8), slow=True),
    Row("arkvale-kv", ArkVale(budget=64, page_size=8, heads="kv"), lambda n: ArkVale(budget=2 * n, heads="kv"), slow=True),
    Row("omnikv", OmniKV(budget=64), lambda n: OmniKV(budget=n), slow=True),
    Row("pariskv", ParisKV(budget=64), lambda n: ParisKV(budget=n + 36), slow=True),
    Row("pqcache", PQCache(budget=64, sinks=8, bits=4), lambda n: PQCache(budget=2 * n, window=40), slow=True),
    Row("clusterkv", ClusterKV(budget=64, sinks=8, clusters=20), lambda n: ClusterKV(budget=n + 32, clusters=20), slow=True),
    Row("magicpig", MagicPIG(budget=64, window=24, bits=4, tables=30), None, slow=True),
    Row("infinigen", InfiniGen(budget=64), lambda n: InfiniGen(budget=n + 17, alpha=1e9), slow=True),
    Row("retroinfer", RetroInfer(budget=64, window=24), lambda n: RetroInfer(budget=n + 64), slow=True),
    Row(
        "shadowkv",
        ShadowKV(budget=64, window=1, outliers=2, rank=8),
        lambda n: ShadowKV(budget=2 * n, rank=4096),  # full rank
        keeps_all=False,
        slow=True,
    ),
    Row("topk", TopK(budget=64), lambda n: TopK(budget=n)),
    Row("topk-sum", TopK(budget=64, group="sum"), lambda n: TopK(budget=n, group="sum"), slow=True),
    Row("topk-pages", TopKPages(budget=64), lambda n: TopKPages(budget=n + 16), slow=True),  # the newest page is not full
    Row("topp", TopP(mass=0.5), lambda n: TopP(mass=1.0), slow=True),
    Row(
        "vattention", VAttention(budget=64), lambda n: VAttention(budget=2 * n), slow=True
    ),  # half of the budget is for top tokens
)
EXACT = [row for row in POLICIES if row.exact is not None]
# One row of each policy, and options that change what is stored.
STORED = ("clustered-int8", "clustered-look", "clustered-as-icecache", "packed-alone")
KINDS = [row for row in POLICIES if row.name in STORED or row is next(x for x in POLICIES if type(x.small) is type(row.small))]
OF_BASES = [
    row for row in EXACT if not row.slow or row.name in ("clustered-resident", "kivi", "h2o")
]  # a row per base, for tests that run whole models


def by_row(*values: object, rows: Sequence[Row] = POLICIES, slow: bool = False) -> list:
    """Returns test parameters (row, *values) for every row; `slow` marks all of them slow."""
    marks = {row.name: [pytest.mark.slow] if slow or row.slow else [] for row in rows}
    return [pytest.param(row, *values, id="-".join(map(str, (row, *values))), marks=marks[row.name]) for row in rows]
