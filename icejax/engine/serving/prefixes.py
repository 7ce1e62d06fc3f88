"""The prefix store: caches of prefixes in host memory, for prompts with the same prefix.

The core asks it before a prompt is prefilled, and gives it every prompt's cache. A full cache has its tokens by position, so
its entry serves every prompt that shares its first tokens: the others are cut off. A page holds tokens of many positions, so an
entry with pages serves only the prompts that begin with all of its tokens. Such a cache is therefore stored twice, also without
the prompt's end, where a question about a document stands. A beginning that two prompts share becomes an entry of its own when
the second one comes.

Tokens are found by a chain of SHA-256 over blocks of 256 tokens, which begins with a salt: callers with other salts share no
entry, so none can tell by the time of an answer what others asked (CVE-2025-46570).

Example: the document D of 8,000 tokens, and questions A, B and C of 50 tokens. Of `D A` the first 7,794 tokens are stored, and
all 8,050. `D B` begins with the first of these, and 256 tokens are computed. If A had 600 tokens, the entries would have
8,344 and 8,600 tokens. `D B` would begin with nothing, and its first 7,936 tokens (31 blocks) would be stored, for `D C`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from icejax.cache.pool.extents import Extents

BLOCK = 256  # tokens
MOST_SEEN = 2**16  # blocks of earlier prompts that are remembered by their hash
FAVOURED = 0.75  # of the bytes: up to here, entries that several prompts begin with stay before all others


@dataclass(eq=False)
class Entry:
    """A cached prefix.

    Attributes:
        tokens: its token ids, i32[T].
        cache: the arrays of a row, or a process's shares of them, cropped and in host memory; the store does not look at them.
        nbytes: bytes of `cache` and `logits`.
        table: i32[X], extents of its pages; None without a pool.
        pages: number of pages in use.
        logits: f32[1, V], the logits behind its last token, for a prompt that is the entry.
        extends: whether other text may follow; False if the cache has evicted tokens, which this text would miss.
        can_cut: whether other text may follow its first tokens alone.
        hashes: the chain of its salt and whole blocks.
        followers: number of prompts that went on behind it.
        is_shared: whether another entry gave some of its tokens and both can be cut: it serves in the place of that one.
        is_written: whether it is on the disk, or could not be written.
    """

    tokens: np.ndarray
    cache: Any
    nbytes: int
    table: np.ndarray | None
    pages: int
    logits: Any
    extends: bool
    can_cut: bool
    hashes: Sequence[bytes]
    followers: int
    is_shared: bool = False
    is_written: bool = False

    @property
    def length(self) -> int:
        """Number of its tokens."""
        return len(self.tokens)

    @property
    def key(self) -> bytes:
        """The hash of its salt and whole blocks."""
        return self.hashes[-1]

    @property
    def found_by(self) -> Sequence[bytes]:
        """The hashes of the blocks behind which a prompt finds it."""
        return self.hashes[1:] if self.can_cut and len(self.hashes) > 1 else self.hashes[-1:]

    @property
    def is_favoured(self) -> bool:
        """Whether two prompts begin with it, or with a part of it that can be cut."""
        return self.is_shared or self.followers >= 2

    def serves(self, tokens: np.ndarray, start: int) -> int:
        """Returns how many of a prompt's first tokens it can give; the first `start` are known to be its own."""
        differ = np.flatnonzero(self.tokens[start : len(tokens)] != tokens[start : self.length])
        same = start + int(differ[0]) if len(differ) else min(self.length, len(tokens))
        if same == self.length and (self.extends or same == len(tokens)):
            return same
        return min(same, len(tokens) - 1) if self.can_cut and start else 0  # the last token's logits are to be computed


class Found(NamedTuple):
    """What the store has for a prompt.

    Attributes:
        entry: the entry to begin with; None: there is none.
        held: how many of the prompt's first tokens it gives.
        whole: the tokens of the longest entry that the prompt begins with.
        shared: how many of its first tokens an earlier prompt had too, in whole blocks.
    """

    entry: Entry | None
    held: int
    whole: int
    shared: int


class Prefixes:
    """Entries by their blocks. The least recently used go when room is short, those of a single prompt first.

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

    def find(self, tokens: np.ndarray, hashes: Sequence[bytes]) -> Found:
        """Returns what a prompt can begin with: the longest whole entry, or one that gives a block more when it is cut.

        Args:
            hashes: the prompt's, from `chain`.
        """
        whole, cut, met = (None, 0), (None, 0), set()
        for count in reversed(range(len(hashes))):
            for entry in self._by_blocks.get(hashes[count], ()):
                if entry in met:  # behind more blocks
                    continue
                met.add(entry)
                given = entry.serves(tokens, count * BLOCK)
                if given == entry.length and given > whole[1]:
                    whole = entry, given
                elif given > cut[1]:
                    cut = entry, given
        shared = max((count for count, key in enumerate(hashes) if key in self._seen), default=0) * BLOCK
        best, held = cut if cut[1] >= whole[1] + BLOCK else whole
        if best is not None:
            self._entries.move_to_end(best)
        return Found(best, held, whole[1], min(shared, len(tokens) - 1))

    def see(self, hashes: Sequence[bytes]) -> None:
        """Remembers a prompt's blocks."""
        for key in hashes[1:]:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)

    def add(self, entry: Entry, *, before: Entry | None = None) -> None:
        """Keeps an entry of at most `most_bytes`, unless it is there, and shares its extents.

        Args:
            before: an entry that is worth more, the prompt without its end; None: no other is.
        """
        if any(np.array_equal(other.tokens, entry.tokens) for other in self._by_blocks.get(entry.key, ())):
            return
        if entry.table is not None:
            self._extents.share(entry.table)
        self._entries[entry] = None
        if before in self._entries:
            self._entries.move_to_end(before)
        for key in entry.found_by:
            self._by_blocks.setdefault(key, []).append(entry)
        while self.nbytes > self.most_bytes:
            self.evict()

    def evict(self, keep: Entry | None = None) -> bool:
        """Forgets an entry but `keep`; False if no other is left.

        It is the least recently used one of those that a single prompt begins with, unless the others have most of the bytes.
        """
        others = [entry for entry in self._entries if entry is not keep]
        favoured = [entry for entry in others if entry.is_favoured]
        rest = [entry for entry in others if not entry.is_favoured]
        are_many = sum(entry.nbytes for entry in favoured) > FAVOURED * self.nbytes
        entry = next(iter(favoured if are_many else rest or others), None)
        if entry is None:
            return False
        del self._entries[entry]
        for key in entry.found_by:
            self._by_blocks[key].remove(entry)
            if not self._by_blocks[key]:
                del self._by_blocks[key]
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
