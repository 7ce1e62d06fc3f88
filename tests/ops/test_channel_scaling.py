"""Channel scaling: the factors, and caches whose pages and outputs do not depend on the scale of key channels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icejax.cache.registry import Clustered, Coded, Tolerant
from icejax.ops.pages.channel_scaling import FEWEST, MOST, factors_of
from tests.helpers.layer import Layer, attention, draw, uneven

CHANNELS = [2, 9]
FACTORS = jax.jit(factors_of)


def heads(tokens: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Returns queries [1, T, 4, 16] and keys [1, T, 2, 16]."""
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((1, tokens, count, 16)).astype(np.float32) for count in (4, 2))


def factors(q: np.ndarray, k: np.ndarray, *lengths: int) -> np.ndarray:
    return np.asarray(FACTORS(q, k, jnp.asarray(lengths or [q.shape[1]], jnp.int32)))


def test_channels_of_like_size_stay():
    q, k = heads()
    np.testing.assert_array_equal(factors(3 * q, 50 * k + 7), np.ones((1, 2, 16)))


def test_a_channel_far_off_is_brought_back_by_a_power_of_two():
    q, k = heads()
    k[..., CHANNELS[0]] *= 60  # about 2**6: keys are divided by 2**3, and queries multiplied by 2**3
    k[:, :, 1, CHANNELS[1]] /= 20
    expected = np.ones((1, 2, 16))
    expected[..., CHANNELS[0]] = 1 / 8
    expected[:, 1, CHANNELS[1]] = 4
    np.testing.assert_array_equal(factors(q, k), expected)


def test_neither_padding_nor_what_is_no_number_counts():
    q, k = heads()
    k[..., CHANNELS[0]] *= 64
    expected = factors(q[:, :200], k[:, :200])
    q[:, 200:], k[:, 200:] = np.nan, np.inf
    np.testing.assert_array_equal(factors(q, k, 200), expected)
    assert expected[0, 0, CHANNELS[0]] == 1 / 8
    k[:, 5, :, 3] = np.inf
    np.testing.assert_array_equal(factors(q, k, 200), expected)


def test_a_text_of_few_tokens_tells_nothing():
    q, k = heads()
    k[..., CHANNELS] *= 100
    for length, is_scaled in ((0, False), (1, False), (FEWEST - 1, False), (FEWEST, True)):
        assert (factors(q, k, length) != 1).any() == is_scaled, length


def test_constant_channel_stays_and_factors_fit_fp16():
    q, k = heads()
    k[..., 0], k[..., 1] = 5.0, 1e-12 * k[..., 1]
    actual = factors(q, k)
    assert (actual[..., 0] == 1).all() and (actual[..., 1] == 2.0**MOST).all() and (actual[..., 2:] == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [Clustered, Coded, Tolerant],
    ids=lambda kind: kind.__name__.lower(),
)
def test_scale_of_channels_changes_no_bit(policy):
    """Keys times a power of two, queries divided by it: same outputs, page ids and digests after decoding and extending."""
    outputs = []
    for scale in (1.0, 64.0):
        outputs.append(_outputs(policy(budget=48, candidates=1, compact_every=32), scale))
    for unscaled, rescaled in zip(*outputs, strict=True):
        np.testing.assert_array_equal(unscaled, rescaled)


@pytest.mark.slow
def test_without_it_scale_takes_look_ups():
    """Without scaling, a large key channel that queries hardly use decides which keys share a page."""
    errors = {on: _error(Clustered(budget=48, page_size=8, candidates=1, tail=False, balance=on)) for on in (True, False)}
    assert errors[True] < 0.7 * errors[False], errors


def _scaled(qkv: list[np.ndarray], scale: float) -> list[np.ndarray]:
    return [*uneven(*qkv[:2], by=(scale, 1, scale)), qkv[2]]


def _outputs(policy: Clustered, scale: float) -> list[np.ndarray]:
    prompt, new = (_scaled(x, scale) for x in draw((250, 100), 50, sharp=1.5))
    layer = Layer(policy, (250, 100), *prompt)
    outputs = [layer.step(*(x[step] for x in new)) for step in range(48)]
    text = _scaled(draw((60, 30), 0, seed=1)[0], scale)
    outputs.append(layer.extend(*(x[:, :64] for x in text), (60, 30))[:, :30])
    outputs += [layer.step(*(x[step] for x in new)) for step in (48, 49)]
    return [*outputs, np.asarray(layer.state.ids), np.asarray(layer.state.index.levels[0].mean.data)]


def _error(policy: Clustered) -> float:
    """Returns the relative error of one step's attention, the mean over eight texts."""
    prompt, new = (_scaled(x, 64.0) for x in draw((256,) * 8, 1, sharp=3.0))
    outputs, errors = Layer(policy, (256,) * 8, *prompt).step(*(x[0] for x in new)), []
    for row in range(8):
        k, v = (np.concatenate([x[row, :256], y[0, row, None]]) for x, y in zip(prompt[1:], new[1:], strict=True))
        exact = attention(new[0][0, row], k, v)
        errors.append(np.linalg.norm(outputs[row] - exact) / np.linalg.norm(exact))
    return float(np.mean(errors))
