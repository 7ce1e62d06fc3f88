"""Rotating stored keys to new positions gives the keys of tokens at those positions, against rotations in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from icejax import InputError
from icejax.models.hf.rope_scaling import ROPE_FIELDS
from icejax.models.registry import family
from icejax.ops.rope import cos_sin, inverse_frequencies, rerotate, rotate
from tests import tolerances
from tests.helpers import families
from tests.helpers.run import jitted

POSITIONS = np.asarray([[0, 7, 150, 4000, 31], [5, 0, 90, 2000, 31]], np.int32)
LENGTHS = np.asarray([65, 64], np.int32)
SHIFTS = np.asarray([[0, 3, -150, 12, 4000], [-5, 700, 1, -1999, -30]], np.int32)


def config_of(row: families.Row):
    raw = row.config(**families.SIZES | dict(row.changes)).to_dict()
    return family(raw).read_config(raw)


CONFIGS = {row.name: config_of(row) for row in families.FAMILIES}
DYNAMIC = CONFIGS.pop("llama-dynamic")
# Many variants rotate alike: one of each kind.
KINDS = {config.layers[0].rope: name for name, config in reversed(CONFIGS.items())}


def keys(config):
    return np.random.default_rng(0).standard_normal((2, 5, 3, config.head_dim)).astype(np.float32)


def rotated_at(x, positions, config):
    """Returns `x` rotated to `positions`, as the decoder rotates it."""
    return jitted(lambda x, p: rotate(x, *cos_sin(p, jnp.asarray(LENGTHS), rope=config.layers[0].rope)), x, positions)


def float64(x, positions, config):
    """Returns `x` rotated in float64, as complex numbers: real parts are a head's first half, imaginary parts its second."""
    half = config.layers[0].rope.size // 2
    scaling = config.layers[0].rope.scaling
    frequencies = np.broadcast_to(inverse_frequencies(config.layers[0].rope).astype(np.float64), (2, half))
    if scaling is not None and scaling.rope_type == "longrope":  # the second row is within the original context of 64
        plain = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
        frequencies = plain / np.asarray([scaling.factors, scaling.short_factors])
    angles = positions[..., None, None] * frequencies[:, None, None]
    factor = scaling.attention_factor if scaling is not None else 1.0
    rotated = (x[..., :half] + 1j * x[..., half : 2 * half]) * factor * np.exp(1j * angles)
    return np.concatenate([rotated.real, rotated.imag, x[..., 2 * half :]], axis=-1)


def test_every_rope_type_is_here():
    scalings = [config.rope_scaling for config in (*CONFIGS.values(), DYNAMIC)]
    assert {"default" if x is None else x.rope_type for x in scalings} == set(ROPE_FIELDS)
    assert any(x is not None and x.attention_factor != 1 for x in scalings)


@pytest.mark.parametrize("name", KINDS.values())
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_a_turned_key_is_that_of_its_new_position(name, dtype):
    config = CONFIGS[name]
    x, shifts = keys(config), SHIFTS.astype(dtype)
    rope, turned = config.layers[0].rope, rotated_at(x, POSITIONS, config)
    actual = jitted(lambda x, shifts: rerotate(x, shifts, jnp.asarray(LENGTHS), rope=rope), turned, shifts)
    expected = float64(x, POSITIONS + SHIFTS, config)
    angles = (np.abs(POSITIONS) + np.abs(SHIFTS))[..., None, None]  # the highest frequency is 1
    allowed = np.abs(expected).max() * (tolerances.EXACT + tolerances.ANGLE * angles)
    for reference in (expected, rotated_at(x, POSITIONS + SHIFTS, config)):
        assert (np.abs(actual - reference) <= allowed).all()


@pytest.mark.parametrize("name", ["llama-yarn", "phi3-long"])
def test_whatever_stands_before_the_positions_is_a_batch(name):
    x, rope = keys(CONFIGS[name]), CONFIGS[name].layers[0].rope
    expected = jitted(lambda x: rerotate(x, *map(jnp.asarray, (SHIFTS, LENGTHS)), rope=rope), x)
    single_row = jitted(lambda x: rerotate(x, *map(jnp.asarray, (SHIFTS[1], LENGTHS[1])), rope=rope), x[1])
    nested = jitted(lambda x: rerotate(x, *map(jnp.asarray, (SHIFTS[None], LENGTHS[None])), rope=rope), x[None])
    for actual, reference in ((single_row, expected[1]), (nested[0], expected)):
        np.testing.assert_allclose(actual, reference, rtol=0, atol=tolerances.EXACT)


@pytest.mark.parametrize("name", ["llama-yarn", "phi3-long"])
def test_heads_of_one_row_are_turned_for_all_rows(name):
    config = CONFIGS[name]
    x, rope = keys(config)[:1], config.layers[0].rope
    actual = jitted(lambda x: rerotate(x, *map(jnp.asarray, (SHIFTS[:1], LENGTHS)), rope=rope), x)
    expected = [jitted(lambda x, n=n: rerotate(x, jnp.asarray(SHIFTS[0]), jnp.asarray(n), rope=rope), x[0]) for n in LENGTHS]
    np.testing.assert_allclose(np.broadcast_to(actual, (2, *x.shape[1:])), expected, rtol=0, atol=tolerances.EXACT)


def test_keys_keep_their_dtype():
    config = CONFIGS["llama-gqa"]
    assert (
        rerotate(
            jnp.asarray(keys(config), jnp.bfloat16), *map(jnp.asarray, (SHIFTS, LENGTHS)), rope=config.layers[0].rope
        ).dtype
        == jnp.bfloat16
    )


def test_dynamic_frequencies_turn_nothing():
    with pytest.raises(InputError) as error:
        rerotate(*map(jnp.asarray, (keys(DYNAMIC), SHIFTS, LENGTHS)), rope=DYNAMIC.layers[0].rope)
    assert str(error.value) == (
        "keys are given new positions only where RoPE's frequencies are fixed, got rope type 'dynamic', where "
        "they change with the length: use a cache that leaves keys at their positions"
    )
