"""ParisKV (arXiv 2602.07721): tokens selected by votes on the signs of their keys, then by scores from four bits per channel.

`--cache pariskv`. Rotated queries are f32[B, K, b, 8] in blocks of eight channels, votes i32[B, K, S].
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.bases.retrieval import PAGE, Retrieval
from icejax.cache.bases.selection import Selection
from icejax.cache.bases.window import Window
from icejax.cache.index.base import slots_there
from icejax.cache.index.signs import BLOCK, Signs, SignsIndex, estimated, patterns
from icejax.cache.protocol import Heads, View, check_dense_layers
from icejax.checks.numbers import integer
from icejax.ops.attention.dense import EINSUM
from icejax.ops.topk import best, largest, ranks

# (n, voting, candidates): of fewer than n tokens, voting / 20 get votes and candidates / 20 become candidates.
SHARES = ((30000, 5, 4), (10000, 6, 5), (5000, 10, 10))
MANY = (4, 2)  # the shares for more tokens
TIERS = (1, 3, 6, 10, 15, 20)  # which share of the voting tokens gets 6 votes, 5 or more, and so on, in twentieths


@dataclass(frozen=True)
class ParisKV(Retrieval):
    """ParisKV: attends to sinks, window and the tokens of highest product with the mean query, estimated from coded keys.

    Keys are rotated at random. In each block of eight channels the sign patterns are ranked by their product with the query,
    and the tokens of the first patterns get up to six votes. The tokens with most votes are candidates, whose products are
    estimated from the sign and one of eight sizes of every channel and from the length of every block. The number of tokens
    determines the shares of voting tokens and candidates, as in the authors' code. Their code attends to the whole text if it
    has less than 2,000 tokens, or less than twice the budget besides sinks and window; here it has at least as many
    candidates as the budget holds. Their window is 64 or 512 tokens by model and leaves 128 or 512 at a time, and no layer is
    dense.

    Attributes:
        budget: tokens attended exactly per KV head and layer, sinks and window included.
        sinks: first tokens kept on the device.
        window: newest tokens kept on the device, up to 15 fewer while a page of them fills.
        seed: seed of the random rotation, which is the same in all layers.
        dense_layers: first layers that keep the full cache; None: 2 for models of 16 layers and more, else 0.

    Raises:
        InputError: an option is out of range.
    """

    budget: int = 256
    sinks: int = 4
    window: int = 32
    seed: int = 0
    dense_layers: int | None = None

    def __post_init__(self) -> None:
        integer("sinks", self.sinks, least=0, most=2**20)
        integer("window", self.window, least=PAGE, most=2**20)
        integer("budget", self.budget, least=self.sinks + self.window + 1)
        integer("seed", self.seed, least=0)
        check_dense_layers(self.dense_layers)

    page_size = PAGE
    by_slot = True

    @property
    def window_layout(self) -> Window:
        return Window(self.sinks, self.window, PAGE)

    @property
    def index(self) -> SignsIndex:
        return SignsIndex(PAGE, self.seed)

    def find(self, heads: Heads, index: Signs, view: View) -> Selection:
        q = self.index.turned(heads.by_group().astype(jnp.float32).mean(2))
        filled, wanted = slots_there(index.count, PAGE), self.num_fetched(index.count.shape[2])
        tokens = filled.sum(-1, dtype=jnp.int32)
        voting, share = _shares(tokens)
        votes = jnp.where(filled, voted(q, patterns(index), filled, tokens * voting), -1)
        room = jnp.maximum(-(-tokens * share // 20), wanted)
        candidates = filled & largest(votes.astype(jnp.float32), room, most=filled.shape[-1])
        worth = jnp.where(candidates, estimated(q, index), -jnp.inf)
        ids, _, (counts,) = best(worth, wanted, candidates.astype(jnp.int32))
        return Selection(ids, counts)


def _shares(tokens: Int[Array, "B K"]) -> tuple[Int[Array, "B K"], Int[Array, "B K"]]:
    """Returns the shares of tokens that get votes and that become candidates, in twentieths; 6 and 5 of 8,000 tokens."""
    voting, candidates = (jnp.full_like(tokens, share) for share in MANY)
    for below, *shares in SHARES:
        voting, candidates = (jnp.where(tokens < below, x, y) for x, y in zip(shares, (voting, candidates), strict=True))
    return voting, candidates


def voted(
    q: Float[Array, "B K b 8"], codes: Int[Array, "B K S b"], there: Bool[Array, "B K S"], voting: Int[Array, "B K"]
) -> Int[Array, "B K S"]:
    """Returns the votes of tokens, summed over blocks of eight channels.

    A block gives a token one vote for every tier that the tokens of better patterns do not fill. If 25 tokens vote, `TIERS` are
    2, 4, 8, 13, 19 and 25 tokens: with 5 tokens in better patterns a token gets 4 votes.

    Args:
        voting: how many tokens get votes from each block, in twentieths of a token: 500 for 25 tokens.
    """
    signs = np.arange(2**BLOCK)[:, None] >> np.arange(BLOCK) & 1
    scores = EINSUM("bkci,ni->bkcn", q, np.float32(2 * signs - 1))
    rank = ranks(scores)

    def histogram(codes: Int[Array, " S"], mask: Bool[Array, " S"]) -> Int[Array, " n"]:
        return jnp.zeros(2**BLOCK, jnp.int32).at[codes].add(mask.astype(jnp.int32))

    codes = codes.swapaxes(2, 3)
    counts = jax.vmap(jax.vmap(jax.vmap(histogram, (0, None))))(codes, there)
    before = jnp.where(rank[..., None, :] < rank[..., :, None], counts[..., None, :], 0).sum(-1)
    votes = sum((before < -(-voting * tier // 400)[..., None, None]).astype(jnp.int32) for tier in TIERS)
    return jnp.take_along_axis(votes, codes, axis=-1).sum(2)
