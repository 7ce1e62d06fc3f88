"""Retrieval methods of other papers against plain numpy: which pages or tokens are chosen, and what comes of it."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import icejax
from icejax import inference
from icejax.cache import ArkVale, Full, OmniKV, PQCache
from icejax.cache.codes import approximate
from icejax.cache.policies.arkvale import CuboidIndex
from icejax.cache.policies.follower import Follower
from icejax.cache.policies.quest import bound
from icejax.decoding import Decoding
from icejax.plan import make_plan
from tests import families, tolerances
from tests import reference_retrieval as reference
from tests.layer import KV_HEADS, PROMPT, Layer, draw
from tests.run import greedy, jitted, plan_for
from tests.test_peers import LENGTHS, STEPS, compare, row_of
from tests.test_session import Letters


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return families.load(families.build(families.row("llama-gqa"), num_hidden_layers=4), tmp_path_factory.mktemp("model"))


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


MIRROR = np.where(np.arange(16) % 3, 1, -1).astype(np.float32)  # of the keys of a filter and of the layer behind it


def mirrored(heads):
    return replace(heads, k=heads.k * MIRROR[None, None, None])


class Led(Follower):
    """A filter and the layer behind it as one: they have the same queries, and keys that are mirrored."""

    filter = OmniKV(budget=40, generated=24)

    def init(self, spec):
        return self.filter.init(spec), super().init(spec)

    def prefill(self, state, heads, attended, view):
        led = self.filter.prefill(state[0], mirrored(heads), attended, view)
        found = super().prefill(state[1], heads, attended, view)
        return replace(found, state=(led.state, found.state))

    def decode(self, state, heads, view):
        led = self.filter.decode(state[0], mirrored(heads), view)
        found = super().decode(state[1], heads, replace(view, shared=led.shared))
        return replace(found, state=(led.state, found.state))

    def extend(self, state, heads, view):
        led = self.filter.extend(state[0], mirrored(heads), view)
        found = super().extend(state[1], heads, view)
        return replace(found, state=(led.state, found.state))

    def flush(self, state, lengths):
        return super().flush(state[1], lengths)

    def flushed(self, state, prepared, lengths):
        return state[0], super().flushed(state[1], prepared, lengths)

    def joining(self, state, lengths, clock):
        return state[0], super().joining(state[1], lengths, clock)


@pytest.mark.parametrize("clock", [0, 5])
def test_omnikv_attends_to_what_the_layer_before_it_ranks_highest(clock):
    """Other tokens than its own keys would choose; by their positions, also where rows have joined a batch."""
    prompt, new = draw(LENGTHS, STEPS, sharp=2.0)
    layer = Layer(Led(budget=40, generated=24), LENGTHS, *prompt)
    layer.join(clock)
    theirs = [reference.OmniKV(40, 24, MIRROR, **row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)]
    own, came = [reference.OmniKV(40, 24, 1, **row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)], []
    for step in range(STEPS):
        found = layer.step(*(x[step] for x in new))
        for row, (one, other) in enumerate(zip(theirs, own, strict=True)):
            for each in (one, other):
                each.append(new[1][step, row], new[2][step, row])
            q = new[0][step, row]
            np.testing.assert_allclose(found[row], one.attend(q), rtol=0, atol=tolerances.EXACT, err_msg=f"{step} {row}")
            ids, window = np.asarray(layer.state[1].ids)[row], (clock + step) % 16 + 1
            for head in range(KV_HEADS):  # all but those in the window
                assert (ids[head] >= 0).sum() == sum(
                    p < max(LENGTHS[row], len(one.tokens) - window) for p in one.selected(q)[0]
                )
            assert row == 1 or one.selected(q) != other.selected(q)
        came.append(layer.state[1].fetched)
    assert np.median(came, axis=0).max() < KV_HEADS * 40  # what was there already did not come again


def test_omnikv_has_filters_dense_layers_and_followers():
    def of_each(policy, layers):
        named = {Full: "-", OmniKV: "O", Follower: "."}
        return "".join(named[type(each)] for each in policy.for_layers(range(layers), of=layers))

    assert of_each(OmniKV(), 32) == "--O-......O-......O-......O-...."
    assert of_each(OmniKV(), 4) == "O-.."
    assert of_each(OmniKV(first=1, every=3, wait=0), 6) == "-O..O."


@pytest.mark.slow
def test_omnikv_with_room_for_all_tokens_is_the_full_cache(model):
    prompts = [families.tokens(300), families.tokens(90)]
    expected = greedy(model, Full(), prompts, 80)
    found = greedy(model, OmniKV(budget=512, generated=16, every=3), prompts, 80)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=tolerances.LOGITS)


def test_layers_behind_a_filter_fetch_the_same_tokens(model):
    plan = plan_for(model, OmniKV(budget=40, generated=16, first=0, every=4, wait=0), [families.tokens(300)], 80)
    assert plan.pooled == (1, 2, 3)
    state, _, pool = inference.prefill(model, [families.tokens(300)], plan)
    decoding = Decoding(model, plan)
    for _ in range(20):
        state, _, pool = decoding.step(state, pool)
        ids = [np.asarray(state.cache.layers[i].ids) for i in plan.pooled]
        for each in ids:
            np.testing.assert_array_equal(each, ids[0])
        assert (ids[0] >= 0).sum() >= 40


@pytest.mark.slow
def test_omnikv_goes_on_after_more_text(tmp_path, model):
    """A second answer is that of one long text, and what a session asks is kept."""
    policy = OmniKV(budget=600, generated=16, every=3)
    session = icejax.Session(model, Letters(), cache=policy, context_length=500)
    first = session.ask("a" * 150 + "bcd", max_new_tokens=40)
    session.save(tmp_path / "kept")
    loaded = icejax.Session.load(tmp_path / "kept", model, Letters())
    second, again = (each.ask("zyx" * 20, max_new_tokens=40) for each in (session, loaded))
    whole = Letters().decode(session.token_ids[: 153 + first.new_tokens + 60])
    (expected,) = icejax.generate(model, Letters(), whole, cache=Full(), max_new_tokens=40)
    assert first.new_tokens == 40 and second.token_ids == again.token_ids == expected.token_ids


def at_positions(layer: Layer, row: int, one: reference.Paged, positions: list[int]) -> list[int]:
    """Returns where in the pool the tokens at `positions` are, sorted."""
    places = zip(numbers(layer, row, one), one.pages, strict=True)
    slots = {p: number * one.page_size + i for number, page in places for i, p in enumerate(page)}
    return sorted(slots[p] for p in positions)


def test_pqcache_chooses_tokens_by_keys_made_of_centroids():
    prompt, new = draw(LENGTHS, STEPS, sharp=2.0)
    policy = PQCache(budget=64, sinks=8, bits=4)
    assert policy.window_of.slots == 28 and policy.num_fetched(1000) == 28
    own = dict(count=28, parts=2, centroids=16, iterations=10, sinks=8, fill=12)

    def check(layer, row, one, q):
        for head, chosen in enumerate(one.chosen(q)[::2] if one.paged() else ()):
            ids = np.asarray(layer.state.ids)[row, head]
            assert sorted(ids[ids >= 0]) == at_positions(layer, row, one, chosen)
        one.end_step()
        if one.centroids is not None:
            found = np.asarray(layer.state.index.centroids)[row]
            np.testing.assert_allclose(found, one.centroids, rtol=0, atol=tolerances.EXACT)

    compare(policy, [reference.PQCache(**own, **row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)], prompt, new, check)


def test_pqcache_scores_are_products_with_rebuilt_keys():
    prompt, new = draw(LENGTHS, 1)
    index = Layer(PQCache(budget=64, sinks=8, parts=4, bits=5), LENGTHS, *prompt).state.index
    q = new[0][0].reshape(len(LENGTHS), KV_HEADS, 2, -1)
    found = np.asarray(jitted(approximate, jnp.asarray(q), index))
    centroids, codes = (np.asarray(x) for x in (index.centroids, index.codes))
    codes = codes.reshape(*codes.shape[:2], -1, 4)
    for row, head in np.ndindex(codes.shape[:2]):
        rebuilt = np.concatenate([centroids[row, head, part][codes[row, head, :, part]] for part in range(4)], axis=-1)
        np.testing.assert_allclose(found[row, head], q[row, head] @ rebuilt.T, rtol=0, atol=tolerances.EXACT)
    assert index.codes.dtype == np.uint8


def test_a_key_that_cannot_be_cut_is_told(bundled):
    message = "^parts must divide the 64 channels of a key, got 3$"
    with pytest.raises(icejax.InputError, match=message):
        make_plan(bundled[0], PQCache(parts=3), batch_size=1, prompt_tokens=99, new_tokens=6)


@pytest.mark.parametrize(
    "kind, options, message",
    [
        (ArkVale, dict(page_size=12), "page_size must be a power of two, got 12"),
        (ArkVale, dict(budget=159), "budget must be at least 160, got 159"),
        (ArkVale, dict(sinks=-1), "sinks must be at least 0, got -1"),
        (ArkVale, dict(window=1), "window must be at least 2, got 1"),
        (ArkVale, dict(heads="all"), "heads must be one of layer, kv, got 'all'"),
        (ArkVale, dict(dense_layers=-1), "dense_layers must be at least 0, got -1"),
        (PQCache, dict(sinks=-1), "sinks must be at least 0, got -1"),
        (PQCache, dict(window=16), "window must be at least 17, got 16"),
        (PQCache, dict(budget=49), "budget must be at least 50, got 49"),
        (PQCache, dict(parts=0), "parts must be at least 1, got 0"),
        (PQCache, dict(bits=13), "bits must be at most 12, got 13"),
        (PQCache, dict(iterations=-1), "iterations must be at least 0, got -1"),
        (OmniKV, dict(budget=0), "budget must be at least 1, got 0"),
        (OmniKV, dict(generated=15), "generated must be at least 16, got 15"),
        (OmniKV, dict(first=-1), "first must be at least 0, got -1"),
        (OmniKV, dict(wait=-1), "wait must be at least 0, got -1"),
        (OmniKV, dict(every=3, wait=2), "every must be at least 4, got 3"),
    ],
    ids=str,
)
def test_bad_options_say_what_is_expected(kind, options, message):
    with pytest.raises(icejax.InputError, match=f"^{message}$"):
        kind(**options)
