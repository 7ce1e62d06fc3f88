"""OmniKV against plain numpy: the tokens of a layer after a filter layer, the kinds of layers, and more text in a session."""

from dataclasses import replace

import numpy as np
import pytest

import icejax
from icejax.cache.policies.follower import PositionFollower
from icejax.cache.registry import Full, OmniKV
from icejax.engine import prefill as prefilling
from icejax.engine.decode.step import DecodePrograms
from tests import tolerances
from tests.engine import test_batch as test_rows
from tests.helpers import families
from tests.helpers.layer import KV_HEADS, Layer, draw
from tests.helpers.letters import Letters
from tests.helpers.policy_steps import LENGTHS, STEPS, row_of
from tests.helpers.run import greedy, plan_for
from tests.reference import retrieval as reference

MIRROR = np.where(np.arange(16) % 3, 1, -1).astype(np.float32)  # a filter layer's keys are the next layer's keys times it


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return families.load(families.build(families.row("llama-gqa"), num_hidden_layers=4), tmp_path_factory.mktemp("model"))


def mirrored(heads):
    return replace(heads, k=heads.k * MIRROR[None, None, None])


class Led(PositionFollower):
    """A filter layer and the layer after it as one policy: they have the same queries; the filter's keys are mirrored."""

    filter = OmniKV(budget=40, generated=24)

    def init(self, spec):
        return self.filter.init(spec), super().init(spec)

    def prefill(self, state, heads, attended, view):
        filtered = self.filter.prefill(state[0], mirrored(heads), attended, view)
        outcome = super().prefill(state[1], heads, attended, view)
        return replace(outcome, state=(filtered.state, outcome.state))

    def decode(self, state, heads, view):
        filtered = self.filter.decode(state[0], mirrored(heads), view)
        outcome = super().decode(state[1], heads, replace(view, shared=filtered.shared))
        return replace(outcome, state=(filtered.state, outcome.state))

    def extend(self, state, heads, view):
        filtered = self.filter.extend(state[0], mirrored(heads), view)
        outcome = super().extend(state[1], heads, view)
        return replace(outcome, state=(filtered.state, outcome.state))

    def flush(self, state, lengths):
        return super().flush(state[1], lengths)

    def after_flush(self, state, prepared, lengths):
        return state[0], super().after_flush(state[1], prepared, lengths)

    def joining(self, state, lengths, clock):
        return state[0], super().joining(state[1], lengths, clock)


@pytest.mark.parametrize("clock", [0, pytest.param(5, marks=pytest.mark.slow)])
def test_omnikv_attends_to_what_its_filter_layer_ranks_highest(clock):
    """Its own keys would select other tokens; positions are right also in rows that joined a running batch."""
    prompt, new = draw(LENGTHS, STEPS, sharp=2.0)
    layer = Layer(Led(budget=40, generated=24), LENGTHS, *prompt)
    layer.join(clock)
    theirs = [reference.OmniKV(40, 24, MIRROR, **row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)]
    unfiltered, num_fetched = [reference.OmniKV(40, 24, 1, **row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)], []
    for step in range(STEPS):
        out = layer.step(*(x[step] for x in new))
        for row, (peer, unfiltered_peer) in enumerate(zip(theirs, unfiltered, strict=True)):
            for reference_row in (peer, unfiltered_peer):
                reference_row.append(new[1][step, row], new[2][step, row])
            q = new[0][step, row]
            np.testing.assert_allclose(out[row], peer.attend(q), rtol=0, atol=tolerances.EXACT, err_msg=f"{step} {row}")
            ids, window = np.asarray(layer.state[1].ids)[row], (clock + step) % 16 + 1
            for head in range(KV_HEADS):  # `ids` leaves out tokens in the window
                assert (ids[head] >= 0).sum() == sum(
                    p < max(LENGTHS[row], len(peer.tokens) - window) for p in peer.selected(q)[0]
                )
            assert row == 1 or peer.selected(q) != unfiltered_peer.selected(q)
        num_fetched.append(layer.state[1].fetched)
    assert np.median(num_fetched, axis=0).max() < KV_HEADS * 40  # held tokens are not fetched again


def test_omnikv_has_filters_dense_layers_and_followers():
    def kinds(policy, layers):
        letters = {Full: "-", OmniKV: "O", PositionFollower: "."}
        return "".join(letters[type(layer_policy)] for layer_policy in policy.for_layers(range(layers), of=layers))

    assert kinds(OmniKV(), 32) == "--O-......O-......O-......O-...."
    assert kinds(OmniKV(), 4) == "O-.."
    assert kinds(OmniKV(first=1, every=3, wait=0), 6) == "-O..O."


@pytest.mark.slow
def test_omnikv_with_room_for_all_tokens_is_the_full_cache(model):
    prompts = [families.tokens(300), families.tokens(90)]
    expected = greedy(model, Full(), prompts, 80)
    actual = greedy(model, OmniKV(budget=512, generated=16, every=3), prompts, 80)
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_allclose(actual[1], expected[1], rtol=0, atol=tolerances.LOGITS)


@pytest.mark.slow
def test_layers_behind_a_filter_fetch_the_same_tokens(model):
    plan = plan_for(model, OmniKV(budget=40, generated=16, first=0, every=4, wait=0), [families.tokens(300)], 80)
    assert plan.pooled == (1, 2, 3)
    state, _, pool = prefilling.prefill(model, [families.tokens(300)], plan)
    decoding = DecodePrograms(model, plan)
    for _ in range(20):
        state, _, pool = decoding.step(state, pool)
        ids = [np.asarray(state.cache.layers[i].ids) for i in plan.pooled]
        for layer_ids in ids:
            np.testing.assert_array_equal(layer_ids, ids[0])
        assert (ids[0] >= 0).sum() >= 40


@pytest.mark.slow
def test_omnikv_goes_on_after_more_text(tmp_path, model):
    """A second answer equals the answer to one long text, before and after saving the session."""
    policy = OmniKV(budget=600, generated=16, every=3)
    session = icejax.Session(model, Letters(), cache=policy, context_length=500)
    first = session.ask("a" * 150 + "bcd", max_new_tokens=40)
    session.save(tmp_path / "kept")
    loaded = icejax.Session.load(tmp_path / "kept", model, Letters())
    second, resumed = (x.ask("zyx" * 20, max_new_tokens=40) for x in (session, loaded))
    whole_text = Letters().decode(session.token_ids[: 153 + first.new_tokens + 60])
    (expected,) = icejax.generate(model, Letters(), whole_text, cache=Full(), max_new_tokens=40)
    assert first.new_tokens == 40 and second.token_ids == resumed.token_ids == expected.token_ids


@pytest.mark.slow
def test_rows_come_and_go(model):
    """The tests of every policy's rows, with layers after the filter layers."""
    plan = plan_for(model, test_rows.EXACT["omnikv"], [[1] * 300], 80)
    assert [type(layer_policy) for layer_policy in plan.policies] == [OmniKV, PositionFollower] * 2
    test_rows.test_a_row_that_joins_at_any_step_goes_on_as_alone(model, "omnikv")
    test_rows.test_the_pages_of_new_tokens_are_filled_over_and_over(model, "omnikv")
    test_rows.test_more_text_is_put_behind_a_row_that_then_joins_again(model, "omnikv", 230)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(budget=0), "budget must be at least 1, got 0"),
        (dict(generated=15), "generated must be at least 16, got 15"),
        (dict(first=-1), "first must be at least 0, got -1"),
        (dict(wait=-1), "wait must be at least 0, got -1"),
        (dict(every=3, wait=2), "every must be at least 4, got 3"),
    ],
    ids=str,
)
def test_bad_options_say_what_is_expected(options, message):
    with pytest.raises(icejax.InputError, match=f"^{message}$"):
        OmniKV(**options)
