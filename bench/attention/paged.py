"""A captured layer with its pages, and the ways to attend to them: for `bench.attention.two_precisions` and `code_errors`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from bench.attention.capture import Captured
from bench.attention.coded_attention import attend, attend_dense, look, walked
from bench.attention.methods import RERANKED, form, residents
from bench.attention.page_attention import attention_of_keys, error, index_of, select
from icejax.ops.attention.dense import Attended

PAGE = 16  # tokens of a page
FORMATION = "tree-2048-greedy"


@dataclass(frozen=True)
class Paged:
    """One captured layer with its pages at one budget.

    Attributes:
        q, k, v: queries [Q, K, G, H], keys and values [K, S, H] of all tokens.
        near: keys and values of sinks and window.
        pages: keys, values and mask [1, K, P, p, ...].
        index: their digests.
        expected: exact output.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    near: tuple[jax.Array, jax.Array]
    pages: tuple[jax.Array, jax.Array, jax.Array]
    index: object
    expected: jax.Array

    @classmethod
    def of(cls, layer: Captured, budget: int) -> Paged:
        """Returns a captured layer with its pages at a budget."""
        sinks, window = residents(budget)
        q = layer.q.reshape(len(layer.q), len(layer.k), -1, layer.k.shape[-1])
        near = tuple(jnp.concatenate([x[:, :sinks], x[:, x.shape[1] - window :]], axis=1) for x in (layer.k, layer.v))
        pages = form(layer, FORMATION, PAGE, sinks, window)
        return cls(q, layer.k, layer.v, near, pages, index_of(pages), attend_dense(q, layer.k, layer.v))

    def error(self, output: jax.Array) -> float:
        """Returns the mean relative error of an output."""
        return float(error(output, self.expected).mean())

    def today(self, pages: int, budget: int, opened: int | None) -> jax.Array:
        """Returns the output of `clustered`: keys of `pages` pages, values of the best tokens, digests for all other pages."""
        outputs, method = [], replace(RERANKED, opened=opened)
        for q in self.q:
            selection = select(q[None], self.pages, self.index, fetched=pages, method=method)
            outputs.append(attention_of_keys(q[None], self.k, self.v, self.pages, self.index, selection, budget=budget)[0])
        return jnp.stack(outputs)

    def look(self, decoded, pages: int, exact: int, opened: int | None) -> jax.Array:
        """Returns the output from codes of `pages` pages, `exact` tokens, and digests for all other pages."""
        if opened is None:
            chosen, rest = look(self.q, self.index, pages)
        else:
            chosen, rest = walked(self.q, self.index, pages=pages, opened=opened)
        chosen = chosen[..., : self.pages[0].shape[2]]  # without the index's padding
        return attend(self.q, self.near, tuple(y[0] for y in self.pages), decoded[:2], chosen, rest, exact=exact)

    def packed(self, decoded, exact: int) -> jax.Array:
        """Returns the output from codes of all pages, and `exact` tokens."""
        chosen = jnp.ones((*self.q.shape[:2], self.pages[0].shape[2]), bool)
        rest = Attended(jnp.zeros_like(self.q), jnp.full(self.q.shape[:3], -jnp.inf))
        return attend(self.q, self.near, tuple(y[0] for y in self.pages), decoded[:2], chosen, rest, exact=exact)
