"""Forming pages from keys: every token has one slot, and pages and nodes hold keys that are alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icejax.ops.pages import packing

pack = jax.jit(packing.pack, static_argnames=("page_size", "block"))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    tokens=st.sampled_from([256, 384, 1040]),
    counts=st.tuples(st.integers(0, 1040), st.integers(0, 256)),
    page_size=st.sampled_from([4, 16]),
    block=st.sampled_from([64, 1024]),
    seed=st.integers(0, 99),
)
def test_each_token_has_one_slot_and_empty_slots_come_last(tokens, counts, page_size, block, seed):
    keys = np.random.default_rng(seed).standard_normal((2, 3, tokens, 8)).astype(np.float32)
    valid = np.arange(tokens)[None, :] < np.asarray(counts)[:, None]
    keys[~np.broadcast_to(valid[:, None, :], (2, 3, tokens))] = np.nan
    order = np.asarray(pack(jnp.asarray(keys), jnp.asarray(valid), page_size=page_size, block=block))
    np.testing.assert_array_equal(np.sort(order, axis=-1), np.broadcast_to(np.arange(tokens), order.shape))
    for row in range(2):
        for head in range(3):
            token_of_slot = order[row, head]
            filled = valid[row, token_of_slot].reshape(-1, page_size)
            assert (np.sort(~filled, axis=-1) == ~filled).all()  # in a page empty slots come last
            tokens_per_page = filled.sum(-1)
            assert (np.sort(tokens_per_page == 0) == (tokens_per_page == 0)).all()  # empty pages come last
            assert ((tokens_per_page > 0) & (tokens_per_page < page_size)).sum() <= 1


def test_the_example_is_true():
    keys = np.asarray([9, 0, 1, 8, 0, 9, 1, 5], np.float32)[None, None, :, None]
    np.testing.assert_array_equal(pack(keys, np.ones((1, 8), bool), page_size=2)[0, 0], [0, 5, 1, 4, 3, 7, 2, 6])


def test_pages_hold_tokens_alike():
    """64 tight clusters of 16 keys, shuffled, are packed one cluster to a page."""
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat(np.arange(64), 16))
    keys = (
        rng.standard_normal((64, 32)).astype(np.float32)[labels] * 5 + rng.standard_normal((1024, 32)).astype(np.float32) * 0.1
    )
    order = np.asarray(pack(keys[None, None], np.ones((1, 1024), bool), page_size=16))[0, 0]
    assert all(len(set(page)) == 1 for page in labels[order].reshape(64, 16))


def test_packing_beats_order_of_time_on_spread():
    """Keys vary less within packed pages than within pages of consecutive tokens, for 4,096 tokens in two blocks."""
    rng = np.random.default_rng(1)
    keys = rng.standard_normal((40, 16)).astype(np.float32)[rng.integers(0, 40, 4096)] + 0.3 * rng.standard_normal((4096, 16))
    keys = keys.astype(np.float32)
    order = np.asarray(pack(keys[None, None], np.ones((1, 4096), bool), page_size=16))[0, 0]
    spread = [np.asarray(keys[slots]).reshape(256, 16, 16).var(axis=1).sum(-1).mean() for slots in (order, np.arange(4096))]
    assert spread[0] < 0.3 * spread[1]


def test_nodes_hold_pages_alike():
    """Sixteen distant groups, each of sixteen clusters, shuffled, are packed two nodes to a group."""
    rng = np.random.default_rng(2)
    far, near = 20 * rng.standard_normal((16, 1, 32)), rng.standard_normal((16, 16, 32))
    labels = rng.permutation(np.repeat(np.arange(256), 16))
    keys = (far + near).reshape(256, 32)[labels] + 0.01 * rng.standard_normal((4096, 32))
    order = np.asarray(pack(keys.astype(np.float32)[None, None], np.ones((1, 4096), bool), page_size=16))[0, 0]
    assert all(len(set(node)) == 1 for node in (labels[order] // 16).reshape(32, 128))
