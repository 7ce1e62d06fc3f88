"""The prefix store: caches of prefixes in host memory, for prompts with the same prefix.

The core asks it before a prompt is prefilled, and gives it every prompt's cache. A page holds tokens of many positions, so an
entry is used whole: it serves the prompts that begin with all of its tokens. A beginning that two prompts share becomes an
entry of its own when the second one comes, so that a document serves every question from the third on.

Tokens are found by a chain of SHA-256 over blocks of 256 tokens, which begins with a salt: callers with other salts share no
entry, so none can tell by the time of an answer what others asked (CVE-2025-46570).

Example: the document D of 1,000 tokens and the question A. `D A` is prefilled and stored. `D B` shares 3 blocks with it: its
first 768 tokens are prefilled and stored, then the rest. `D C` finds these 768 tokens, and only the others are computed.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from icejax.cache.pool.extents import Extents

BLOCK = 256  # tokens
MOST_SEEN = 2**16  # blocks of earlier prompts that are remembered by their hash


@dataclass(eq=False)
class Entry:
    """A cached prefix.

    Attributes:
        tokens: its token ids, i32[T].
        cache: the arrays of a row, or a process's shares of them, cropped and in host memory; the store does not look at them.
        nbytes: bytes of `cache`.
        table: i32[X], extents of its pages; None without a pool.
        pages: number of pages in use.
        logits: f32[1, V], the logits behind its last token, for a prompt that is the entry.
        extends: whether other text may follow; False if the cache has evicted tokens, which this text would miss.
        key: the hash of its salt and whole blocks.
        followers: number of prompts that went on behind it.
        is_written: whether it is on the disk, or could not be written.
    """

    tokens: np.ndarray
    cache: Any
    nbytes: int
    table: np.ndarray | None
    pages: int
    logits: Any
    extends: bool
    key: bytes
    followers: int
    is_written: bool = False

    @property
    def length(self) -> int:
        """Number of its tokens."""
        return len(self.tokens)


class Prefixes:
    """Entries by their first blocks. The least recently used go when room is short.

    Attributes:
        most_bytes: bytes of the entries' arrays.
        hits: number of prompt tokens that came from entries.
    """

    def __init__(self, extents: Extents | None, *, most_bytes: int) -> None:
        """Begins with an empty store."""
        self._extents, self.most_bytes = extents, most_bytes
        self._entries: OrderedDict[Entry, None] = OrderedDict()  # the last used at the end
        self._by_blocks: dict[bytes, list[Entry]] = {}
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self.hits = 0

    def find(self, tokens: np.ndarray, hashes: Sequence[bytes]) -> tuple[Entry | None, int]:
        """Returns the longest entry that a prompt begins with, and how many of its first tokens an earlier prompt had too.

        Args:
            hashes: the prompt's, from `chain`.
        """
        best = None
        for count, key in enumerate(hashes):
            for entry in self._by_blocks.get(key, ()):
                fits = (0 if best is None else len(best.tokens)) < len(entry.tokens) <= len(tokens)
                fits = fits and (entry.extends or len(entry.tokens) == len(tokens))
                if fits and np.array_equal(entry.tokens[count * BLOCK :], tokens[count * BLOCK : len(entry.tokens)]):
                    best = entry
        shared = max((count for count, key in enumerate(hashes) if key in self._seen), default=0) * BLOCK
        if best is not None:
            self._entries.move_to_end(best)
        return best, min(shared, len(tokens) - 1)

    def see(self, hashes: Sequence[bytes]) -> None:
        """Remembers a prompt's blocks."""
        for key in hashes[1:]:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)

    def add(self, entry: Entry) -> None:
        """Keeps an entry of at most `most_bytes`, unless it is there, and shares its extents."""
        if any(np.array_equal(other.tokens, entry.tokens) for other in self._by_blocks.get(entry.key, ())):
            return
        if entry.table is not None:
            self._extents.share(entry.table)
        self._entries[entry] = None
        self._by_blocks.setdefault(entry.key, []).append(entry)
        while self.nbytes > self.most_bytes:
            self.evict()

    def evict(self, keep: Entry | None = None) -> bool:
        """Forgets the least recently used entry but `keep`; False if no other is left."""
        entry = next((entry for entry in self._entries if entry is not keep), None)
        if entry is None:
            return False
        del self._entries[entry]
        self._by_blocks[entry.key].remove(entry)
        if not self._by_blocks[entry.key]:
            del self._by_blocks[entry.key]
        if entry.table is not None:
            self._extents.give_back(entry.table)
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the entries' arrays."""
        return sum(entry.nbytes for entry in self._entries)


def chain(tokens: Sequence[int] | np.ndarray, salt: str) -> list[bytes]:
    """Returns the hashes of the salt alone, and behind each whole block of tokens."""
    hashes = [hashlib.sha256(salt.encode()).digest()]
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        block = np.ascontiguousarray(tokens[start : start + BLOCK], "<i4").tobytes()
        hashes.append(hashlib.sha256(hashes[-1] + block).digest())
    return hashes
