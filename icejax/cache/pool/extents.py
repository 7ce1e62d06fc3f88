"""Which extents of a pool are whose: a row takes as many as its tokens need, and gives them back."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int

from icejax.cache.pool.host_pool import EXTENT
from icejax.checks.errors import InputError

SCRATCH_EXTENT = 0  # where there are rows that do not need all: what is written where they have no extent goes here


def extents_for(pages: int) -> int:
    """Returns how many extents hold so many pages."""
    return -(-pages // EXTENT)


def row_extents(prompt: int, growth: range, *, most: int) -> Bool[np.ndarray, " X"]:
    """Returns which of the `most` extents of a row it needs: those of `prompt` pages, and of pages that will come."""
    wanted = np.zeros(most, bool)
    wanted[: extents_for(prompt)] = True
    wanted[growth.start // EXTENT : extents_for(growth.stop)] = True
    return wanted


class Extents:
    """The extents of one pool, and how many rows have each."""

    def __init__(self, count: int, *, nobodys: bool = True) -> None:
        self._users = np.zeros(count, np.int64)
        self._users[SCRATCH_EXTENT] = nobodys

    @property
    def free(self) -> int:
        """How many extents no row has."""
        return int((self._users == 0).sum())

    def take(self, wanted: Bool[np.ndarray, "*B X"]) -> Int[np.ndarray, "*B X"]:
        """Returns a table with extents of their own where rows want them, and nobody's elsewhere.

        Raises:
            InputError: there are too few.
        """
        if wanted.sum() > self.free:
            raise InputError(f"{wanted.sum()} extents of the pool are needed and {self.free} are free: use a larger pool")
        table = np.full(wanted.shape, SCRATCH_EXTENT, np.int32)
        table[wanted] = np.flatnonzero(self._users == 0)[: wanted.sum()]
        self._users[table[wanted]] += 1
        return table

    def share(self, table: Int[np.ndarray, "*B X"]) -> None:
        """Counts one more row for every extent of a table; none of them is to be written any more."""
        np.add.at(self._users, table[table != SCRATCH_EXTENT], 1)

    def shared(self, table: Int[np.ndarray, "*B X"]) -> Bool[np.ndarray, "*B X"]:
        """Returns which extents of a table more than one row has."""
        return (self._users[table] > 1) & (table != SCRATCH_EXTENT)

    def give_back(self, table: Int[np.ndarray, "*B X"]) -> None:
        """Counts one row less for every extent of a table."""
        np.subtract.at(self._users, table[table != SCRATCH_EXTENT], 1)


def table_for(wanted: Bool[np.ndarray, "B X"]) -> tuple[int, Int[np.ndarray, "B X"]]:
    """Returns how many extents a pool needs for all that rows want, and their table."""
    nobodys = not wanted.all()
    count = int(wanted.sum()) + nobodys
    return count, Extents(count, nobodys=nobodys).take(wanted)
