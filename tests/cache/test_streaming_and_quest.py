"""StreamingLLM, SnapKV and Quest against plain numpy: the kept tokens or selected pages, and the attention outputs."""

import numpy as np
import pytest

import icejax
from icejax.cache.registry import Quest, SnapKV, Streaming
from tests import tolerances
from tests.helpers.layer import KV_HEADS, THETA, Layer, draw
from tests.helpers.policy_steps import LENGTHS, STEPS, compare, kept, row_of
from tests.reference import peers as reference


@pytest.mark.parametrize("reassign", [True, False])
@pytest.mark.parametrize("sinks", [4, 0])
def test_streaming_keeps_the_first_tokens_and_the_newest(sinks, reassign):
    prompt, new = draw(LENGTHS, STEPS)
    theta = THETA if reassign else None
    theirs = [reference.Streaming(sinks, 48, theta, **row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)]

    def check(layer, row, peer, q):
        assert all(kept(layer, row, head) == peer.kept() for head in range(KV_HEADS))

    compare(Streaming(budget=48, sinks=sinks, reassign=reassign), theirs, prompt, new, check)


# The order of pooling and grouping matters: a maximum of means is not a mean of maxima.
OPTIONS = (
    dict(),
    dict(pooling="max", group="max", kernel=7),
    dict(pooling="max", group="sum", kernel=7),
    dict(group="max"),
    dict(group="sum", kernel=1),
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_snapkv_keeps_what_the_last_queries_attend_to(options):
    prompt, new = draw(LENGTHS, STEPS, sharp=2.0)
    theirs = [reference.SnapKV(64, 16, **options, **row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)]

    def check(layer, row, peer, q):
        assert all(kept(layer, row, head) == peer.kept(head) for head in range(KV_HEADS))

    compare(SnapKV(budget=64, window=16, **options), theirs, prompt, new, check)


def test_snapkv_chooses_anew_after_more_text():
    """Texts shorter and longer than the observation window; a token is decoded after each."""
    prompt, new = draw(LENGTHS, STEPS, sharp=2.0)
    layer = Layer(SnapKV(budget=64, window=16), LENGTHS, *prompt)
    theirs = [reference.SnapKV(64, 16, **row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)]
    step = 0
    for count in (7, 3, 30, 2):
        chunk = [np.full((3, 256, *x.shape[2:]), np.nan, np.float32) for x in new]
        for x, part in zip(new, chunk, strict=True):
            part[:, :count] = x[step : step + count].swapaxes(0, 1)
        out = layer.extend(*chunk, [count] * 3)
        for row, peer in enumerate(theirs):
            expected = peer.extend(*(x[step : step + count, row] for x in new))
            np.testing.assert_allclose(out[row, :count], expected, rtol=0, atol=tolerances.EXACT)
            assert all(kept(layer, row, head) == peer.kept(head) for head in range(KV_HEADS))
        step += count
        out = layer.step(*(x[step] for x in new))
        for row, peer in enumerate(theirs):
            peer.append(new[1][step, row], new[2][step, row])
            np.testing.assert_allclose(out[row], peer.attend(new[0][step, row]), rtol=0, atol=tolerances.EXACT)
        step += 1


def test_quest_chooses_pages_for_every_query_head():
    prompt, new = draw(LENGTHS, STEPS, sharp=2.0)
    policy = Quest(budget=64, page_size=8)
    assert (policy.num_fetched(1000), policy.window_layout.slots) == (7, 8)
    theirs = [reference.Quest(8, pages=7, window=8, **row_of(prompt, i, n)) for i, n in enumerate(LENGTHS)]

    def check(layer, row, peer, q):
        # Pages of decoded tokens are numbered after the prompt capacity's pages.
        num_prompt_pages, max_prompt_pages = -(-(LENGTHS[row] - peer.fill) // 8), 256 // 8
        page_ids = {i: i if i < num_prompt_pages else i - num_prompt_pages + max_prompt_pages for i in range(len(peer.pages))}
        for head in range(KV_HEADS):
            ids = np.asarray(layer.state.ids)[row, head]
            group = peer.chosen(q)[2 * head : 2 * head + 2]
            assert set(ids[ids >= 0]) == {page_ids[i] for chosen in group for i in chosen}
            assert len(set(ids[ids >= 0])) == (ids >= 0).sum()  # no page twice
        peer.end_step()

    compare(policy, theirs, prompt, new, check)


@pytest.mark.parametrize(
    "kind, options, message",
    [
        (Streaming, dict(budget=4), "budget must be at least 5, got 4"),
        (Streaming, dict(sinks=-1), "sinks must be at least 0, got -1"),
        (Streaming, dict(reassign=1), "reassign must be true or false, got 1"),
        (SnapKV, dict(budget=31), "budget must be at least 32, got 31"),
        (SnapKV, dict(window=0), "window must be at least 1, got 0"),
        (SnapKV, dict(kernel=4), "kernel must be an odd number, got 4"),
        (SnapKV, dict(pooling="min"), "pooling must be one of avg, max, got 'min'"),
        (SnapKV, dict(group="all"), "group must be one of mean, max, sum, got 'all'"),
        (Quest, dict(page_size=12), "page_size must be a power of two, got 12"),
        (Quest, dict(budget=31), "budget must be at least 32, got 31"),
        (Quest, dict(dense_layers=-1), "dense_layers must be at least 0, got -1"),
    ],
    ids=str,
)
def test_bad_options_say_what_is_expected(kind, options, message):
    with pytest.raises(icejax.InputError, match=f"^{message}$"):
        kind(**options)
