"""Random pages of keys and values, and float64 references of their digests, for tests of digests and the digest tree."""

import jax
import numpy as np

from icejax.ops.pages import tree
from icejax.ops.pages.digests import Digests, digest, merge
from tests import tolerances
from tests.reference.clustered import bands, others, outliers_first


def pages_of(rng, pages: int, size: int = 16, *, spread: float = 1.0, heads: int = 1, wide: int | None = None):
    """Returns keys [1, heads, pages, 16, size], values of `wide` (or `size`) channels, and a mask; some pages are not full."""
    centres = rng.standard_normal((1, heads, pages, 1, size))
    keys = (centres + spread * rng.standard_normal((1, heads, pages, 16, size))).astype(np.float32)
    values = rng.standard_normal((*keys.shape[:-1], wide or size)).astype(np.float32)
    counts = rng.integers(0, 17, (1, heads, pages))
    return keys, values, np.arange(16) < counts[..., None]


def float64(keys, values, mask):
    """Returns count, two outliers, the other keys' mean and widths, and mean value of a page [p, H] or a node [P, p, H]."""
    masked_keys, masked_values = keys[mask].astype(np.float64), values[mask].astype(np.float64)
    if not len(masked_keys):
        zeros = np.zeros(keys.shape[-1])
        return 0, zeros, zeros, zeros, bands(len(zeros)) @ zeros, np.zeros(values.shape[-1])
    pages = np.split(np.arange(len(masked_keys)), np.cumsum(mask.reshape(-1, mask.shape[-1]).sum(-1))[:-1])
    pages = [outliers_first(masked_keys, list(page[:, None])) for page in pages]
    tokens = outliers_first(masked_keys, pages) if keys.ndim > 2 else pages[0]
    inner_keys = masked_keys[others(tokens)]
    return (
        len(masked_keys),
        *masked_keys[tokens[[0, min(1, len(tokens) - 1)]]],
        inner_keys.mean(0),
        bands(masked_keys.shape[1]) @ inner_keys.var(0),
        masked_values.mean(0),
    )


def scatter_of(keys, mask):
    """Returns the scatter matrix f64[1, K, H, H] of keys about the means of their pages."""
    token_mask = mask[..., None]
    means = np.where(token_mask, keys, 0).sum(3, keepdims=True, dtype=np.float64) / np.maximum(
        token_mask.sum(3, keepdims=True), 1
    )
    deviations = np.where(token_mask, keys - means, 0)
    return np.einsum("bkpsh,bkpsi->bkhi", deviations, deviations)


def tree_of(keys, values, mask):
    """Returns the digest tree of pages."""
    return tree.build(digest(keys, values, mask))


def nodes_of(pages: Digests) -> Digests:
    """Returns the digests of three nodes of 16 pages each, merged from 48 pages."""
    return merge(jax.tree.map(lambda x: x.reshape(1, 1, 3, 16, *x.shape[3:]), pages))


def put_in(levels, keys, values, mask, at):
    """Returns the tree with its pages from page `at` on replaced, as a flush does."""
    return tree.replace(levels, tree.lineage(levels, digest(keys, values, mask), at), at)


def read(digests: Digests) -> list[np.ndarray]:
    """Returns count, both outliers, mean, widths and mean value of all pages."""
    vectors = (x.read() for x in (*digests.outliers, digests.mean))
    return [np.asarray(x) for x in (digests.count, *vectors, digests.width, digests.value.read())]


def check(arrays: list[np.ndarray], at: tuple[int, ...], expected) -> None:
    """Asserts that the digest at index `at` of what `read` returned equals that of `float64`."""
    assert arrays[0][at] == expected[0]
    for actual, reference in zip(arrays[1:], expected[1:], strict=True):
        np.testing.assert_allclose(actual[at], reference, rtol=tolerances.DIGEST, atol=tolerances.DIGEST)
