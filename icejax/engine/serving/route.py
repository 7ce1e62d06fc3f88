"""How a prompt gets into a cache: after a cached prefix or from nothing, and where on its way the cache is stored."""

from __future__ import annotations

from dataclasses import dataclass

from icejax.engine.serving.prefix_folder import StoredPrefix
from icejax.engine.serving.prefixes import Entry

PIECE = 512  # most tokens of a text after a cached prefix that go through the layers together


@dataclass(frozen=True)
class Route:
    """How a prompt gets into a cache.

    Attributes:
        entry: the cached prefix, in memory or on the disk; None: no prefix is stored.
        held: number of its tokens with which the row begins.
        cuts: numbers of first tokens after which the cache is stored, in order; the last is the whole prompt's. Empty if the
            cached prefix is the whole prompt.
        shared: number of first tokens that an earlier prompt had too.
    """

    entry: Entry | StoredPrefix | None
    held: int
    cuts: tuple[int, ...]
    shared: int = 0


def whole_route(tokens: int) -> Route:
    """Returns the route of a prompt of so many tokens after nothing, which is cut nowhere."""
    return Route(None, 0, (tokens,))


def pieces(start: int, stop: int) -> list[tuple[int, int]]:
    """Returns the beginnings and ends of the pieces in which the tokens from `start` to `stop` are computed."""
    return [(first, min(first + PIECE, stop)) for first in range(start, stop, PIECE)]
