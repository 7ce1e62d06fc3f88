"""A policy on a model: what it answers, and how far its attention is from the exact one."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from bench.compare.text import Text
from bench.needle.reader import Reader
from bench.sizes import fetched_bytes
from icejax.cache.pool.extents import SCRATCH_EXTENT
from icejax.cache.protocol import CachePolicy, Heads, KVCache
from icejax.engine.decode_step import view_of
from icejax.engine.plan import Plan, reports
from icejax.models.decoder import CausalLM

STEPS = 6  # of an answer, in which attention is compared: five digits and a full stop; no page leaves the window meanwhile


@dataclass(frozen=True)
class Measured:
    """What a policy does to the attention of a few steps.

    Attributes:
        errors: relative L2 error of a head's output, f64[steps, layers, heads].
        whole: of the output of all heads of a layer, f64[steps, layers].
        tokens: how many were attended to exactly, by a query head and by any of a KV head, f64[steps, layers, 2].
    """

    errors: np.ndarray
    whole: np.ndarray
    tokens: np.ndarray


class Subject(Reader):
    """A policy that reads texts which have attended already.

    Attributes:
        kept_s: seconds it took to keep the newest text.
    """

    def __init__(self, model: CausalLM, policy: CachePolicy, *, prompt_tokens: int, new_tokens: int) -> None:
        super().__init__(model, policy, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
        self.kept_s = 0.0

    def take(self, text: Text) -> None:
        """Keeps of a text what the policy keeps."""
        if not self.kept_s:  # what is compiled is not timed
            self.read(text.tokens, text.under(self._plan))
            self.ask([0], 1)
            self.seconds.clear()
        started = time.perf_counter()
        self.read(text.tokens, text.under(self._plan))
        jax.block_until_ready(self._state)
        self.kept_s = time.perf_counter() - started

    def measure(self, text: Text) -> Measured:
        """Compares the attention of the first tokens behind the text taken, which `text` has there too, with the exact one."""
        cache, found = self._state.cache, []
        first = int(cache.lengths.seen[0])
        for at in range(first, min(len(text.tokens), first + STEPS)):
            cache, *values = _probe(self._model, cache, self._pool, text.behind, at - text.base, plan=self._plan)
            found.append([np.asarray(value, np.float64) for value in values])
        return Measured(*(np.stack(values) for values in zip(*found, strict=True)))

    def sizes(self) -> dict[str, int]:
        """Returns bytes of the cache on the device, of what describes it there, and of the pool's pages of the text."""
        told, state = reports(self._plan, self._state.cache), self._state.cache
        pages = 0 if state.table is None else int((np.asarray(state.table) != SCRATCH_EXTENT).sum())
        return dict(
            device_bytes=sum(x.nbytes for x in jax.tree.leaves(state.layers)),
            digest_bytes=sum(each.digest_bytes for each in told),
            host_bytes=0 if self._pool is None else pages * (self._pool.nbytes // len(self._pool)),
        )

    def timed(self, question: Sequence[int], count: int) -> tuple[list[int], float, list[float], float]:
        """Returns an answer as `ask` does, seconds to its first token and of its steps, and bytes moved in a step."""
        before, moved, started = len(self.seconds), len(self.moved), time.perf_counter()
        answer = self.ask(question, count)
        took, steps = time.perf_counter() - started, self.seconds[before:]
        return answer, took - sum(steps[1:]), steps, float(np.mean(self.moved[moved:])) * fetched_bytes(self._plan)


@functools.partial(jax.jit, static_argnames="plan")
def _probe(model: CausalLM, cache: KVCache, pool: jax.Array | None, behind, at: jax.Array, *, plan: Plan):
    """Decodes the token at a place behind the text; returns the cache, and what `Measured` says of a step."""
    lengths, states, shared, errors, whole, tokens = cache.lengths, [], None, [], [], []
    steps = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, at, 1, axis=1), behind)
    for i, (layer, (heads, (exact, _))) in enumerate(zip(model.model.layers, steps, strict=True)):
        own = Heads(*heads, jnp.ones(1, jnp.int32), layer.scoring)
        view = view_of(layer, lengths, plan.pages(i, pool, cache.table), shared)
        outcome = plan.policies[i].decode(cache.layers[i], own, view)
        shared = outcome.shared or shared
        states.append(outcome.state)
        apart = (outcome.attended.out - exact)[0, 0].astype(jnp.float32)
        norm = jnp.linalg.norm(exact[0, 0].astype(jnp.float32), axis=-1)
        errors.append(jnp.linalg.norm(apart, axis=-1) / norm)
        whole.append(jnp.linalg.norm(apart) / jnp.linalg.norm(norm))
        tokens.append(outcome.tokens[:, 0])
    return (
        KVCache(tuple(states), replace(lengths, clock=lengths.clock + 1), cache.table),
        jnp.stack(errors),
        jnp.stack(whole),
        jnp.stack(tokens),
    )
