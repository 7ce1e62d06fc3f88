"""Cached prefixes on the device's side: how a prompt uses the prefix store, and how a row's cache gets into it.

The core and a row's start call it. Pages stay where they are in the pool, shared by their extents; the other arrays of a row
are copied to host memory. A row never writes to an extent that it shares: what follows a cached prefix goes to extents of its
own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from icejax.cache.pool.extents import SCRATCH_EXTENT, Extents, extents_for, row_extents
from icejax.cache.pool.host_pool import EXTENT, Pool
from icejax.cache.pool.page_format import pool_bytes, pool_shapes
from icejax.cache.shares import saved_spec
from icejax.engine.batch import pages_used
from icejax.engine.buckets import bucket
from icejax.engine.decode.state import DecodeState
from icejax.engine.plan import Plan
from icejax.engine.serving.cropped import layers_out
from icejax.engine.serving.prefix_folder import PrefixFolder, StoredPrefix
from icejax.engine.serving.prefixes import BLOCK, Entry, Prefixes, chain
from icejax.engine.serving.route import Route, pieces, whole_route
from icejax.engine.serving.scheduler import Ticket

LOG = logging.getLogger(__name__)
TAIL = 256  # tokens: the end of a prompt that another prompt probably does not share, such as the question about a document
LEAST = 768  # tokens: shorter texts are not cut before their tail, because computing them again costs little
POOL_SHARE = 0.75  # of the bytes for prefixes that go to the pool; digests and dense layers take the rest


def divided(plan: Plan, memory: int) -> tuple[int, int]:
    """Returns how bytes of host memory for cached prefixes are divided: extents of the pool, and bytes of other arrays."""
    if not plan.pooled:
        return 0, memory
    extent = pool_bytes(pool_shapes(*plan.pool_sizes(1)))
    if not extent:  # extents number the pages on the device, whose codes have at least two bits a channel
        slots = EXTENT * plan.page_size * saved_spec(plan.spec, plan.mesh).num_kv_heads * len(plan.pooled)
        return memory // (slots * sum(plan.spec.planes) // 4), memory
    return int(memory * POOL_SHARE) // extent, int(memory * (1 - POOL_SHARE))


class PrefixCache:
    """The prefix store of a core.

    Attributes:
        prefixes: the entries.
        folder: the entries on the disk; None: no disk is used.
    """

    def __init__(
        self,
        plan: Plan,
        extents: Extents | None,
        most_bytes: int,
        folder: PrefixFolder | None = None,
        *,
        cuts: bool = True,
        agreed: Callable[[int], int] = lambda value: value,
    ) -> None:
        """Begins with an empty store in memory.

        Args:
            plan: the plan of a batch of one row.
            extents: the extents of the pool, of which entries take those that no row needs; None without a pool.
            most_bytes: bytes of the entries' arrays.
            cuts: whether prompts are also stored without their end, for prompts that end otherwise.
            agreed: as in `Core`; called with the bytes of this process's shares of an entry.
        """
        self.folder, self._cuts, self._agreed = folder, cuts, agreed
        self._plan, self._extents, self.prefixes = plan, extents, Prefixes(extents, most_bytes=most_bytes)
        self._evicts = any(policy.evicts for policy in plan.policies)
        # Text never fills sinks that a prompt left empty, and a row that joins a batch counts all of them.
        self._least = plan.policies[plan.pooled[0]].window_layout.sinks if plan.pooled else 0

    def prepare(self, ticket: Ticket) -> None:
        """Sets a ticket's route and the extents that it needs, and forgets entries until so many extents are free."""
        tokens, whole = ticket.request.tokens, whole_route(len(ticket.request.tokens))
        route = self._route(tokens, chain(tokens, ticket.request.salt)) if ticket.request.reads_prefixes else whole
        if self._pages(route) > self._plan.prompt_pages:  # each text behind another wastes a part of a page
            route = whole
        self._set(ticket, route)
        while self._lacks(ticket):
            if self.prefixes.evict(keep=ticket.route.entry):
                continue
            if ticket.route.entry is None:
                return  # rows that decode have the extents
            self._set(ticket, whole)

    def _route(self, tokens: np.ndarray, hashes: Sequence[bytes]) -> Route:
        """Returns the route of a prompt behind the longest cached prefix, and cut where it is worth an entry."""
        entry, held, whole, shared = self.prefixes.find(tokens, hashes)
        stored = None if self.folder is None else self.folder.find(tokens, hashes)
        if stored is not None and stored.length > held:
            entry, held = stored, stored.length
        whole, can_cut, cuts = max(whole, 0 if stored is None else stored.length), self._can_cut(len(tokens)), []
        # In memory an entry that can be cut serves as well as one of its beginning; on the disk only the beginning is found.
        extends = self._cuts and not self._evicts and shared >= self._least
        if extends and whole + BLOCK <= shared and not (can_cut and self.folder is None):
            cuts.append(shared)
            held = min(held, shared - 1)  # the logits behind the beginning are stored too
        tail = len(tokens) - TAIL
        extends = self._cuts and not self._evicts and tail >= self._least
        if extends and not can_cut and tail - max(held, *cuts, 0) > LEAST:
            cuts.append(tail)
        return Route(entry, held, () if held == len(tokens) else (*cuts, len(tokens)), shared)

    def _can_cut(self, tokens: int) -> bool:
        """Says whether the first tokens of a cache of so many tokens can be used alone."""
        return not self._plan.pooled and all(policy.can_trim(tokens) for policy in self._plan.policies)

    def _lacks(self, ticket: Ticket) -> bool:
        return ticket.wanted is not None and ticket.wanted.sum() > self._extents.free

    def _set(self, ticket: Ticket, route: Route) -> None:
        """Sets a ticket's route, and the extents of its own and of the cached prefix that this needs."""
        ticket.route = route
        if not self._plan.pooled:
            return
        growth = range(self._plan.prompt_pages, self._plan.pool.pages)
        pages = self._pages(route)
        if isinstance(route.entry, StoredPrefix):  # if it cannot be read, the whole prompt is computed: maybe more pages
            pages = max(pages, self._pages(whole_route(len(ticket.request.tokens))))
        ticket.wanted = row_extents(pages, growth, most=len(ticket.wanted))
        ticket.shared = None
        if isinstance(route.entry, Entry):
            pages = route.entry.pages  # the last of their extents is shared only if no text follows in it
            shares = np.arange(len(ticket.wanted)) < (pages // EXTENT if route.cuts else extents_for(pages))
            shares &= np.arange(len(ticket.wanted)) < growth.start // EXTENT  # the row writes to the pages in `growth`
            ticket.shared, ticket.wanted = np.where(shares, route.entry.table, SCRATCH_EXTENT), ticket.wanted & ~shares

    def keep(
        self,
        tokens: Sequence[int],
        salt: str,
        count: int,
        row: DecodeState,
        logits: jax.Array,
        *,
        followers: int,
        layers: Any = None,
        behind: Entry | None = None,
        before: Entry | None = None,
    ) -> Entry | None:
        """Puts a row's cache, of the first `count` of its tokens, into the store, and returns the entry; the row continues.

        Args:
            logits: f32[1, V], behind the last of these tokens.
            followers: number of prompts that continue behind these tokens.
            layers: the cropped arrays of the row's layers; None: they are copied from the device.
            behind: the entry in memory with whose tokens the row begins; None: no such entry.
            before: as in `Prefixes.add`.
        """
        cache = layers_out(row.cache.layers, self._plan) if layers is None else layers
        nbytes = self._agreed(logits.nbytes + sum(x.nbytes for x in jax.tree.leaves(cache) if isinstance(x, np.ndarray)))
        if nbytes > self.prefixes.most_bytes:
            LOG.info("a prefix of %d tokens is not stored: its arrays take %d bytes", count, nbytes)
            return None
        table, pages = None, 0
        if self._plan.pooled:
            table, pages = np.array(row.cache.table)[0], pages_used(row, self._plan)
            table = np.where(np.arange(len(table)) < extents_for(pages), table, SCRATCH_EXTENT)
        fields = dict(table=table, pages=pages, logits=np.array(logits), extends=not self._evicts and count >= self._least)
        fields |= dict(can_cut=self._can_cut(count), hashes=chain(tokens[:count], salt), followers=followers)
        entry = Entry(np.array(tokens[:count], np.int32), cache, nbytes, **fields)
        if behind is not None and behind.can_cut and entry.can_cut:
            entry.is_shared, behind.is_shared = True, False
        self.prefixes.add(entry, before=before)
        return entry

    def to_disk(self, entry: Entry, pool: Callable[[], Pool | None]) -> Iterator[None]:
        """Writes an entry to the folder, if two prompts have gone on behind it; stops between two arrays.

        Args:
            pool: returns the pool as it is now.
        """
        if self.folder is not None and entry.followers >= 2:
            if entry.is_written:
                self.folder.touch(entry)
                return
            yield from self.folder.write(entry, pool)
            entry.is_written = True  # also behind an error of the disk, which would probably come again

    def _pages(self, route: Route) -> int:
        """Returns how many prompt pages a row takes that goes a route."""
        if not self._plan.pooled:
            return 0
        size, layout, cuts = self._plan.page_size, self._plan.policies[self._plan.pooled[0]].window_layout, route.cuts
        if route.entry is None:
            done, cuts = cuts[0], cuts[1:]
            pages, used = bucket(done) // size, -(-max(done - layout.sinks - layout.fill, 0) // size)
        else:
            pages, used, done = route.entry.pages, route.entry.pages, route.entry.length
        for cut in cuts:  # a text overwrites the empty pages behind the texts before it
            for start, stop in pieces(done, cut):
                pages = max(pages, used + self._plan.text_slots(stop - start) // size)
                used += -(-(stop - start) // size)
            done = cut
        return pages
