"""The tail of ranked pages: tokens whose weights are computed from their keys and whose values are estimated.

`paged_attention` and `ranked_attention` call it; R is B K, in one axis. A token's value is estimated as the
mean value of its page plus a correction from its key (`value_fit`). The page mean is multiplied by the sum of the weights, each
key by the difference of its weight from the page's mean weight.

A page with three tail tokens of weights 0.1, 0.2 and 0.3 contributes 0.6 times its mean value, and its keys with the weights
-0.1, 0 and 0.1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from icejax.ops.attention.dense import EINSUM
from icejax.ops.pages.digests import Digests, weighted
from icejax.ops.pages.value_fit import FromKeys


def even_weights(
    by_page: Float[Array, "R G P"], mask: Bool[Array, "R P p"], count: Float[Array, "R P"]
) -> Float[Array, "R G S"]:
    """Returns each page's weight divided evenly among its tokens in `mask`: 0.6 for three tokens gives 0.2 each.

    Args:
        by_page: sum of the weights of each page's tokens.
        mask: which slots hold such a token.
        count: tokens in `mask` of each page.
    """
    even = by_page / jnp.maximum(count, 1.0)[:, None]
    return jnp.where(mask[:, None], even[..., None], 0.0).reshape(*by_page.shape[:2], -1)


def attend_tail(
    weights: Float[Array, "R G S"],
    keys: Float[Array, "R S H"],
    mask: Bool[Array, "R P p"],
    pages: Digests,
    from_keys: FromKeys | None,
) -> Float[Array, "R G _"]:
    """Returns the weighted sum of the tokens' estimated values; of estimated keys where the keys hold the values.

    Args:
        weights: weights of the tokens of all pages; 0 for tokens attended exactly.
        keys: keys of the tokens.
        mask: which slots hold a token.
        pages: digests [R, P] of the pages.
        from_keys: estimator of values from keys; None: a token counts as the mean of its page.
    """
    by_page = weights.reshape(*weights.shape[:2], *mask.shape[1:]).sum(-1)
    out = weighted(by_page[None], jax.tree.map(lambda x: x[None], pages))[0]
    if from_keys is None:
        return out
    uneven = weights - even_weights(by_page, mask, pages.count.astype(jnp.float32))
    return out + from_keys(EINSUM("rgs,rsh->rgh", uneven.astype(keys.dtype), keys))
