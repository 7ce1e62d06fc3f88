"""One layer's cache without a model: prefill, steps and flushes on given queries, keys and values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from icejax.cache.pool import host_pool
from icejax.cache.pool.extents import extents_for
from icejax.cache.protocol import CachePolicy, Heads, Lengths, View
from icejax.cache.sizes import CacheSpec
from icejax.ops.attention.dense import Scoring, causal
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
    """What is done with a policy's state after its prompt, jitted; `traces` counts how often `decode` was traced."""

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
        """`pool` is the pool and the table of extents, or None."""
        pages = host_pool.PoolLayer(*pool, None, 0, backend, "float32") if pool is not None else None
        return View(lengths, pages, rerotate=turned, project=projected)

    @functools.partial(jax.jit, donate_argnums=0)
    def decode(state, q, k, v, lengths, pool):
        traces[0] += 1
        heads = Heads(*(x[:, None] for x in (q, k, v)), jnp.ones(len(q), jnp.int32), Scoring(q.shape[-1] ** -0.5, softcap))
        found = policy.decode(state, heads, view(lengths, pool))
        return jax.tree.map(lambda x: x[:, 0], found.attended), found.state, found.tokens

    @functools.partial(jax.jit, donate_argnums=0)
    def extend(state, q, k, v, lengths, new, pool):
        found = policy.extend(state, Heads(q, k, v, new, Scoring(q.shape[-1] ** -0.5, softcap)), view(lengths, pool))
        return found.attended, found.state, found.pages, found.used

    def compact(state, pool, lengths):
        count = policy.compact_every // policy.page_size
        pages = view(lengths, pool).pool.run(lengths.next_page - count, count)
        found = policy.compact(state, pages, View(lengths))
        return found.state, found.pages

    def flush(state, lengths):
        return policy.flush(state, lengths)

    def flushed(state, prepared, lengths):
        return policy.after_flush(state, prepared, lengths)

    return Programs(decode, extend, jax.jit(flush), jax.jit(flushed), jax.jit(compact), traces)


def turned(heads: jax.Array, by: jax.Array) -> jax.Array:
    """Turns heads [B, T, N, H] by so many positions [B, T], as a layer with plain RoPE of base `THETA` does."""
    size = heads.shape[-1]
    angles = by[..., None].astype(jnp.float32) * THETA ** (-jnp.arange(0, size, 2) / size)[None, None, :]
    cos, sin = (f(angles)[:, :, None, :] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(heads, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def output_matrix(heads: int, size: int) -> np.ndarray:
    """Returns the projection f32[heads, size, 24] of as many heads."""
    return np.random.default_rng(7).standard_normal((heads, size, 24)).astype(np.float32)


def projected(heads: jax.Array) -> jax.Array:
    """Takes heads [B, T, N, H] to a layer's output [B, T, 24], as a projection with a bias does."""
    return jnp.einsum("btnh,nhd->btd", heads, output_matrix(*heads.shape[2:])) + 1.0


@functools.partial(jax.jit, static_argnames=("policy", "spec", "softcap"))
def _prefill(q, k, v, lengths, *, policy, spec, softcap):
    scoring = Scoring(q.shape[-1] ** -0.5, softcap)
    attended = causal(q, k, v, lengths=lengths.seen, window=None, scoring=scoring)
    view = View(Lengths.none(len(q)), rerotate=turned, project=projected)
    found = policy.prefill(policy.init(spec), Heads(q, k, v, lengths.seen, scoring), attended, view)
    return found.state, found.pages


class Layer:
    """Drives `policy` over a prompt and then token by token.

    Attributes:
        tokens: how many were attended to in the newest step, by a query head and by any of a KV head, f32[2, B].
        lse: the log-sum-exp of what was last put behind the cache: [B, N] of a step, [B, T, N] of more tokens.
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
            # In another order than the rows have them.
            table = np.arange(extents * len(lengths), dtype=np.int32).reshape(extents, -1).T[::-1].copy()
            shape = (table.size, 1, host_pool.EXTENT, *pages.shape[2:])
            self.table = jnp.asarray(table)
            self.pool = host_pool.write_pages(host_pool.allocate(shape, "float32"), pages[:, None], self.table, 0)
            self.lengths = replace(self.lengths, next_page=jnp.int32(pages.shape[0]))
        self.programs = programs(policy, softcap)

    def step(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Appends one token per row, [B, heads, H] each, and returns the attention output [B, N, H]."""
        (out, self.lse), self.state, self.tokens = self.programs.decode(self.state, q, k, v, self.lengths, self._pool)
        self.lengths = replace(self.lengths, clock=self.lengths.clock + 1)
        clock = int(self.lengths.clock)
        if self.pool is not None and clock % self.policy.page_size == 0:
            page, news = self.programs.flush(self.state, self.lengths)
            self.state = self.programs.after_flush(self.state, news, self.lengths)
            self.pool = host_pool.write_pages(self.pool, page[None, None], self.table, self.lengths.next_page)
            self.lengths = replace(self.lengths, next_page=self.lengths.next_page + 1)
        if self.pool is not None and self.policy.compact_every and clock % self.policy.compact_every == 0:
            count = self.policy.compact_every // self.policy.page_size
            self.state, pages = self.programs.compact(self.state, self._pool, self.lengths)
            self.pool = host_pool.write_pages(self.pool, pages[:, None], self.table, self.lengths.next_page - count)
        return np.asarray(out)

    def join(self, clock: int) -> None:
        """Makes of it a batch that its rows joined when its clock stood at `clock`; nothing has been decoded before."""
        self.state = self.policy.joining(self.state, self.lengths, jnp.int32(clock))
        pages = self.lengths.next_page + clock // self.policy.page_size
        self.lengths = Lengths(self.lengths.origin - clock, jnp.int32(clock), pages)

    @property
    def _pool(self) -> tuple[jax.Array, jax.Array] | None:
        return None if self.pool is None else (self.pool, self.table)

    def extend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, new: Sequence[int]) -> np.ndarray:
        """Puts `new` tokens per row, right-padded, behind all there are; returns the attention output [B, T, N, H]."""
        count = jnp.asarray(new, jnp.int32)
        (out, self.lse), self.state, pages, used = self.programs.extend(self.state, q, k, v, self.lengths, count, self._pool)
        if pages is not None:
            self.pool = host_pool.write_pages(self.pool, pages[:, None], self.table, self.lengths.next_page)
        self.lengths = Lengths.of(self.lengths.seen + count, self.lengths.next_page + (used or 0))
        return np.asarray(out)


def stored(pool: jax.Array, table: jax.Array) -> np.ndarray:
    """Returns the pages of a pool of fp32 by row, f32[B, P, L, K, planes, p, W]."""
    pages = np.asarray(pool).view(np.float32)[np.asarray(table)].swapaxes(2, 3)  # B, X, 64, L, ...
    return pages.reshape(len(pages), -1, *pages.shape[3:])


def uneven(q: np.ndarray, k: np.ndarray, by: tuple[float, float, float] = (11, 0.05, 40)) -> tuple[np.ndarray, np.ndarray]:
    """Returns them with channels in which keys are far larger than queries, or far smaller; attention is as it was."""
    factors = np.ones(k.shape[-1], np.float32)
    factors[[3, 7, 11]] = by
    return q / factors, k * factors


def draw(
    lengths: Sequence[int], steps: int, *, seed: int = 0, sharp: float = 1.0, kv_heads: int = KV_HEADS, sizes=(SIZE, SIZE)
):
    """Returns prompt q, k, v [B, PROMPT, heads, H] and new ones [steps, B, heads, H].

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


def dense(prompt, new, lengths: Sequence[int], step: int) -> np.ndarray:
    """Returns exact attention [B, N, H] of new token number `step` in float64."""
    return np.stack(
        [
            attention(
                new[0][step, row],
                *(np.concatenate([p[row, :length], n[: step + 1, row]]) for p, n in zip(prompt[1:], new[1:], strict=True)),
            )
            for row, length in enumerate(lengths)
        ]
    )


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, softcap: float | None = None) -> np.ndarray:
    """Returns the attention [N, H] of a token's queries [N, H] to keys and values [S, K, H] in float64."""
    return attended(q, k, v, softcap)[0]


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, softcap: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the attention, and the log-sum-exp [N] of its scores."""
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
    """Asserts that every level's digests of a row and head are those of the keys of `pages`, in float64."""
    keys = np.concatenate(pages).astype(np.float64)
    numbers = np.split(np.arange(len(keys)), np.cumsum([len(page) for page in pages])[:-1])
    nodes = [outliers_first(keys, list(page[:, None])) for page in numbers]
    for level in levels:
        for i, tokens in enumerate(nodes):
            assert int(level.count[row, head, i]) == len(tokens)
            if len(tokens):
                inner = keys[others(tokens)]
                expected = (*keys[tokens[[0, min(1, len(tokens) - 1)]]], inner.mean(0), bands(len(inner[0])) @ inner.var(0))
                vectors = (x.data for x in (*level.outliers, level.mean))
                for found, of in zip((*vectors, level.width), expected, strict=True):
                    np.testing.assert_allclose(found[row, head, i], of, rtol=tolerances.DIGEST, atol=tolerances.DIGEST)
        nodes = [outliers_first(keys, nodes[i : i + tree.FAN_OUT]) for i in range(0, len(nodes), tree.FAN_OUT)]
