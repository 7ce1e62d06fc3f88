"""Retrieval methods of other papers against plain numpy: which pages or tokens are chosen, and what comes of it."""

import jax.numpy as jnp
import numpy as np
import pytest

import icejax
from icejax.cache import ArkVale
from icejax.cache.policies.arkvale import CuboidIndex
from icejax.cache.policies.quest import bound
from tests import reference_retrieval as reference
from tests.layer import PROMPT, Layer, draw
from tests.run import jitted
from tests.test_peers import LENGTHS, STEPS, compare, row_of


def numbers(layer: Layer, row: int, one: reference.Paged) -> list[int]:
    """Returns where in the pool the pages of `one` are: those of decoded tokens behind all that a prompt may have."""
    several = PROMPT // one.page_size
    first = -(-max(LENGTHS[row] - one.fill - one.sinks, 0) // one.page_size)
    return [i if i < first else i - first + several for i in range(len(one.pages))]


@pytest.mark.parametrize("heads", ["layer", "kv"])
def test_arkvale_chooses_pages_for_all_heads_of_a_layer(heads):
    prompt, new = draw(LENGTHS, STEPS, sharp=2.0)
    policy = ArkVale(budget=64, page_size=8, heads=heads)
    own = dict(heads=heads, count=policy.num_fetched(1000), sinks=16, fill=8)
    differ = []

    def check(layer, row, one, q):
        at = numbers(layer, row, one)
        for head, chosen in enumerate(one.chosen(q)):
            ids = np.asarray(layer.state.ids)[row, head]
            assert sorted(ids[ids >= 0]) == sorted(at[i] for i in chosen)
        differ.append(len(set(map(tuple, one.chosen(q)))) > 1)
        one.end_step()

    compare(policy, [reference.ArkVale(8, **own, **row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)], prompt, new, check)
    assert any(differ) == (heads == "kv")


def test_arkvale_ranks_a_page_with_one_key_like_the_query_above_its_mean():
    """A page of 31 keys about zero and one along the query, among pages that all are a little along it: the mean is fooled."""
    rng = np.random.default_rng(0)
    q = np.sign(rng.standard_normal(16)).astype(np.float32)
    k = 0.3 * rng.standard_normal((1, 1, 12, 32, 16)).astype(np.float32)
    k[0, 0, 1:] += 0.15 * q
    k[0, 0, 0, 17] += 3.0 * q
    index = jitted(CuboidIndex().describe, jnp.asarray(k), None, jnp.ones(k.shape[:4], bool))
    boxes = np.asarray(jitted(bound, jnp.asarray(q)[None, None, None], index))[0, 0, 0]
    means = k[0, 0].mean(1) @ q
    assert boxes.argmax() == 0 and means.argmin() == 0


@pytest.mark.parametrize(
    "kind, options, message",
    [
        (ArkVale, dict(page_size=12), "page_size must be a power of two, got 12"),
        (ArkVale, dict(budget=159), "budget must be at least 160, got 159"),
        (ArkVale, dict(sinks=-1), "sinks must be at least 0, got -1"),
        (ArkVale, dict(window=1), "window must be at least 2, got 1"),
        (ArkVale, dict(heads="all"), "heads must be one of layer, kv, got 'all'"),
        (ArkVale, dict(dense_layers=-1), "dense_layers must be at least 0, got -1"),
    ],
    ids=str,
)
def test_bad_options_say_what_is_expected(kind, options, message):
    with pytest.raises(icejax.InputError, match=f"^{message}$"):
        kind(**options)
