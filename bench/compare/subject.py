"""A policy on a model, for `bench.compare`: its answers, and the error of its attention against exact attention."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from bench.compare.text import Text
from bench.needle.reader import Reader
from bench.steps.sizes import fetched_bytes
from icejax.cache.pool.extents import SCRATCH_EXTENT
from icejax.cache.pool.host_pool import PoolLayer
from icejax.cache.pool.page_format import pool_bytes, without_codes
from icejax.cache.protocol import CachePolicy, Heads, KVCache, Lengths
from icejax.engine.decode.layer import view_of
from icejax.engine.plan import reports
from icejax.models.decoder import CausalLM, DecoderLayer

STEPS = 6  # compared steps of an answer, five digits and a full stop; too few for a page to leave the window


@dataclass(frozen=True)
class Measured:
    """Errors of a policy's attention over a few steps.

    Attributes:
        errors: relative L2 error of a head's output, f64[steps, layers, heads].
        whole: relative L2 error of the output of all heads of a layer, f64[steps, layers].
        tokens: mean number of tokens attended to exactly, by a query head and by any query head of a KV head, f64[steps,
            layers, 2].
        estimates: the policy's own estimate of the error, f64[steps, layers]; NaN where it has none.
    """

    errors: np.ndarray
    whole: np.ndarray
    tokens: np.ndarray
    estimates: np.ndarray


class Subject(Reader):
    """A policy that takes texts whose exact attention is already computed.

    Attributes:
        kept_s: seconds in which the policy built its cache of the newest text.
    """

    def __init__(self, model: CausalLM, policy: CachePolicy, *, prompt_tokens: int, new_tokens: int) -> None:
        super().__init__(model, policy, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
        self.kept_s = 0.0

    def take(self, text: Text) -> None:
        """Builds the policy's cache of a text."""
        if not self.kept_s:  # compiles first, so the timed read does not
            self.read(text.tokens, text.under(self._plan))
            self.ask([0], 1)
            self.seconds.clear()
        started = time.perf_counter()
        self.read(text.tokens, text.under(self._plan))
        jax.block_until_ready(self._state)
        self.kept_s = time.perf_counter() - started

    def measure(self, text: Text, steps: int = STEPS, options: Mapping[str, float] | None = None) -> Measured:
        """Returns errors of the first tokens after the captured text; `text` is the same text with these tokens after it.

        Args:
            steps: most tokens, at most 16, because no page leaves the window here.
            options: replace options of the policy on which its state does not depend; one program serves all their values.
        """
        cache, by_step = self._state.cache, []
        first, table = int(cache.lengths.seen[0]), cache.table
        for position in range(first, min(len(text.tokens), first + steps)):
            states, shared, values = [], None, []
            for i, (layer, behind) in enumerate(zip(self._model.model.layers, text.behind, strict=True)):
                pages, index = self._plan.pages(i, self._pool, table), np.int32(position - text.base)
                inputs = layer, cache.layers[i], behind, index, cache.lengths, pages, shared, options or {}
                state, shared, *layer_values = _probe(*inputs, policy=self._plan.policies[i])
                states.append(state)
                values.append(layer_values)
            cache = KVCache(tuple(states), replace(cache.lengths, clock=cache.lengths.clock + 1), table)
            by_step.append([np.asarray(jnp.stack(x), np.float64) for x in zip(*values, strict=True)])
        return Measured(*(np.stack(values) for values in zip(*by_step, strict=True)))

    @property
    def extents(self) -> int:
        """Number of extents of the taken text in the pool; 0 without a pool."""
        table = self._state.cache.table
        return 0 if table is None else int((np.asarray(table) != SCRATCH_EXTENT).sum())

    def sizes(self) -> dict[str, int]:
        """Returns bytes of the cache on the device, of its digests there, and of the text's pages in the pool."""
        layer_reports, state, extents = reports(self._plan, self._state.cache), self._state.cache, self.extents
        return dict(
            device_bytes=sum(x.nbytes for x in jax.tree.leaves(state.layers)),
            digest_bytes=sum(report.digest_bytes for report in layer_reports),
            host_bytes=extents * (pool_bytes(self._pool) // len(without_codes(self._pool))) if pool_bytes(self._pool) else 0,
        )

    def timed(self, question: Sequence[int], count: int) -> tuple[list[int], float, list[float], float]:
        """Returns an answer as `ask` does, seconds to its first token, seconds of each step, and mean bytes moved per step."""
        first_step, first_moved, started = len(self.seconds), len(self.moved), time.perf_counter()
        answer = self.ask(question, count)
        duration, steps = time.perf_counter() - started, self.seconds[first_step:]
        return answer, duration - sum(steps[1:]), steps, float(np.mean(self.moved[first_moved:])) * fetched_bytes(self._plan)


@functools.partial(jax.jit, static_argnames="policy")
def _probe(
    layer: DecoderLayer,
    state,
    behind,
    index: jax.Array,
    lengths: Lengths,
    pages: PoolLayer | None,
    shared,
    options: Mapping[str, float],
    *,
    policy: CachePolicy,
):
    """Decodes the token number `index` after the text in one layer; returns its state, what it shares, and its `Measured`."""
    policy = copy.copy(policy)
    vars(policy).update((name, value) for name, value in options.items() if hasattr(policy, name))  # unchecked: they are traced
    heads, (exact, _) = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index, 1, axis=1), behind)
    token_heads = Heads(*heads, jnp.ones(1, jnp.int32), layer.scoring)
    outcome = policy.decode(state, token_heads, view_of(layer, lengths, lengths.seen + 1, pages, shared))
    difference = (outcome.attended.out - exact)[0, 0].astype(jnp.float32)
    norm = jnp.linalg.norm(exact[0, 0].astype(jnp.float32), axis=-1)
    errors, whole = jnp.linalg.norm(difference, axis=-1) / norm, jnp.linalg.norm(difference) / jnp.linalg.norm(norm)
    estimates = policy.report(outcome.state, replace(lengths, clock=lengths.clock + 1)).estimates
    estimate = jnp.float32(jnp.nan) if estimates is None else estimates[0, 0]
    return outcome.state, outcome.shared or shared, errors, whole, outcome.tokens[:, 0], estimate
