"""The tail of a page: tokens that are weighed one by one by their keys and not attended to exactly.

Each keeps its own weight. Its value is the mean value of its page, moved by what its key tells of its value (`value_fit`): of
what it weighs more or less than the others the key counts, of what all weigh alike the mean.

Of a page with three tokens of weights 0.1, 0.2 and 0.3, the values count 0.6 times their mean, and the keys -0.1, 0 and 0.1.
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
    """Returns the weights of tokens if those in `mask` shared what their page weighs alike.

    Args:
        by_page: what the tokens of each page weigh together.
        count: tokens in `mask` of each page.
    """
    each = by_page / jnp.maximum(count, 1.0)[:, None]
    return jnp.where(mask[:, None], each[..., None], 0.0).reshape(*by_page.shape[:2], -1)


def attend_tail(
    weights: Float[Array, "R G S"],
    keys: Float[Array, "R S H"],
    mask: Bool[Array, "R P p"],
    pages: Digests,
    from_keys: FromKeys | None,
) -> Float[Array, "R G _"]:
    """Returns the sum of the values of tokens, estimated, times their weights; of whole keys where these hold the values.

    Args:
        weights: of the tokens of all pages, 0 of those that are attended to exactly.
        keys: of the tokens, or about what they are.
        mask: which slots hold a token.
        pages: digests [R, P] of the pages.
        from_keys: values from keys; None: a token counts as the mean of its page.
    """
    by_page = weights.reshape(*weights.shape[:2], *mask.shape[1:]).sum(-1)
    out = weighted(by_page[None], jax.tree.map(lambda x: x[None], pages))[0]
    if from_keys is None:
        return out
    apart = weights - even_weights(by_page, mask, pages.count.astype(jnp.float32))
    return out + from_keys(EINSUM("rgs,rsh->rgh", apart.astype(keys.dtype), keys))
