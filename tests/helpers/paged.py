"""Pages of keys and values, and their digests, for tests of digests and of the tree."""

import jax
import numpy as np

from icejax.ops.pages import tree
from icejax.ops.pages.digests import Digests, digest, merge
from tests import tolerances
from tests.reference.clustered import bands, others, outliers_first


def pages_of(rng, pages: int, size: int = 16, *, spread: float = 1.0, heads: int = 1, wide: int | None = None):
    """Returns keys [1, heads, pages, 16, size], values (`wide` or as wide) and a mask with partial and empty pages."""
    centres = rng.standard_normal((1, heads, pages, 1, size))
    keys = (centres + spread * rng.standard_normal((1, heads, pages, 16, size))).astype(np.float32)
    values = rng.standard_normal((*keys.shape[:-1], wide or size)).astype(np.float32)
    counts = rng.integers(0, 17, (1, heads, pages))
    return keys, values, np.arange(16) < counts[..., None]


def float64(keys, values, mask):
    """Returns count, outliers, the others' mean and widths, and the mean value of one page's [p, H] or node's [P, p, H] tokens."""
    kept, meant = keys[mask].astype(np.float64), values[mask].astype(np.float64)
    if not len(kept):
        nothing = np.zeros(keys.shape[-1])
        return 0, nothing, nothing, nothing, bands(len(nothing)) @ nothing, np.zeros(values.shape[-1])
    pages = np.split(np.arange(len(kept)), np.cumsum(mask.reshape(-1, mask.shape[-1]).sum(-1))[:-1])
    pages = [outliers_first(kept, list(page[:, None])) for page in pages]
    tokens = outliers_first(kept, pages) if keys.ndim > 2 else pages[0]
    inner = kept[others(tokens)]
    return (
        len(kept),
        *kept[tokens[[0, min(1, len(tokens) - 1)]]],
        inner.mean(0),
        bands(kept.shape[1]) @ inner.var(0),
        meant.mean(0),
    )


def scatter_of(keys, mask):
    """Returns the scatter f64[1, K, H, H] of keys about the means of their pages."""
    kept = mask[..., None]
    means = np.where(kept, keys, 0).sum(3, keepdims=True, dtype=np.float64) / np.maximum(kept.sum(3, keepdims=True), 1)
    apart = np.where(kept, keys - means, 0)
    return np.einsum("bkpsh,bkpsi->bkhi", apart, apart)


def tree_of(keys, values, mask):
    """Returns the digest tree of pages."""
    return tree.build(digest(keys, values, mask))


def nodes_of(pages: Digests) -> Digests:
    """Returns the digests of three nodes of 16 pages."""
    return merge(jax.tree.map(lambda x: x.reshape(1, 1, 3, 16, *x.shape[3:]), pages))


def put_in(levels, keys, values, mask, at):
    """Returns the tree with other pages from page `at` on, as a flush puts them in."""
    return tree.replace(levels, tree.lineage(levels, digest(keys, values, mask), at), at)


def read(found: Digests) -> list[np.ndarray]:
    """Returns count, outliers, mean, widths and value of all pages."""
    vectors = (x.read() for x in (*found.outliers, found.mean))
    return [np.asarray(x) for x in (found.count, *vectors, found.width, found.value.read())]


def check(found: list[np.ndarray], at: tuple[int, ...], expected) -> None:
    assert found[0][at] == expected[0]
    for x, reference in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(x[at], reference, rtol=tolerances.DIGEST, atol=tolerances.DIGEST)
