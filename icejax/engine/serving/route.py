"""How a prompt gets into a cache: behind a cached prefix or from nothing, and where on its way the cache is stored."""

from __future__ import annotations

from dataclasses import dataclass

from icejax.engine.serving.prefix_folder import StoredPrefix
from icejax.engine.serving.prefixes import Entry

PIECE = 512  # tokens of a text behind a cached prefix that are computed between two steps of other rows


@dataclass(frozen=True)
class Route:
    """How a prompt gets into a cache.

    Attributes:
        entry: the cached prefix, in memory or on the disk; None: no prefix is stored.
        cuts: numbers of first tokens after which the cache is stored, in order; the last is the whole prompt's. None if the
            cached prefix is the whole prompt.
    """

    entry: Entry | StoredPrefix | None
    cuts: tuple[int, ...]


def pieces(start: int, stop: int) -> list[tuple[int, int]]:
    """Returns the beginnings and ends of the pieces in which the tokens from `start` to `stop` are computed."""
    return [(first, min(first + PIECE, stop)) for first in range(start, stop, PIECE)]
