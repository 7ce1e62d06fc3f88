"""Cached prefixes on the device's side: how a prompt uses the prefix store, and how a row's cache gets into it.

The core calls it. Pages stay where they are in the pool, shared by their extents; the other arrays of a row are copied to host
memory. A row never writes to an extent that it shares: what follows a beginning goes to extents of its own.
"""

from __future__ import annotations

import logging
import math

import jax
import jax.numpy as jnp
import numpy as np

from icejax.cache.pool.extents import SCRATCH_EXTENT, Extents, extents_for, row_extents
from icejax.cache.pool.host_pool import EXTENT
from icejax.engine.batch import pages_used
from icejax.engine.buckets import bucket
from icejax.engine.decode.step import DecodeState, Step
from icejax.engine.plan import Plan
from icejax.engine.serving.cropped import crop
from icejax.engine.serving.prefixes import BLOCK, Entry, Prefixes
from icejax.engine.serving.scheduler import Ticket
from icejax.engine.serving.start import Route, pieces

LOG = logging.getLogger(__name__)
POOL_SHARE = 0.75  # of the bytes for beginnings that go to the pool; digests and dense layers take the rest


def divided(plan: Plan, memory: int) -> tuple[int, int]:
    """Returns how bytes of host memory for cached prefixes are divided: extents of the pool, and bytes of other arrays."""
    if not plan.pooled:
        return 0, memory
    extent = math.prod(plan.pool_shape(1)) * jnp.dtype(plan.pool_dtype).itemsize
    return int(memory * POOL_SHARE) // extent, int(memory * (1 - POOL_SHARE))


class PrefixCache:
    """The prefix store of a core.

    Attributes:
        prefixes: the entries.
    """

    def __init__(self, plan: Plan, extents: Extents | None, most_bytes: int) -> None:
        """Begins with an empty store.

        Args:
            plan: the plan of a batch of one row.
            extents: the extents of the pool, of which entries take those that no row needs; None without a pool.
            most_bytes: bytes of the entries' arrays.
        """
        self._plan, self._extents, self.prefixes = plan, extents, Prefixes(extents, most_bytes=most_bytes)
        self._evicts = any(policy.evicts for policy in plan.policies)

    def prepare(self, ticket: Ticket) -> None:
        """Sets a ticket's route and the extents that it needs, and forgets entries until so many extents are free."""
        tokens, salt = ticket.request.tokens, ticket.request.salt
        entry, shared = self.prefixes.find(tokens, salt)
        held = 0 if entry is None else len(entry.tokens)
        is_cut = held + BLOCK <= shared < len(tokens) and not self._evicts
        cuts = (shared, len(tokens)) if is_cut else (len(tokens),)
        whole, route = Route(None, (len(tokens),)), Route(entry, () if held == len(tokens) else cuts)
        if self._pages(route) > self._plan.prompt_pages:  # each text behind another wastes a part of a page
            route = whole
        self._set(ticket, route)
        while self._lacks(ticket):
            if self.prefixes.evict(keep=ticket.route.entry):
                continue
            if ticket.route.entry is None:
                return  # rows that decode have the extents
            self._set(ticket, whole)

    def _lacks(self, ticket: Ticket) -> bool:
        return ticket.wanted is not None and ticket.wanted.sum() > self._extents.free

    def _set(self, ticket: Ticket, route: Route) -> None:
        """Sets a ticket's route, and the extents of its own and of the cached prefix that this needs."""
        ticket.route = route
        if not self._plan.pooled:
            return
        growth = range(self._plan.prompt_pages, self._plan.pool.pages)
        ticket.wanted = row_extents(self._pages(route), growth, most=len(ticket.wanted))
        ticket.shared = None
        if route.entry is not None:
            pages = route.entry.pages  # the last of their extents is shared only if no text follows in it
            shares = np.arange(len(ticket.wanted)) < (pages // EXTENT if route.cuts else extents_for(pages))
            ticket.shared, ticket.wanted = np.where(shares, route.entry.table, SCRATCH_EXTENT), ticket.wanted & ~shares

    def keep(self, tokens: np.ndarray, salt: str, count: int, row: DecodeState, step: Step) -> None:
        """Puts a row's cache, of the first `count` of its tokens, into the store; the row goes on."""
        cache = jax.tree.map(lambda x: crop(np.asarray(x)), row.cache.layers)
        nbytes = sum(x.nbytes for x in jax.tree.leaves(cache) if isinstance(x, np.ndarray))
        if nbytes > self.prefixes.most_bytes:
            LOG.info("a prefix of %d tokens is not stored: its arrays take %d bytes", count, nbytes)
            return
        table, pages = None, 0
        if self._plan.pooled:
            table, pages = np.array(row.cache.table)[0], pages_used(row, self._plan)
            table = np.where(np.arange(len(table)) < extents_for(pages), table, SCRATCH_EXTENT)
        fields = dict(table=table, pages=pages, logits=np.array(step.logits), extends=not self._evicts)
        self.prefixes.add(Entry(np.array(tokens[:count]), cache, nbytes, **fields), salt)

    def _pages(self, route: Route) -> int:
        """Returns how many prompt pages a row takes that goes a route."""
        if not self._plan.pooled:
            return 0
        if route.entry is None:
            pages, done, cuts = bucket(route.cuts[0]) // self._plan.page_size, route.cuts[0], route.cuts[1:]
        else:
            pages, done, cuts = route.entry.pages, len(route.entry.tokens), route.cuts
        for cut in cuts:
            for start, stop in pieces(done, cut):
                pages += self._plan.text_slots(stop - start) // self._plan.page_size
            done = cut
        return pages
