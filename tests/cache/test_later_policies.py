"""RocketKV, vAttention, InfiniGen and ParisKV against plain numpy: the selected tokens and the attention outputs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import icejax
from icejax.cache.index.partial_keys import directions_of
from icejax.cache.index.signs import SignsIndex, estimated, patterns, turn
from icejax.cache.policies.pariskv import _shares
from icejax.cache.protocol import Heads, Lengths, View
from icejax.cache.registry import InfiniGen, ParisKV, RocketKV, VAttention
from icejax.cache.sizes import CacheSpec
from icejax.ops import topk
from icejax.ops.attention.dense import Scoring
from tests import tolerances
from tests.helpers.layer import KV_HEADS, NEW, PROMPT, Layer, draw
from tests.helpers.policy_steps import LENGTHS, STEPS, at_positions, compare, kept, row_of
from tests.helpers.run import jitted
from tests.reference import later as reference

slow = pytest.mark.slow


@pytest.mark.parametrize(
    "budget, kept_of, page, channels",
    [
        pytest.param(16, 150, 3, 10, marks=slow),
        pytest.param(20, 100, 2, 12, marks=slow),
        pytest.param(30, 110, 1, 8, marks=slow),
    ],
)
def test_rocketkv_attends_to_the_best_pages_of_what_is_kept(budget, kept_of, page, channels):
    prompt, new = draw(LENGTHS, STEPS, sharp=2.0)
    policy = RocketKV(budget=budget, kept=kept_of, window=16, kernel=7)
    assert (policy.page_size, policy.channels(16)) == (page, channels)
    theirs = [reference.RocketKV(budget, kept_of, 16, 7, **row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)]

    approximate = jax.jit(functools.partial(policy.approximate, scoring=Scoring(0.25)))

    def check(layer, row, peer, q):
        assert all(kept(layer, row, head) == peer.kept(head) for head in range(KV_HEADS))
        assert (np.asarray(layer.tokens)[:, row] == min(budget, len(peer.kept(0)))).all()
        queries = np.broadcast_to(q.reshape(1, KV_HEADS, 2, -1), (len(LENGTHS), KV_HEADS, 2, q.shape[-1]))
        for head, scores in enumerate(np.asarray(approximate(queries, layer.state))[row]):
            indices = np.argsort(-scores, kind="stable")[: min(budget, len(peer.kept(head)))]
            assert sorted(np.asarray(layer.state.positions)[row, head][indices]) == peer.chosen(q)[head]

    compare(policy, theirs, prompt, new, check)


def test_rocketkv_finds_what_its_first_stage_has_kept():
    """A key like a later query but opposite to the prompt's last queries: kept with room for all tokens, else evicted."""
    prompt, new = draw((250,), 1)
    along = new[0][0, 0, ::2]  # a query of each KV head
    new[0][0, 0, 1::2] = along
    prompt[1][0, 101], prompt[2][0, 101] = 8 * along, 5.0
    prompt[0][0, -32:] = prompt[0][0, 218:250] = -np.repeat(along, 2, axis=0)
    for budget, expected in ((250, True), (64, False)):
        layer = Layer(RocketKV(budget=32, kept=budget, kernel=1), (250,), *prompt)
        out = layer.step(*(x[0] for x in new))
        assert [101 in kept(layer, 0, head) for head in range(KV_HEADS)] == [expected] * KV_HEADS
        assert np.allclose(out, 5.0, atol=0.1) == expected


@slow
def test_vattention_samples_as_many_tokens_as_its_bound_asks_for():
    prompt, new = draw(LENGTHS, STEPS)
    policy, counts = VAttention(budget=90, sinks=3, window=7, top=30, epsilon=0.15, delta=0.1, seed=5), []
    bound = 0.15 / 1.2815515655446004  # the quantile of 0.9
    draws, weighed = jax.jit(policy.draws, static_argnums=(1, 2)), jax.jit(policy.weighed)

    def drawn(n):
        return np.asarray(draws(np.int32([n - 1]), 4, PROMPT + NEW))[0].reshape(2, 4, -1)

    options = dict(sinks=3, window=7, top=30, least=12, most=50, bound=bound, draws=drawn)

    def check(layer, row, peer, q):
        selection = peer.taken(q)
        scores = np.full((1, 2, 2, PROMPT + NEW), -np.inf, np.float32)
        scores[..., : len(peer.tokens)] = peer.scores(q)
        weights = np.asarray(weighed(scores, np.int32([len(peer.tokens) - 1]))).reshape(4, -1)
        assert [np.flatnonzero(head_weights > -np.inf).tolist() for head_weights in weights] == [
            sorted(a + b) for a, b, _ in selection
        ]
        assert np.asarray(layer.tokens)[0, row] == np.mean([len(a + b) for a, b, _ in selection]) <= 90
        if len(peer.tokens) > 200:
            counts.extend(round(share * (len(peer.tokens) - 10)) for *_, share in selection)

    compare(
        policy, [reference.VAttention(**options, **row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)], prompt, new, check
    )
    assert (min(counts), max(counts)) == (12, 50) and len(set(counts)) > 20


def heads_alike(heads: int):
    """Returns scores [1, 1, heads, 400] and values [400, 3], the same for all heads."""
    rng = np.random.default_rng(3)
    return np.broadcast_to(rng.standard_normal(400).astype(np.float32), (1, 1, heads, 400)), rng.standard_normal((400, 3))


def test_weights_that_are_sampled_are_right_in_the_mean():
    """The sums of weights and of weighted values over 2,000 draws; each draw takes at most 60 of 400 tokens."""
    scores, values = heads_alike(2000)
    policy = VAttention(budget=60, top=10, base=0.5, epsilon=0.3)
    weights = np.exp(np.asarray(jax.jit(policy.weighed)(scores, np.int32([399])))[0, 0], dtype=np.float64)
    sums = weights @ np.concatenate([np.ones((400, 1)), values], axis=1)
    exact = np.exp(scores[0, 0, 0]) @ np.concatenate([np.ones((400, 1)), values], axis=1)
    assert (np.abs(sums.mean(0) - exact) < 4 * sums.std(0) / 2000**0.5).all()
    assert ((weights > 0).sum(1) <= 60).all() and (sums.std(0) > 0.01 * np.abs(exact).max()).all()
    plain = np.where(weights > 0, np.exp(scores[0, 0, 0]), 0).sum(1)
    assert plain.mean() < 0.5 * exact[0]  # the plain sum, not divided by probabilities, is far off


@pytest.mark.parametrize("epsilon", [0.05, 0.1])
def test_a_sum_of_weights_is_rarely_wrong_by_more_than_epsilon(epsilon):
    scores, _ = heads_alike(500)
    policy = VAttention(budget=700, top=10, base=0.1, epsilon=epsilon, delta=0.1)
    weighed = np.asarray(jax.jit(policy.weighed)(scores, np.int32([399])))[0, 0]
    wrong = np.abs(np.exp(weighed).sum(1) / np.exp(scores[0, 0, 0]).sum() - 1) > epsilon
    assert wrong.mean() < 0.2  # 0.1 on each side
    assert (weighed > -np.inf).sum(1).mean() < 400


def test_what_is_drawn_depends_on_seed_position_and_head_alone():
    draws = VAttention(seed=1).draws
    alone, in_batch = draws(jnp.int32([70]), 4, 90), draws(jnp.int32([3, 70]), 4, 120)
    np.testing.assert_array_equal(in_batch[1, :, :90], alone[0])
    distinct = [
        *np.asarray(alone[0]),
        np.asarray(in_batch[0, 0, :90]),
        np.asarray(VAttention(seed=2).draws(jnp.int32([70]), 4, 90))[0, 0],
    ]
    assert len({x.tobytes() for x in distinct}) == len(distinct) == 10


@slow
@pytest.mark.parametrize("form, budget", [(topk._best_sorted, 50), (topk._best_counted, 51)], ids=["sorted", "counted"])
def test_infinigen_attends_to_tokens_near_the_highest_score(monkeypatch, form, budget):
    """By either form of top-k; the budgets differ so that each form has a program of its own."""
    monkeypatch.setattr(topk, "_best_sorted", form)
    prompt, new = draw(LENGTHS, STEPS, sharp=2.0)
    prompt[0] *= 0.7 ** np.arange(16)  # some channels of the queries, and so some directions, are larger
    policy, counts = InfiniGen(budget=budget, ratio=0.4, alpha=4.0), []
    options = dict(count=policy.num_fetched(1000), some=6, alpha=4.0)
    assert options["count"] == budget - 17

    def check(layer, row, peer, q):
        for head, pair in enumerate(zip(*[iter(peer.chosen(q))] * 2, strict=True)):
            attended = np.asarray(layer.state.weights)[row, head, :, 0] > 0  # a token of both query heads is listed twice
            assert sorted(np.asarray(layer.state.ids)[row, head][attended]) == at_positions(
                layer, row, peer, {*pair[0], *pair[1]}
            )
            counts.append(len(pair[0]))
        peer.end_step()

    compare(policy, [reference.InfiniGen(**options, **row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)], prompt, new, check)
    assert max(counts) == budget - 17 and len(set(counts)) > 10


def test_part_of_the_keys_is_enough_for_low_rank_queries():
    """Each KV head's queries span three directions: products in these three alone are exact."""
    rng = np.random.default_rng(0)
    planes = rng.standard_normal((2, 3, 16))
    q = np.einsum("tkgd,kdh->tkgh", rng.standard_normal((40, 2, 2, 3)), planes).astype(np.float32)
    keys = rng.standard_normal((2, 50, 16))
    u = np.asarray(jitted(directions_of, q[None], np.int32([30]), count=3))[0]
    np.testing.assert_allclose(np.einsum("khd,khe->kde", u, u), np.stack([np.eye(3)] * 2), atol=tolerances.EXACT)
    exact, partial = np.einsum("tkgh,kmh->tkgm", q, keys), np.einsum("tkgd,kmd->tkgm", q @ u, keys @ u)
    np.testing.assert_allclose(partial, exact, atol=1e-4)
    fewer = np.asarray(jitted(directions_of, q[None], np.int32([30]), count=2))[0]
    assert np.abs(np.einsum("tkgd,kmd->tkgm", q @ fewer, keys @ fewer) - exact).max() > 0.1


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_guess_of_the_queries_chooses_tokens(prefetch):
    prompt, new = draw((200,), 1)
    policy = InfiniGen(budget=64, alpha=20.0, prefetch=prefetch)
    index = Layer(policy, (200,), *prompt).state.index

    def selected_ids(q, guess):
        def find(q, guess, index):
            heads = Heads(q, new[1][:1], new[2][:1], jnp.ones(1, jnp.int32), Scoring(0.25))
            view = View(Lengths.of(jnp.int32([200])), guess=None if guess is None else lambda: guess)
            return policy.find(heads, index, view).ids

        return np.asarray(jitted(find, q, guess, index))

    q, opposite = jnp.asarray(new[0][:1]), jnp.asarray(-new[0][:1])
    expected, guessed = selected_ids(q, None), selected_ids(q, opposite)
    np.testing.assert_array_equal(guessed, selected_ids(opposite, None) if prefetch else expected)
    assert (expected == selected_ids(opposite, None)).mean() < 0.1


@slow
@pytest.mark.parametrize("budget", [60, 160])
def test_pariskv_attends_to_the_best_of_the_most_voted_tokens(budget):
    """One budget is below the number of candidates, the other above half of the tokens."""
    prompt, new = draw(LENGTHS, STEPS, sharp=2.0)
    policy, left_out = ParisKV(budget=budget, seed=3), []
    options = dict(count=budget - 4 - 32, turn=turn(16, 3), sinks=4, fill=16)

    def check(layer, row, peer, q):
        for head, chosen in enumerate(peer.chosen(q)):
            ids = np.asarray(layer.state.ids)[row, head]
            assert sorted(ids[ids >= 0]) == at_positions(layer, row, peer, chosen)
            if row == 0:
                query = peer.blocks(peer.tokens.grouped(q).mean(1))[head]
                products = (peer.rebuilt(head) * query).sum((1, 2))
                left_out.append(chosen != sorted(np.argsort(-products)[: options["count"]] + 4))
        peer.end_step()

    compare(policy, [reference.ParisKV(**options, **row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)], prompt, new, check)
    assert any(left_out)  # some tokens of large product have too few votes to be candidates


def index_of(keys: np.ndarray):
    """Returns the signs index of keys [n, H] in pages of 16."""
    paged = jnp.asarray(keys.reshape(1, 1, -1, 16, keys.shape[1]), jnp.float32)
    sizes = dict(batch_size=1, num_heads=1, num_kv_heads=1, head_dim=keys.shape[1], value_dim=1, dtype="float32")
    spec, index = CacheSpec(**sizes, prompt_capacity=len(keys), new_capacity=0), SignsIndex(16, 0)
    described = paged, jnp.ones(paged.shape[:4], bool)
    return jitted(index.with_pages, index.empty(spec, len(keys) // 16), described, jnp.int32(0))


@slow
def test_the_best_of_many_gaussian_keys_are_found_again():
    """Of the 100 largest products among 4,096, four bits per channel find over 85, signs alone under 60; chance finds 2."""
    rng = np.random.default_rng(0)
    keys, q = rng.standard_normal((4096, 128)), rng.standard_normal(128).astype(np.float32)
    index, turned = index_of(keys), jitted(SignsIndex(16, 0).turned, q[None, None])
    exact = np.argsort(-(keys @ q))[:100]
    products = np.asarray(jitted(estimated, turned, index))[0, 0]
    estimated_best = np.argsort(-products)[:100]
    assert len(set(estimated_best) & set(exact)) > 85 and np.corrcoef(products, keys @ q)[0, 1] > 0.99
    signs = np.where(np.asarray(jitted(patterns, index))[0, 0][:, :, None] >> np.arange(8) & 1, 1, -1)
    best_by_signs = np.argsort(-(signs * np.asarray(turned)[0, 0]).sum((1, 2)))[:100]
    assert len(set(best_by_signs) & set(exact)) < 60
    heads = Heads(jnp.asarray(q)[None, None, None], *(jnp.zeros((1, 1, 1, 128)),) * 2, jnp.ones(1, jnp.int32), Scoring(1.0))
    slots = jitted(lambda index: ParisKV(budget=136).find(heads, index, View(Lengths.none(1))).ids, index)[0, 0]
    assert len(set(np.asarray(slots)) & set(exact)) > 85  # voting loses few of them


def test_a_turn_keeps_products():
    for size in (8, 12, 16, 128, 576):
        np.testing.assert_allclose(turn(size, 1) @ turn(size, 1).T, np.eye(size), atol=tolerances.EXACT)
    assert (turn(64, 0) != turn(64, 1)).any()


def test_shares_follow_from_how_many_tokens_there_are():
    tokens = jnp.int32([[0, 4999, 5000, 9999, 10000, 29999, 30000, 10**6]])
    voting, candidates = (np.asarray(x)[0] / 20 for x in _shares(tokens))
    assert voting.tolist() == [0.5, 0.5, 0.3, 0.3, 0.25, 0.25, 0.2, 0.2]
    assert candidates.tolist() == [0.5, 0.5, 0.25, 0.25, 0.2, 0.2, 0.1, 0.1]


@pytest.mark.parametrize(
    "kind, options, message",
    [
        (RocketKV, dict(budget=31), "budget must be at least 32, got 31"),
        (RocketKV, dict(kept=255), "kept must be at least 256, got 255"),
        (RocketKV, dict(window=0), "window must be at least 1, got 0"),
        (RocketKV, dict(kernel=4), "kernel must be an odd number, got 4"),
        (InfiniGen, dict(budget=17), "budget must be at least 18, got 17"),
        (InfiniGen, dict(ratio=0), "ratio must be a number above 0 and at most 1, got 0"),
        (InfiniGen, dict(alpha=-1), "alpha must be a number from 0 to 1e+09, got -1"),
        (InfiniGen, dict(prefetch=1), "prefetch must be true or false, got 1"),
        (InfiniGen, dict(dense_layers=-1), "dense_layers must be at least 0, got -1"),
        (ParisKV, dict(sinks=-1), "sinks must be at least 0, got -1"),
        (ParisKV, dict(window=15), "window must be at least 16, got 15"),
        (ParisKV, dict(budget=36), "budget must be at least 37, got 36"),
        (ParisKV, dict(seed=-1), "seed must be at least 0, got -1"),
        (ParisKV, dict(dense_layers=-1), "dense_layers must be at least 0, got -1"),
        (VAttention, dict(sinks=-1), "sinks must be at least 0, got -1"),
        (VAttention, dict(window=0), "window must be at least 1, got 0"),
        (VAttention, dict(budget=22), "budget must be at least 23, got 22"),
        (VAttention, dict(top=235), "top must be at most 234, got 235"),
        (VAttention, dict(base=1.5), "base must be a number from 0 to 1, got 1.5"),
        (VAttention, dict(epsilon=0), "epsilon must be a number above 0 and at most 1, got 0"),
        (VAttention, dict(delta=0.5), "delta must be a number above 0 and at most 0.49, got 0.5"),
        (VAttention, dict(seed=-1), "seed must be at least 0, got -1"),
        (VAttention, dict(dense_layers=-1), "dense_layers must be at least 0, got -1"),
    ],
    ids=str,
)
def test_bad_options_say_what_is_expected(kind, options, message):
    with pytest.raises(icejax.InputError, match=f"^{re.escape(message)}$"):
        kind(**options)
