"""Fetching single slots of pages: a policy that scores every key attends to exactly the top tokens, and fetches no others."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

import icejax
from bench.steps.sizes import fetched_bytes
from icejax.cache.bases.retrieval import Retrieval
from icejax.cache.bases.selection import Selection
from icejax.cache.bases.window import Window
from icejax.cache.index.base import PageIndex
from icejax.cache.registry import Full
from icejax.engine.plan import make_plan
from icejax.evaluation.attention_map import Explanation
from icejax.ops.attention.dense import products
from icejax.ops.pages.packing import pack
from icejax.ops.topk import best
from tests import tolerances
from tests.helpers.layer import HEADS, KV_HEADS, Layer, dense, draw, stored

LENGTHS, STEPS, PAGE, SINKS = (250, 9, 100), 64, 16, 4
GROUP = HEADS // KV_HEADS


class Keys(PageIndex):
    """An index that holds every key of a page, and the number of keys."""

    def empty(self, spec, pages):
        shape = (spec.batch_size, spec.num_kv_heads, pages)
        return jnp.zeros((*shape, PAGE, spec.head_dim), spec.dtype), jnp.zeros(shape, jnp.int32)

    def counts(self, index):
        return index[1]

    def describe(self, k, v, mask):
        return jnp.where(mask[..., None], k, 0), mask.sum(-1, dtype=jnp.int32)


@dataclass(frozen=True)
class TopTokens(Retrieval):
    """Attends to the `wanted` tokens of pages with the largest product with any query head of the group."""

    wanted: int = 40
    resident: bool = False
    page_dtype: str | None = None
    page_size = PAGE
    compact_every = 32
    by_slot = True
    window_layout = Window(SINKS, PAGE + 8, PAGE)
    index = Keys()

    def num_fetched(self, pages):
        return min(self.wanted, pages * PAGE)

    def order(self, k, valid):
        return pack(k, valid, page_size=PAGE)

    def find(self, heads, index, view):
        keys, count = index
        is_token = jnp.arange(PAGE)[None, None, None] < count[..., None]
        scores = products(heads.by_group(), keys.reshape(*keys.shape[:2], -1, keys.shape[-1])).max(2)
        is_token = is_token.reshape(scores.shape)
        token_scores = jnp.where(is_token, scores, -jnp.inf)
        ids, _, (counts,) = best(token_scores, self.num_fetched(count.shape[2]), is_token.astype(jnp.int32))
        return Selection(ids, counts)


def reference(prompt, new, row: int, step: int, wanted: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the keys [n, H] that each KV head must choose, and the float64 attention [N, H] to them, sinks and window."""
    length, fill = LENGTHS[row], TopTokens.window_layout.fill
    q = new[0][step, row].astype(np.float64)
    k, v = (np.concatenate([x[row, :length], y[: step + 1, row]]) for x, y in zip(prompt[1:], new[1:], strict=True))
    sinks, start = min(SINKS, length), length - fill + step // PAGE * PAGE
    paged, chosen_keys, out = np.arange(sinks, start), [], np.zeros((HEADS, v.shape[-1]))
    for kv in range(KV_HEADS):
        group = slice(GROUP * kv, GROUP * (kv + 1))
        chosen = paged[np.argsort(-(q[group] @ k[paged, kv].T).max(0), kind="stable")[:wanted]]
        chosen_keys.append(k[chosen, kv])
        tokens = np.concatenate([np.arange(sinks), chosen, np.arange(max(start, sinks), len(k))])
        weights = np.exp(q[group] @ k[tokens, kv].T / q.shape[-1] ** 0.5)
        out[group] = weights @ v[tokens, kv] / weights.sum(-1, keepdims=True)
    return chosen_keys, out


@pytest.mark.slow
@pytest.mark.parametrize("resident", [False, True])
def test_top_tokens_equal_numpy_and_nothing_else_is_fetched(resident):
    prompt, new = draw(LENGTHS, STEPS, sharp=2.0)
    policy = TopTokens(resident=resident)
    layer, before = Layer(policy, LENGTHS, *prompt), np.full((len(LENGTHS), KV_HEADS, policy.wanted), -1)
    for step in range(STEPS):
        actual = layer.step(*(x[step] for x in new))
        ids, pages, fetched = np.asarray(layer.state.ids), stored(layer.pool, layer.table), layer.state.fetched
        for row in range(len(LENGTHS)):
            chosen_keys, expected = reference(prompt, new, row, step, policy.wanted)
            np.testing.assert_allclose(actual[row], expected, rtol=0, atol=tolerances.EXACT, err_msg=f"step {step}, row {row}")
            if (step + 1) % policy.compact_every == 0:
                continue  # compaction has just moved tokens to other slots
            expected_fetches = 0
            for kv in range(KV_HEADS):
                slots = ids[row, kv][ids[row, kv] >= 0]
                keys = pages[row, slots // PAGE, 0, kv, 0, slots % PAGE]
                np.testing.assert_array_equal(np.sort(keys, axis=0), np.sort(chosen_keys[kv], axis=0))
                expected_fetches += len(np.setdiff1d(slots, before[row, kv])) if resident else len(slots)
            assert fetched[row] == expected_fetches
        before = ids
    assert layer.state.held[0].shape[2:] == (policy.wanted if resident else 0, 1, 16)


def test_a_choice_of_all_tokens_is_dense_attention():
    prompt, new = draw(LENGTHS, STEPS)
    layer = Layer(TopTokens(wanted=400), LENGTHS, *prompt)
    for step in range(STEPS):
        actual = layer.step(*(x[step] for x in new))
        np.testing.assert_allclose(actual, dense(prompt, new, LENGTHS, step), rtol=0, atol=tolerances.EXACT)


@pytest.mark.slow
def test_an_answer_counts_and_explains_single_tokens(bundled):
    model, tokenizer = bundled
    text, policy, config = "Once upon a time. " * 6, TopTokens(wanted=100), model.config
    tokens = tokenizer(text)["input_ids"]
    explanation = Explanation(model, tokens, policy, new_tokens=6)
    pieces = list(icejax.stream_generate(model, tokenizer, text, cache=policy, max_new_tokens=6, watch=explanation.watch))
    (expected,) = icejax.generate(model, tokenizer, text, cache=Full(), max_new_tokens=6)
    assert [token for piece in pieces for token in piece.token_ids] == list(expected.token_ids)
    paged = len(tokens) - SINKS - policy.window_layout.fill
    assert paged < policy.wanted
    heads = config.num_hidden_layers * config.num_key_value_heads
    assert pieces[-1].pages_fetched == pieces[-1].pages_selected == 5 * heads * paged
    for weights in explanation.weights.values():
        assert np.flatnonzero(weights).tolist() == list(range(SINKS, SINKS + paged))
    plan = make_plan(model, policy, batch_size=1, prompt_tokens=len(tokens), new_tokens=6)
    assert fetched_bytes(plan) == 2 * config.head_dim * 4
    whole = make_plan(model, icejax.Clustered(page_dtype="int8"), batch_size=1, prompt_tokens=99, new_tokens=6)
    assert fetched_bytes(whole) == 2 * 18 * config.head_dim


def test_single_tokens_of_int8_pages_are_refused(bundled):
    message = r"^page_dtype=int8 is not possible for a policy that fetches single tokens: leave page_dtype out$"
    with pytest.raises(icejax.InputError, match=message):
        make_plan(bundled[0], TopTokens(page_dtype="int8"), batch_size=1, prompt_tokens=99, new_tokens=6)


def test_a_tpu_is_told_that_it_cannot_fetch_single_tokens(bundled):
    sizes = dict(batch_size=1, prompt_tokens=99, new_tokens=6)
    assert make_plan(bundled[0], TopTokens(), platform="gpu", **sizes).pool.unit == 1
    with pytest.raises(
        icejax.InputError, match=r"^toptokens fetches single tokens, which TPU cannot: use a cache that fetches pages$"
    ):
        make_plan(bundled[0], TopTokens(), platform="tpu", **sizes)
