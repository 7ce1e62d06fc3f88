"""Ownership of the pool's extents (64 pages each): a row takes the extents its pages need and gives them back.

The engine's plan, batch, scheduler and prefix store call it, on the host, with NumPy tables [B, X].
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int

from icejax.cache.pool.host_pool import EXTENT
from icejax.checks.errors import InputError

SCRATCH_EXTENT = 0  # where a row without an extent writes; only a pool with such rows holds it


def extents_for(pages: int) -> int:
    """Returns how many extents hold `pages` pages."""
    return -(-pages // EXTENT)


def row_extents(prompt: int, growth: range, *, most: int) -> Bool[np.ndarray, " X"]:
    """Returns which of its `most` extents a row needs: for its prompt's pages and for the pages in `growth`.

    A prompt of 70 pages and growth of the pages 256 to 319, of 6 extents:

        row_extents(70, range(256, 320), most=6)  ->  [True, True, False, False, True, False]

    Args:
        prompt: pages of the prompt, from page 0 on.
        growth: pages of the tokens to be generated.
        most: extents of a row, X.
    """
    wanted = np.zeros(most, bool)
    wanted[: extents_for(prompt)] = True
    wanted[growth.start // EXTENT : extents_for(growth.stop)] = True
    return wanted


class Extents:
    """The extents of one pool, with a count of the rows that own each."""

    def __init__(self, count: int, *, nobodys: bool = True) -> None:
        self._users = np.zeros(count, np.int64)
        self._users[SCRATCH_EXTENT] = nobodys

    @property
    def free(self) -> int:
        """How many extents no row owns."""
        return int((self._users == 0).sum())

    def take(self, wanted: Bool[np.ndarray, "*B X"]) -> Int[np.ndarray, "*B X"]:
        """Returns a table with a free extent wherever `wanted` is True and `SCRATCH_EXTENT` elsewhere.

        Raises:
            InputError: fewer extents are free than wanted.
        """
        if wanted.sum() > self.free:
            raise InputError(f"the pool has {self.free} free extents and {wanted.sum()} are needed: use a larger pool")
        table = np.full(wanted.shape, SCRATCH_EXTENT, np.int32)
        table[wanted] = np.flatnonzero(self._users == 0)[: wanted.sum()]
        self._users[table[wanted]] += 1
        return table

    def share(self, table: Int[np.ndarray, "*B X"]) -> None:
        """Counts one more row for each extent of a table; no row may write to them from then on."""
        np.add.at(self._users, table[table != SCRATCH_EXTENT], 1)

    def shared(self, table: Int[np.ndarray, "*B X"]) -> Bool[np.ndarray, "*B X"]:
        """Returns which extents of a table more than one row owns."""
        return (self._users[table] > 1) & (table != SCRATCH_EXTENT)

    def give_back(self, table: Int[np.ndarray, "*B X"]) -> None:
        """Counts one row less for each extent of a table."""
        np.subtract.at(self._users, table[table != SCRATCH_EXTENT], 1)


def table_for(wanted: Bool[np.ndarray, "B X"]) -> tuple[int, Int[np.ndarray, "B X"]]:
    """Returns the number of extents of a pool that holds `wanted`, and the table of its rows.

    Two rows, of which the second needs one extent; 0 is the scratch extent:

        table_for([[True, True], [True, False]])  ->  4, [[1, 2], [3, 0]]
    """
    has_scratch = not wanted.all()
    count = int(wanted.sum()) + has_scratch
    return count, Extents(count, nobodys=has_scratch).take(wanted)
