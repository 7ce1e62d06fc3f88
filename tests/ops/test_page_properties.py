"""Properties of the clustered cache after any prompt and any number of decode steps."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icejax.cache.pool import host_pool
from icejax.cache.registry import Clustered
from icejax.ops.pages import tree
from tests import tolerances
from tests.helpers.layer import KV_HEADS, SIZE, Layer, assert_digests, draw, stored

FEW_EXAMPLES = settings(max_examples=6, deadline=None)
POLICY = Clustered(budget=64, compact_every=32)
DEEP = Clustered(budget=64, compact_every=32, opened=31)  # not POLICY, whose compiled programs have two levels, not three
lengths = st.lists(st.integers(1, 250), min_size=2, max_size=2)


def decode_some(policy: Clustered, prompt_lengths: list[int], steps: int, seed: int):
    """Returns a layer after a prompt and `steps` tokens, and the keys [S, K, H] of every row's tokens."""
    prompt, new = draw(prompt_lengths, max(1, steps), seed=seed)
    layer = Layer(policy, prompt_lengths, *prompt)
    for step in range(steps):
        layer.step(*(x[step] for x in new))
    keys = [np.concatenate([prompt[1][row, :length], new[1][:steps, row]]) for row, length in enumerate(prompt_lengths)]
    return layer, keys


def stored_keys(layer: Layer, row: int, head: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the keys of every page, and the keys of sinks and window, read as a decode step reads them."""
    state, pages = layer.state, stored(layer.pool, layer.table)[row, :, 0, head, 0]
    counts = np.asarray(state.index.levels[0].count)[row, head]
    pages = [page[:count] for page, count in zip(pages, counts, strict=False)]
    masks = layer.policy.window_layout.masks(state.window, layer.lengths, seen=layer.lengths.seen)
    exact_keys = (state.window.sinks[0], state.window.newest[0])
    resident = [np.asarray(x)[row, head][np.asarray(mask)[row]] for x, mask in zip(exact_keys, masks, strict=True)]
    return pages, np.concatenate(resident)


@pytest.mark.slow
@FEW_EXAMPLES
@given(lengths=lengths, steps=st.integers(0, 120), seed=st.integers(0, 9))
def test_every_token_is_in_exactly_one_place(lengths, steps, seed):
    layer, keys = decode_some(POLICY, lengths, steps, seed)
    for row in range(2):
        for head in range(KV_HEADS):
            pages, resident = stored_keys(layer, row, head)
            actual = np.concatenate([*pages, resident])
            expected = keys[row][:, head]
            assert actual.shape == expected.shape
            np.testing.assert_array_equal(np.sort(actual, axis=0), np.sort(expected, axis=0))


@pytest.mark.slow
@FEW_EXAMPLES
@given(lengths=lengths, steps=st.integers(0, 120), seed=st.integers(0, 9))
def test_digests_of_every_level_are_those_of_their_tokens(lengths, steps, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "TOP", 1)
        layer, _ = decode_some(DEEP, lengths, steps, seed)
    assert len(layer.state.index.levels) == 3
    for row in range(2):
        for head in range(KV_HEADS):
            assert_digests(layer.state.index.levels, row, head, stored_keys(layer, row, head)[0])


@pytest.mark.slow
@FEW_EXAMPLES
@given(seed=st.integers(0, 99))
def test_the_order_of_pages_changes_nothing(seed):
    prompt, new = draw((200, 250), 1, seed=seed)
    layer, shuffled = (Layer(POLICY, (200, 250), *prompt) for _ in range(2))
    order = np.random.default_rng(seed).permutation(shuffled.state.index.levels[0].count.shape[2])
    pages = np.moveaxis(stored(layer.pool, layer.table)[:, order], 0, 2)
    shuffled.pool = host_pool.write_pages(shuffled.pool, jnp.asarray(pages), layer.table, 0)
    levels = (jax.tree.map(lambda x: x[:, :, order], shuffled.state.index.levels[0]), *shuffled.state.index.levels[1:])
    shuffled.state = replace(shuffled.state, index=replace(shuffled.state.index, levels=levels))
    expected, actual = (x.step(*(tokens[0] for tokens in new)) for x in (layer, shuffled))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerances.EXACT)


@pytest.mark.slow
@FEW_EXAMPLES
@given(seed=st.integers(0, 99))
def test_more_budget_attends_to_more_of_the_mass(seed):
    """The query heads of a KV head share one query, so no head gains at another's cost; sinks and window stay the same."""
    prompt, new = draw((250,), 1, seed=seed, sharp=2.0)
    new[0][0, :, 1::2] = new[0][0, :, ::2]
    masses = []
    for budget in (40, 64, 128, 200):
        policy = Clustered(budget=budget, sinks=4, window=20, compact_every=0)
        layer = Layer(policy, (250,), *prompt)
        layer.step(*(x[0] for x in new))
        ids, weights = np.asarray(layer.state.ids), np.asarray(layer.state.weights)
        assert (weights > 0).sum((2, 3)).max() + 4 + 5 <= budget  # the window holds four tokens and the new one
        pages, mass = stored(layer.pool, layer.table)[0, :, 0], []
        for head in range(KV_HEADS):
            keys = np.concatenate([prompt[1][0, :250, head], new[1][0, 0, head][None]]).astype(np.float64)
            q = new[0][0, 0, 2 * head].astype(np.float64) / SIZE**0.5
            attended_slots = ids[0, head][weights[0, head, :, 0] > 0]
            attended_keys = pages[attended_slots // policy.page_size, head, 0, attended_slots % policy.page_size]
            mass.append(np.exp(attended_keys @ q).sum() / np.exp(keys @ q).sum())
        masses.append(mass)
    assert (np.diff(masses, axis=0) >= -1e-9).all()
