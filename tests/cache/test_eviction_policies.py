"""Evicting methods of other papers against plain numpy: the kept tokens and the attention outputs."""

import numpy as np
import pytest

import icejax
from icejax.cache.policies.expected_attention import log_mean_exp
from icejax.cache.policies.lacache import LaCacheLayer
from icejax.cache.registry import H2O, TOVA, AdaKV, ExpectedAttention, KeyDiff, LaCache, ReSTKV
from icejax.ops.attention.dense import Scoring
from tests import tolerances
from tests.helpers.layer import HEADS, KV_HEADS, SIZE, THETA, Layer, attention, draw, output_matrix
from tests.helpers.policy_steps import LENGTHS, STEPS, compare, kept, row_of
from tests.helpers.run import jitted
from tests.reference import eviction as reference

TEXTS = (7, 3, 30)  # lengths of texts after the decoded tokens; one decode step follows each


CASES = {
    "h2o": (H2O(budget=48, recent=8), lambda **row: reference.H2O(48, 8, **row)),
    "h2o-max": (H2O(budget=48, group="max"), lambda **row: reference.H2O(48, 24, "max", **row)),
    "tova": (TOVA(budget=48), lambda **row: reference.TOVA(48, **row)),
    "tova-mean": (TOVA(budget=48, group="mean"), lambda **row: reference.TOVA(48, "mean", **row)),
    "keydiff": (KeyDiff(budget=48), lambda **row: reference.KeyDiff(48, **row)),
    "adakv": (AdaKV(budget=48, window=16), lambda **row: reference.AdaKV(48, 16, 0.2, **row)),
    "adakv-floor": (AdaKV(budget=48, window=8, floor=0.9), lambda **row: reference.AdaKV(48, 8, 0.9, **row)),
    "expected": (
        ExpectedAttention(budget=48, sinks=3, future=100),
        lambda **row: reference.ExpectedAttention(48, 3, 100, THETA, **row),
    ),
    "lacache": (
        LaCacheLayer(budget=48, sinks=5, recent=6, layer=1),
        lambda **row: reference.LaCache(48, 5, 6, 2, 1, THETA, **row),
    ),
    "lacache-places": (
        LaCacheLayer(budget=48, sinks=20, recent=6, rungs=4, reassign=False, layer=9),
        lambda **row: reference.LaCache(48, 20, 6, 4, 9, None, **row),
    ),
    "restkv": (
        ReSTKV(budget=48, window=16, scale=2),
        lambda **row: reference.ReSTKV(48, 16, scale=2, output=output_matrix(HEADS, SIZE), **row),
    ),
    "restkv-plain": (
        ReSTKV(budget=48, window=5, kernel=1, alpha=1.0, tau=0.5),
        lambda **row: reference.ReSTKV(48, 5, 1, alpha=1.0, tau=0.5, scale=2000, output=output_matrix(HEADS, SIZE), **row),
    ),
}
BY_DEFAULT = ("h2o", "tova")


@pytest.mark.parametrize(
    "policy, theirs",
    [pytest.param(*CASES[name], id=name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in CASES],
)
def test_what_stays_and_what_comes_of_it_equal_plain_numpy(policy, theirs):
    """After a prompt, after decoded tokens, and after more texts with decode steps between them."""
    prompt, new = draw(LENGTHS, STEPS + sum(TEXTS) + len(TEXTS), sharp=2.0)
    theirs = [theirs(**row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)]
    close = dict(rtol=0, atol=tolerances.EXACT)

    def check(layer, row, peer, q):
        assert all(kept(layer, row, head) == sorted(peer.kept(head)) for head in range(KV_HEADS))

    layer, step = compare(policy, theirs, prompt, [x[:STEPS] for x in new], check), STEPS
    for count in TEXTS:
        chunk = [np.full((3, 256, *x.shape[2:]), np.nan, np.float32) for x in new]
        for x, part in zip(new, chunk, strict=True):
            part[:, :count] = x[step : step + count].swapaxes(0, 1)
        out = layer.extend(*chunk, [count] * 3)
        for row, peer in enumerate(theirs):
            expected = peer.extend(*(x[step : step + count, row] for x in new))
            np.testing.assert_allclose(out[row, :count], expected, err_msg=f"{count} tokens, row {row}", **close)
            check(layer, row, peer, None)
        out = layer.step(*(x[step + count] for x in new))
        for row, peer in enumerate(theirs):
            peer.append(*(x[step + count, row] for x in new[1:]))
            np.testing.assert_allclose(out[row], peer.attend(new[0][step + count, row]), **close)
            check(layer, row, peer, None)
        step += count + 1


def test_h2o_keeps_a_heavy_hitter_until_another_has_had_more():
    """Thirty keys get most attention. One key gets one query's, and leaves once a newer key has got that of eight queries."""
    prompt, new = draw((200,), 40)
    rare_key, once, often, later = 100, *10 * np.eye(16, dtype=np.float32)[:3]
    for x in (*prompt[:2], *new[:2]):
        x[:] = 0
    prompt[1][0, :30], prompt[1][0, rare_key], new[1][20] = often, once, later
    prompt[0][:], prompt[0][0, rare_key + 1], new[0][:20], new[0][20:] = often, once, often, later
    layer = Layer(H2O(budget=40, recent=8), (200,), *prompt)
    for step in range(40):
        layer.step(*(x[step] for x in new))
        for head in range(KV_HEADS):  # after step 28 key `later` is no longer among the newest eight
            assert (rare_key in kept(layer, 0, head)) == (step <= 28) and set(range(30)) <= set(kept(layer, 0, head))


@pytest.mark.parametrize("group", ["layer", "sum"])
def test_tova_lets_go_what_the_newest_query_ignores(group):
    """The prompt's queries match one key of the first KV head; the first decoded query points away from it."""
    prompt, new = draw((200,), 2, sharp=0.01)
    matched, direction = 190, 10 * np.eye(16, dtype=np.float32)[0]
    prompt[0][:, :, :2], prompt[1][0, matched, 0], new[0][0, :, :2] = direction, direction, -direction
    layer, heads = Layer(TOVA(budget=40, group=group), (200,), *prompt), range(KV_HEADS)
    assert matched in kept(layer, 0, 0) and (kept(layer, 0, 0) == kept(layer, 0, 1)) == (group == "layer")
    layer.step(*(x[0] for x in new))
    assert matched in kept(layer, 0, 0) and 200 in kept(layer, 0, 0)
    layer.step(*(x[1] for x in new))
    assert matched not in kept(layer, 0, 0) and all(201 in kept(layer, 0, head) for head in heads)
    assert (kept(layer, 0, 0) == kept(layer, 0, 1)) == (group == "layer")


def test_keydiff_keeps_an_odd_key():
    """Whatever its length."""
    prompt, _ = draw((200,), 1)
    prompt[1][:] = prompt[1][:, :, :, :1] * 0.1 + np.eye(16, dtype=np.float32)[0]
    for position, length in ((50, 3.0), (120, 0.01)):
        prompt[1][0, position] = -length * np.eye(16, dtype=np.float32)[0]
    layer = Layer(KeyDiff(budget=2), (200,), *prompt)
    assert all(kept(layer, 0, head) == [50, 120] for head in range(KV_HEADS))


@pytest.mark.parametrize("softcap, rtol", [(None, 0), (3.0, 0.03)])
def test_expected_attention_is_the_mean_over_drawn_queries(softcap, rtol):
    """The mean of exp(score), within five standard errors; a soft cap is computed to first order, within 3%."""
    rng, draws = np.random.default_rng(0), 100_000
    root, key = rng.standard_normal((8, 8)) / 6, rng.standard_normal(8)
    scoring = Scoring(8**-0.5, softcap)
    products = (key + rng.standard_normal((draws, 8)) @ root.T) @ key
    samples = np.exp(products * scoring.scale if softcap is None else softcap * np.tanh(products * scoring.scale / softcap))
    heads = [x.astype(np.float32) for x in (key[None, None], key[None, None, None], (root @ root.T)[None, None, None])]
    log = jitted(log_mean_exp, *heads, scoring=scoring).item()
    np.testing.assert_allclose(np.exp(log), samples.mean(), rtol=rtol, atol=5 * samples.std() / draws**0.5)


def test_restkv_scores_a_token_by_what_changes_without_it():
    """The change of the last query's output, whose own value is 0, as a mean over the query heads of a KV head."""
    (q, k, v), _ = draw((60,), 1, sharp=2.0)
    v[0, 59] = 0
    layer = Layer(ReSTKV(budget=256, window=1, kernel=1), (60,), q, k, v)
    output, group = output_matrix(HEADS, SIZE), HEADS // KV_HEADS
    exact = attention(q[0, 59], k[0, :60], v[0, :60])
    for token in range(59):
        others = np.arange(60) != token
        changes = exact - attention(q[0, 59], k[0, :60][others], v[0, :60][others])
        lengths = [np.linalg.norm(change @ matrix) for change, matrix in zip(changes, output, strict=True)]
        scores = np.asarray(layer.state.scores)[0, :, token]
        np.testing.assert_allclose(scores, np.reshape(lengths, (-1, group)).mean(1), rtol=1e-4)


def test_lacache_keeps_other_tokens_per_layer_and_fewer_old_ones():
    """Of 200 tokens both layers keep sinks and newest tokens; between these their tokens differ."""
    prompt, new = draw((200,), STEPS)
    layers = [Layer(policy, (200,), *prompt) for policy in LaCache(budget=64, sinks=4, recent=8).for_layers([0, 1], of=2)]
    for step in range(STEPS):
        for layer in layers:
            layer.step(*(x[step] for x in new))
    first, second = (set(kept(layer, 0, 0)) for layer in layers)
    assert first & second >= {0, 1, 2, 3, *range(200 + STEPS - 8, 200 + STEPS)}
    between = [{p for p in positions if 4 <= p < 200} for positions in (first, second)]
    assert between[0] and between[1] and not between[0] & between[1]
    counts = [sum(low <= p < low + 64 for p in first | second) for low in (4, 68, 132, 200)]
    assert counts == sorted(counts)


def test_lacache_has_no_round_among_as_many_newest_as_layers():
    assert LaCache(budget=64).for_layers([2, 3], of=4) == [
        LaCacheLayer(budget=64, recent=4, layer=2),
        LaCacheLayer(budget=64, recent=4, layer=3),
    ]
    with pytest.raises(icejax.InputError, match="^budget must be at least 38, got 37$"):
        LaCache(budget=37).for_layers([0], of=32)


@pytest.mark.parametrize(
    "kind, options, message",
    [
        (H2O, dict(budget=0), "budget must be at least 1, got 0"),
        (H2O, dict(budget=8, recent=8), "recent must be at most 7, got 8"),
        (H2O, dict(recent=-1), "recent must be at least 0, got -1"),
        (H2O, dict(group="all"), "group must be one of mean, max, sum, got 'all'"),
        (TOVA, dict(budget=0), "budget must be at least 1, got 0"),
        (TOVA, dict(group="all"), "group must be one of layer, mean, max, sum, got 'all'"),
        (KeyDiff, dict(budget=0), "budget must be at least 1, got 0"),
        (ExpectedAttention, dict(sinks=-1), "sinks must be at least 0, got -1"),
        (ExpectedAttention, dict(budget=4), "budget must be at least 5, got 4"),
        (ExpectedAttention, dict(future=5000), "future must be at most 4096, got 5000"),
        (ExpectedAttention, dict(epsilon=-1), "epsilon must be a number from 0 to 1, got -1"),
        (LaCache, dict(budget=37, recent=32), "budget must be at least 38, got 37"),
        (LaCache, dict(sinks=-1), "sinks must be at least 0, got -1"),
        (LaCache, dict(recent=-1), "recent must be at least 0, got -1"),
        (LaCache, dict(rungs=1), "rungs must be at least 2, got 1"),
        (LaCache, dict(reassign=0), "reassign must be true or false, got 0"),
        (ReSTKV, dict(budget=32), "budget must be at least 33, got 32"),
        (ReSTKV, dict(window=0), "window must be at least 1, got 0"),
        (ReSTKV, dict(kernel=2), "kernel must be an odd number, got 2"),
        (ReSTKV, dict(alpha=0), "alpha must be a number above 0 and at most 1, got 0"),
        (ReSTKV, dict(tau=-1), "tau must be a number from 0 to 16, got -1"),
        (ReSTKV, dict(scale=0), "scale must be at least 1, got 0"),
    ],
    ids=str,
)
def test_bad_options_say_what_is_expected(kind, options, message):
    with pytest.raises(icejax.InputError, match=f"^{message}$"):
        kind(**options)
