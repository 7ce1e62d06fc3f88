"""The oracle policies against plain numpy: the selected tokens and the attention outputs."""

import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import icejax
from icejax.cache.policies.full import Full, Ring
from icejax.cache.registry import TopK, TopKPages, TopP, layer_policies
from tests.helpers.layer import Layer, draw
from tests.helpers.policy_steps import LENGTHS, STEPS, compare, row_of
from tests.reference import oracles as reference
from tests.reference.peers import softmax

ORACLES = {
    "topk": (TopK(budget=40), lambda **prompt: reference.TopK(40, **prompt)),
    "topk-sum": (TopK(budget=40, group="sum"), lambda **prompt: reference.TopK(40, "sum", **prompt)),
    "topp": (TopP(mass=0.7), lambda **prompt: reference.TopP(0.7, **prompt)),
    "topk-pages": (TopKPages(budget=45, page_size=8), lambda **prompt: reference.TopKPages(45, 8, **prompt)),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow if x == "topk-sum" else ()) for x in ORACLES])
def test_the_tokens_of_highest_score_are_attended_to(name):
    policy, make = ORACLES[name]
    prompt, new = draw(LENGTHS, STEPS, sharp=2.0)
    chosen = jax.jit(policy.chosen)

    def check(layer, row, peer, q):
        positions, slots = peer.selected(q), layer.state.k.shape[1]
        scores = np.full((2, 2, slots), -np.inf, np.float32)
        scores[..., : len(peer.tokens)] = peer.scores(q)
        mask = np.broadcast_to(chosen(scores, np.full(2, len(peer.tokens) - 1, np.int32)), scores.shape) & (scores > -np.inf)
        assert [np.flatnonzero(head_mask).tolist() for head_mask in mask.reshape(4, -1)] == positions
        union = [set(a) | set(b) for a, b in zip(positions[::2], positions[1::2], strict=True)]
        assert [*np.asarray(layer.tokens)[:, row]] == [np.mean([len(x) for x in sets]) for sets in (positions, union)]

    compare(policy, [make(**row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)], prompt, new, check)


def test_equal_scores_choose_the_earlier_tokens():
    prompt, new = draw((100,), 1)
    for x in (*prompt[:2], *new[:2]):
        x[:] = 1.0  # all scores are the same to the last bit
    prompt[2][:], new[2][:] = np.arange(256)[None, :, None, None], 100
    for policy in (TopK(budget=10), TopK(budget=10, group="sum"), TopP(mass=0.0985)):
        out = Layer(policy, (100,), *prompt).step(*(x[0] for x in new))
        np.testing.assert_allclose(out, np.arange(10).mean(), rtol=1e-6)
    out = Layer(TopKPages(budget=32), (100,), *prompt).step(*(x[0] for x in new))
    np.testing.assert_allclose(out, np.mean([*range(16), *range(96, 101)]), rtol=1e-6)  # the newest page and the first


def test_no_set_of_that_size_has_more_of_the_attention():
    """Compared with all sets of three of nine tokens, for each query head."""
    prompt, new = draw((8,), 1, sharp=2.0)
    peer = reference.TopK(3, **row_of(prompt, 0, 8))
    peer.append(new[1][0, 0], new[2][0, 0])
    scores = peer.scores(new[0][0, 0])
    chosen = jax.jit(TopK(budget=3).chosen)(scores.astype(np.float32), np.full(2, 8, np.int32))
    weights = softmax(scores)
    largest_mass = np.max([weights[..., list(tokens)].sum(-1) for tokens in itertools.combinations(range(9), 3)], axis=0)
    np.testing.assert_allclose((weights * np.asarray(chosen)).sum(-1), largest_mass, rtol=1e-6)


def test_the_least_of_the_chosen_tokens_is_needed_for_the_mass():
    prompt, _ = draw((250,), 1, sharp=2.0)
    peer = reference.TopP(0.9, **row_of(prompt, 0, 250))
    scores = peer.scores(prompt[0][0, 249])
    chosen = np.asarray(jax.jit(TopP(mass=0.9).chosen)(scores.astype(np.float32), np.full(2, 249, np.int32)))
    weights = softmax(scores)
    mass, smallest = np.where(chosen, weights, 0).sum(-1), np.where(chosen, weights, 1).min(-1)
    assert (mass >= 0.9).all() and (mass - smallest < 0.9).all()
    assert (smallest >= np.where(chosen, 0, weights).max(-1)).all()


def test_an_oracle_has_dense_layers_like_the_others():
    def kinds(policy, windows):
        return [
            type(layer_policy)
            for layer_policy in layer_policies(
                policy, SimpleNamespace(windows=windows, sliding_head_dim=None, sliding_key_value_heads=None), capacity=100
            )
        ]

    assert kinds(TopK(dense_layers=2), (None, None, 8, None)) == [Full, Full, Ring, TopK]
    assert kinds(TopP(), (None,) * 16) == [Full] * 2 + [TopP] * 14


@pytest.mark.parametrize(
    "kind, options, message",
    [
        (TopK, dict(budget=0), "budget must be at least 1, got 0"),
        (TopK, dict(group="max"), "group must be one of none, sum, got 'max'"),
        (TopK, dict(dense_layers=-1), "dense_layers must be at least 0, got -1"),
        (TopP, dict(mass=0), "mass must be a number above 0 and at most 1, got 0"),
        (TopP, dict(mass=1.5), "mass must be a number above 0 and at most 1, got 1.5"),
        (TopKPages, dict(budget=15), "budget must be at least 16, got 15"),
        (TopKPages, dict(page_size=12), "page_size must be a power of two, got 12"),
    ],
    ids=str,
)
def test_bad_options_say_what_is_expected(kind, options, message):
    with pytest.raises(icejax.InputError, match=f"^{message}$"):
        kind(**options)
