"""Drives one layer's cache policy without a model: prefill, decode steps, flushes and compaction on given q, k and v.

For the policy tests, which compare the attention output with float64 references in this file. Arrays are [B, T, heads, H].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from icejax.cache.pool import allocation, host_pool
from icejax.cache.pool.extents import extents_for
from icejax.cache.pool.page_format import without_codes
from icejax.cache.protocol import CachePolicy, Heads, Lengths, View
from icejax.cache.sizes import CacheSpec
from icejax.ops.attention.causal import causal
from icejax.ops.attention.dense import Scoring
from icejax.ops.pages import tree
from icejax.ops.pages.digests import Digests
from icejax.runtime.host_reads.choose import fetch_backend
from tests import tolerances
from tests.reference.clustered import bands, others, outliers_first

HEADS, KV_HEADS, SIZE = 4, 2, 16
PROMPT, NEW = 256, 512
THETA = 10000.0


@dataclass(frozen=True)
class Programs:
    """A policy's jitted programs after prefill; `traces[0]` counts the traces of `decode`."""

    decode: Callable
    extend: Callable
    flush: Callable
    after_flush: Callable
    compact: Callable
    traces: list[int]


@functools.cache
def programs(policy: CachePolicy, softcap: float | None = None) -> Programs:
    """Returns the programs of `policy`."""
    traces, backend = [0], fetch_backend()

    def view(lengths, pool) -> View:
        """`pool`: the host pool and its table of extents; None without a pool."""
        pages = host_pool.PoolLayer(*pool, None, 0, backend, "float32") if pool is not None else None
        return View(lengths, pages, rerotate=turned, project=projected)

    @functools.partial(jax.jit, donate_argnums=0)
    def decode(state, q, k, v, lengths, pool):
        traces[0] += 1
        heads = Heads(*(x[:, None] for x in (q, k, v)), jnp.ones(len(q), jnp.int32), Scoring(q.shape[-1] ** -0.5, softcap))
        step = policy.decode(state, heads, view(lengths, pool))
        return jax.tree.map(lambda x: x[:, 0], step.attended), step.state, step.tokens

    @functools.partial(jax.jit, donate_argnums=0)
    def extend(state, q, k, v, lengths, new, pool):
        extension = policy.extend(state, Heads(q, k, v, new, Scoring(q.shape[-1] ** -0.5, softcap)), view(lengths, pool))
        return extension.attended, extension.state, extension.pages, extension.used

    def compact(state, pool, lengths):
        count = policy.compact_every // policy.page_size
        pages = without_codes(view(lengths, pool).pool.run(lengths.next_page - count, count))
        compaction = policy.compact(state, pages, View(lengths))
        return compaction.state, compaction.pages

    def flush(state, lengths):
        return policy.flush(state, lengths)

    def after_flush(state, update, lengths):
        return policy.after_flush(state, update, lengths)

    return Programs(decode, extend, jax.jit(flush), jax.jit(after_flush), jax.jit(compact), traces)


def turned(heads: jax.Array, by: jax.Array) -> jax.Array:
    """Shifts heads [B, T, N, H] by positions [B, T], as plain RoPE of base `THETA` does."""
    size = heads.shape[-1]
    angles = by[..., None].astype(jnp.float32) * THETA ** (-jnp.arange(0, size, 2) / size)[None, None, :]
    cos, sin = (f(angles)[:, :, None, :] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(heads, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def output_matrix(heads: int, size: int) -> np.ndarray:
    """Returns a fixed random output projection f32[heads, size, 24]."""
    return np.random.default_rng(7).standard_normal((heads, size, 24)).astype(np.float32)


def projected(heads: jax.Array) -> jax.Array:
    """Projects heads [B, T, N, H] to the layer's output [B, T, 24], with a bias of 1."""
    return jnp.einsum("btnh,nhd->btd", heads, output_matrix(*heads.shape[2:])) + 1.0


@functools.partial(jax.jit, static_argnames=("policy", "spec", "softcap"))
def _prefill(q, k, v, lengths, *, policy, spec, softcap):
    scoring = Scoring(q.shape[-1] ** -0.5, softcap)
    attended = causal(q, k, v, lengths=lengths.seen, window=None, scoring=scoring)
    view = View(Lengths.none(len(q)), rerotate=turned, project=projected)
    prefilled = policy.prefill(policy.init(spec), Heads(q, k, v, lengths.seen, scoring), attended, view)
    return prefilled.state, prefilled.pages


class Layer:
    """One layer's cache under `policy`: prefilled at construction, then stepped or extended.

    Attributes:
        tokens: tokens attended in the newest step, by a query head on average and by any query head of a KV head, f32[2, B].
        lse: log-sum-exp of the newest attention: [B, N] after a step, [B, T, N] after `extend`.
    """

    def __init__(
        self,
        policy: CachePolicy,
        lengths: Sequence[int],
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        *,
        latent: bool = False,
        softcap: float | None = None,
    ) -> None:
        self.policy = policy = policy.for_platform("cpu", latent=latent)
        self.spec = CacheSpec(
            batch_size=len(lengths),
            num_heads=q.shape[2],
            num_kv_heads=k.shape[2],
            head_dim=k.shape[3],
            value_dim=v.shape[3],
            latent=latent,
            prompt_capacity=PROMPT,
            new_capacity=NEW,
            dtype="float32",
        )
        self.lengths = Lengths.of(jnp.asarray(lengths, jnp.int32))
        self.state, pages = _prefill(q, k, v, self.lengths, policy=policy, spec=self.spec, softcap=softcap)
        self.pool = None
        if pages is not None:
            extents = extents_for(policy.pool(self.spec).pages)
            # Reversed: a row's extents are not in the order of the pool.
            table = np.arange(extents * len(lengths), dtype=np.int32).reshape(extents, -1).T[::-1].copy()
            whole = without_codes(pages)
            count, shape = (len(whole), whole.shape[2:]) if len(whole) else (PROMPT // policy.page_size, (KV_HEADS, 0, 0, 0))
            self.table = jnp.asarray(table)
            self.pool = allocation.allocate((table.size, 1, host_pool.EXTENT, *shape), "float32", policy.pool(self.spec).codes)
            self.pool = host_pool.write_pages(self.pool, of_one_layer(pages), self.table, 0)
            self.lengths = replace(self.lengths, next_page=jnp.int32(count))
        self.programs = programs(policy, softcap)

    def step(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Appends one token per row, q, k and v [B, heads, H]; returns the attention output [B, N, H]."""
        (out, self.lse), self.state, self.tokens = self.programs.decode(self.state, q, k, v, self.lengths, self._pool)
        self.lengths = replace(self.lengths, clock=self.lengths.clock + 1)
        clock = int(self.lengths.clock)
        if self.pool is not None and clock % self.policy.page_size == 0:
            page, update = self.programs.flush(self.state, self.lengths)
            self.state = self.programs.after_flush(self.state, update, self.lengths)
            page = jax.tree.map(lambda x: x[None, None], page)
            self.pool = host_pool.write_pages(self.pool, page, self.table, self.lengths.next_page)
            self.lengths = replace(self.lengths, next_page=self.lengths.next_page + 1)
        compact_every = 0 if self.pool is None else self.policy.pool(self.spec).compact_every
        if compact_every and clock % compact_every == 0:
            count = self.policy.compact_every // self.policy.page_size
            self.state, pages = self.programs.compact(self.state, self._pool, self.lengths)
            self.pool = host_pool.write_pages(self.pool, of_one_layer(pages), self.table, self.lengths.next_page - count)
        return np.asarray(out)

    def join(self, clock: int) -> None:
        """Moves the rows into a batch whose clock is at `clock`; call it before the first step."""
        self.state = self.policy.joining(self.state, self.lengths, jnp.int32(clock))
        pages = self.lengths.next_page + clock // self.policy.page_size
        self.lengths = Lengths(self.lengths.origin - clock, jnp.int32(clock), pages)

    @property
    def _pool(self) -> tuple[jax.Array, jax.Array] | None:
        return None if self.pool is None else (self.pool, self.table)

    def extend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, new: Sequence[int]) -> np.ndarray:
        """Appends `new` tokens per row, right-padded; returns the attention output [B, T, N, H]."""
        count = jnp.asarray(new, jnp.int32)
        (out, self.lse), self.state, pages, used = self.programs.extend(self.state, q, k, v, self.lengths, count, self._pool)
        if pages is not None:
            self.pool = host_pool.write_pages(self.pool, of_one_layer(pages), self.table, self.lengths.next_page)
        self.lengths = Lengths.of(self.lengths.seen + count, self.lengths.next_page + (used or 0))
        return np.asarray(out)


def of_one_layer(pages):
    """Returns pages [M, B, ...], with their codes if they have any, as those of one layer, [M, 1, B, ...]."""
    return jax.tree.map(lambda x: x[:, None], pages)


def stored(pool: Any, table: jax.Array) -> np.ndarray:
    """Returns the pages of each row of an fp32 pool, f32[B, P, L, K, planes, p, W]."""
    pages = np.asarray(without_codes(pool)).view(np.float32)[np.asarray(table)].swapaxes(2, 3)  # B, X, 64, L, ...
    return pages.reshape(len(pages), -1, *pages.shape[3:])


def uneven(q: np.ndarray, k: np.ndarray, by: tuple[float, float, float] = (11, 0.05, 40)) -> tuple[np.ndarray, np.ndarray]:
    """Returns q and k with three key channels scaled by `by` and those query channels by 1/`by`: attention is unchanged."""
    factors = np.ones(k.shape[-1], np.float32)
    factors[[3, 7, 11]] = by
    return q / factors, k * factors


def draw(
    lengths: Sequence[int], steps: int, *, seed: int = 0, sharp: float = 1.0, kv_heads: int = KV_HEADS, sizes=(SIZE, SIZE)
):
    """Returns random q, k, v of a prompt, [B, PROMPT, heads, H], and of decode steps, [steps, B, heads, H].

    `sharp` scales the queries; `sizes` are the channels of keys and of values.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    batch, shapes = len(lengths), ((HEADS, sizes[0]), (kv_heads, sizes[0]), (kv_heads, sizes[1]))
    prompt = [normal(batch, PROMPT, *shape) for shape in shapes]
    new = [normal(steps, batch, *shape) for shape in shapes]
    prompt[0], new[0] = prompt[0] * sharp, new[0] * sharp
    return prompt, new


def dense(prompt, new, lengths: Sequence[int], step: int, softcap: float | None = None) -> np.ndarray:
    """Returns dense attention [B, N, H] of the token of decode step `step`, in float64."""
    return np.stack(
        [
            attention(
                new[0][step, row],
                *(np.concatenate([p[row, :length], n[: step + 1, row]]) for p, n in zip(prompt[1:], new[1:], strict=True)),
                softcap,
            )
            for row, length in enumerate(lengths)
        ]
    )


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, softcap: float | None = None) -> np.ndarray:
    """Returns the attention [N, H] of one token's queries [N, H] over keys and values [S, K, H], in float64."""
    return attended(q, k, v, softcap)[0]


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, softcap: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns `attention`, and the log-sum-exp [N] of its scores."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out, lse = np.zeros((len(q), v.shape[2])), np.zeros(len(q))
    for head in range(len(q)):
        kv = head // (len(q) // k.shape[1])
        scores = k[:, kv] @ q[head] / q.shape[1] ** 0.5
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[head] = weights @ v[:, kv] / weights.sum()
        lse[head] = scores.max() + np.log(weights.sum())
    return out, lse


def assert_digests(levels: Sequence[Digests], row: int, head: int, pages: list[np.ndarray]) -> None:
    """Asserts that a row and head's digests equal float64 digests of `pages`, keys [p, H] each, at every tree level."""
    keys = np.concatenate(pages).astype(np.float64)
    page_tokens = np.split(np.arange(len(keys)), np.cumsum([len(page) for page in pages])[:-1])
    nodes = [outliers_first(keys, list(page[:, None])) for page in page_tokens]
    for level in levels:
        for node, tokens in enumerate(nodes):
            assert int(level.count[row, head, node]) == len(tokens)
            if len(tokens):
                inner = keys[others(tokens)]
                expected = (*keys[tokens[[0, min(1, len(tokens) - 1)]]], inner.mean(0), bands(len(inner[0])) @ inner.var(0))
                vectors = (x.data for x in (*level.outliers, level.mean))
                for actual, reference in zip((*vectors, level.width), expected, strict=True):
                    np.testing.assert_allclose(
                        actual[row, head, node], reference, rtol=tolerances.DIGEST, atol=tolerances.DIGEST
                    )
        nodes = [outliers_first(keys, nodes[i : i + tree.FAN_OUT]) for i in range(0, len(nodes), tree.FAN_OUT)]
