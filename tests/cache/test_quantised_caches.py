"""llama.cpp's and KIVI's quantised full caches against plain numpy, and their bytes against the formats'."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icejax.cache.policies.llama_cpp import LlamaCpp
from icejax.cache.protocol import Heads, Lengths, View
from icejax.cache.registry import Q4_0, Q8_0, Kivi
from icejax.cache.sizes import CacheSpec
from icejax.checks.errors import InputError
from icejax.ops import group_codes
from icejax.ops.attention.dense import Attended, Scoring, attend_blocks
from tests import tolerances
from tests.helpers.layer import PROMPT, Layer, draw
from tests.helpers.run import jitted
from tests.reference import full_codes as reference

LENGTHS, TEXT = (250, 9, 100), (30, 7, 50)
ENCODERS = {Q8_0: reference.q8_0, Q4_0: reference.q4_0}


def text(sizes: tuple[int, int], steps: int):
    """Returns random q, k, v [B, tokens, heads, channels]."""
    prompt, new = draw(LENGTHS, steps + max(TEXT), sizes=sizes)
    return [np.concatenate([x, y.swapaxes(0, 1)], axis=1) for x, y in zip(prompt, new, strict=True)]


def rows_of(heads, row: int, first: int, count: int) -> list[np.ndarray]:
    return [x[row, first : first + count] for x in heads]


def run(policy, heads, references, step, extend, *, steps: int) -> None:
    """Decodes half of `steps` tokens, extends by a text and decodes the rest; asserts equal attention.

    Args:
        step: takes a reference and a token's q, k and v; returns its attention.
        extend: takes a reference and a text's q, k and v; returns the attention of the last token.
    """
    layer = Layer(policy, LENGTHS, *(x[:, :PROMPT] for x in heads))
    positions = list(LENGTHS)

    def decode(count: int) -> None:
        for _ in range(count):
            tokens = [[x[i, p] for x in heads] for i, p in enumerate(positions)]
            out = layer.step(*map(np.stack, zip(*tokens, strict=True)))
            for row, token in enumerate(tokens):
                expected = step(references[row], *token)
                np.testing.assert_allclose(
                    out[row], expected, rtol=0, atol=tolerances.EXACT, err_msg=f"{row}, {positions[row]}"
                )
                assert layer.tokens[0, row] == positions[row] + 1
                positions[row] += 1

    decode(steps // 2)
    chunk = [np.full((len(LENGTHS), 64, *x.shape[2:]), np.nan, np.float32) for x in heads]
    for i, (p, count) in enumerate(zip(positions, TEXT, strict=True)):
        for x, part in zip(heads, chunk, strict=True):
            part[i, :count] = x[i, p : p + count]
    out = layer.extend(*chunk, TEXT)
    for row, count in enumerate(TEXT):
        expected = extend(references[row], *rows_of(heads, row, positions[row], count))
        np.testing.assert_allclose(out[row, count - 1], expected, rtol=0, atol=tolerances.EXACT, err_msg=f"text of row {row}")
        positions[row] += count
    decode(steps // 2)


@pytest.mark.parametrize(
    "policy, sizes, turn, steps",
    [
        (Q4_0(), (256, 64), (256, 64), 8),
        (Q8_0(rotate=False), (64, 64), None, 8),
        pytest.param(Q8_0(), (64, 64), (64, 64), 200, marks=pytest.mark.slow),
        pytest.param(Q4_0(), (256, 64), (256, 64), 200, marks=pytest.mark.slow),
        pytest.param(Q8_0(), (192, 128), (64, 64), 40, marks=pytest.mark.slow),
        pytest.param(Q4_0(rotate=False), (64, 64), None, 200, marks=pytest.mark.slow),
        pytest.param(Q4_0(), (40, 96), None, 40, marks=pytest.mark.slow),  # heads that 32, or 64, does not divide
    ],
    ids=str,
)
def test_steps_equal_llama_cpp_in_numpy(policy, sizes, turn, steps):
    heads = [np.round(x * 64) / 64 for x in text(sizes, steps)]  # rotations by 64 and 256 are exact
    made = functools.partial(reference.LlamaCpp, ENCODERS[type(policy)], turn)
    caches = [made(*rows_of(heads[1:], i, 0, n)) for i, n in enumerate(LENGTHS)]

    def step(cache, q, k, v):
        cache.extend(k[None], v[None])
        return cache.attend(q)

    def extend(cache, q, k, v):
        cache.extend(k, v)
        return cache.attend(q[-1])

    run(policy, heads, caches, step, extend, steps=steps)


@pytest.mark.parametrize(
    "bits, residual, sizes, steps",
    [
        (4, 32, (64, 64), 16),
        pytest.param(4, 32, (64, 64), 200, marks=pytest.mark.slow),
        pytest.param(2, 32, (64, 64), 200, marks=pytest.mark.slow),
        pytest.param(4, 128, (64, 64), 200, marks=pytest.mark.slow),
        pytest.param(2, 64, (40, 48), 80, marks=pytest.mark.slow),
    ],
)
def test_steps_equal_kivi_in_numpy(bits, residual, sizes, steps):
    heads = text(sizes, steps)
    caches = [reference.Kivi(bits, residual, *rows_of(heads[1:], i, 0, n)) for i, n in enumerate(LENGTHS)]
    run(Kivi(bits=bits, residual=residual), heads, caches, reference.Kivi.step, reference.Kivi.extend, steps=steps)


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(Q8_0(), id="q8_0", marks=pytest.mark.slow),
        pytest.param(Q4_0(), id="q4_0"),
        pytest.param(Kivi(residual=32), id="kivi", marks=pytest.mark.slow),
    ],
)
def test_rows_that_join_a_batch_decode_as_before(policy):
    prompt, new = draw(LENGTHS, 4)
    early, late = (Layer(policy, LENGTHS, *prompt) for _ in range(2))
    late.lengths = Lengths(late.lengths.origin - 37, jnp.int32(37), late.lengths.next_page)
    for step in range(4):
        outs = [layer.step(*(x[step] for x in new)) for layer in (early, late)]
        np.testing.assert_array_equal(outs[0], outs[1], err_msg=f"step {step}")


def test_a_free_place_makes_a_step_read_no_block_twice():
    """Its length grows with every step of the batch, beyond the cache."""
    reads = []

    def read(start, count):
        jax.debug.callback(lambda: reads.append(1))
        return (jnp.zeros((2, 1, count, 8)),) * 2

    lengths = jnp.array([10, 100_000])
    sizes = dict(kv_heads=1, slots=64, value_dim=8, block=32, scoring=Scoring(scale=1.0))
    attend_blocks(jnp.zeros((2, 1, 1, 8)), read, seen=lengths, below=lengths, lengths=jnp.ones(2, int), **sizes)
    jax.effects_barrier()
    assert len(reads) == 2


def test_a_latent_layer_has_the_attention_of_values_in_its_keys():
    """Blocks of 32 channels are the same in keys and in values that are the keys' first 64 channels."""
    prompt, new = draw(LENGTHS, 4, kv_heads=1, sizes=(96, 64))
    prompt[2], new[2] = prompt[1][..., :64], new[1][..., :64]
    latent, plain = Layer(Q4_0(), LENGTHS, *prompt, latent=True), Layer(Q4_0(rotate=False), LENGTHS, *prompt)
    for step in range(4):
        outs = [layer.step(*(x[step] for x in new)) for layer in (latent, plain)]
        np.testing.assert_allclose(outs[0], outs[1], rtol=0, atol=tolerances.EXACT, err_msg=f"step {step}")
    assert latent.state.v is None


@pytest.mark.parametrize("policy, kind", [(Q8_0(rotate=False), "Q8_0"), (Q4_0(rotate=False), "Q4_0")], ids=["q8_0", "q4_0"])
def test_codes_are_ggml_bit_for_bit(policy, kind):
    quants = pytest.importorskip("gguf.quants")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5000, 64)) * np.exp(2 * rng.standard_normal((5000, 1)))
    x[:1000] = np.round(2 * x[:1000]) / 2  # halves, which are rounded away from 0, and equal magnitudes
    x[:2] = 0
    # Magnitudes beside those whose scale lies halfway between two of fp16: there a product by 1/127 for the quotient shows.
    halfway = ((np.arange(1024, 2048) + 0.5) * 2.0**-17 * 127).astype(np.float32)
    x[-2048:] = np.concatenate([np.nextafter(halfway, side, dtype=np.float32) for side in (0, 1)])[:, None]
    expected = quants.quantize(x.astype(np.float32), getattr(quants.GGMLQuantizationType, kind))
    state = state_of(policy, x.astype(np.float32))
    scale = np.asarray(state.k.scale)[0, : len(x), :, None].view(np.uint8)
    codes = np.asarray(state.k.codes)[0, : len(x)].view(np.uint8).reshape(len(x), scale.shape[1], -1)
    np.testing.assert_array_equal(np.concatenate([scale, codes], axis=-1).reshape(len(x), -1), expected)


def state_of(policy: LlamaCpp, x: np.ndarray):
    """Returns the state of a layer with one head, whose keys and values are `x`."""
    spec = spec_of(head_dim=x.shape[1], value_dim=x.shape[1], prompt_capacity=len(x))

    @jax.jit
    def prefilled(tokens: jax.Array):
        heads = Heads(tokens, tokens, tokens, jnp.asarray([len(x)], jnp.int32), Scoring(1.0))
        attended = Attended(tokens, jnp.zeros(tokens.shape[:3]))
        return policy.prefill(policy.init(spec), heads, attended, View(Lengths.none(1))).state

    return prefilled(x[None, :, None])


def spec_of(**sizes) -> CacheSpec:
    options = dict(batch_size=1, num_heads=1, num_kv_heads=1, head_dim=64, value_dim=64, prompt_capacity=4096, new_capacity=0)
    return CacheSpec(**options | dict(dtype="bfloat16") | sizes)


@pytest.mark.parametrize(
    "policy, bits, exact",
    [(Q8_0(), 8.5, 0), (Q4_0(), 4.5, 0), (Kivi(), 5, 128), (Kivi(bits=2), 3, 128)],
    ids=["q8_0", "q4_0", "kivi-4", "kivi-2"],
)
@pytest.mark.parametrize("latent", [False, True])
def test_a_cache_has_the_bytes_of_its_format(policy, bits, exact, latent):
    spec = spec_of(latent=latent, batch_size=3, num_kv_heads=2)
    state = jax.eval_shape(lambda: policy.init(spec))
    numbers = 3 * 2 * sum(spec.planes)
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) == numbers * (4096 * bits / 8 + 2 * exact)


def test_rotation_is_the_hadamard_matrix_and_its_own_inverse():
    x = np.random.default_rng(0).standard_normal((5, 3, 384)).astype(np.float32)
    for size in (64, 128):
        once = jitted(group_codes.hadamard, x, size=size)
        np.testing.assert_allclose(once, reference.turned(x, size), rtol=0, atol=tolerances.EXACT)
        np.testing.assert_allclose(jitted(group_codes.hadamard, once, size=size), x, rtol=0, atol=tolerances.EXACT)


def test_groups_without_range_and_beyond_fp16_stay_finite():
    x = np.stack([np.zeros(32), np.full(32, 3.0), np.linspace(-1e30, 1e30, 32)]).astype(np.float32)
    for bits in (2, 4):
        codes, least, step = jitted(group_codes.encode_evenly, x, bits=bits)
        decoded = np.asarray(jitted(group_codes.decode_evenly, codes, least, step, bits=bits))
        np.testing.assert_array_equal(decoded[:2], x[:2])
        assert np.isfinite(decoded).all()
    for encode, decode in (
        (group_codes.encode_q8_0, group_codes.decode_q8_0),
        (group_codes.encode_q4_0, group_codes.decode_q4_0),
    ):
        np.testing.assert_array_equal(jitted(lambda x: decode(*encode(x)), np.zeros((1, 32), np.float32)), 0)  # noqa: B023


@pytest.mark.parametrize(
    "policy, tokens", [(Q4_0(), 100), pytest.param(Kivi(residual=64), 60, marks=pytest.mark.slow)], ids=["q4_0", "kivi"]
)
def test_a_cache_forgets_its_end(policy, tokens):
    """After a text that is forgotten, another text has the attention that it has without the first."""
    prompt, _ = draw((tokens,), 0)
    wrong, right = (draw((20,), 0, seed=seed)[0] for seed in (1, 2))
    fresh, trimmed = (Layer(policy, (tokens,), *prompt) for _ in range(2))
    assert policy.can_trim(tokens)
    if isinstance(policy, Kivi):
        wrong = [x[:, :3] for x in wrong]  # 63 tokens: no key has codes yet
    trimmed.extend(*(x[:, :20] for x in wrong), (min(20, wrong[0].shape[1]),))
    trimmed.state = policy.trimmed(trimmed.state, jnp.asarray([tokens], jnp.int32), jnp.int32(0))
    trimmed.lengths = Lengths.of(jnp.asarray([tokens], jnp.int32))
    expected, actual = (layer.extend(*(x[:, :20] for x in right), (20,)) for layer in (fresh, trimmed))
    np.testing.assert_array_equal(actual, expected)


def test_kivi_forgets_nothing_once_keys_have_codes():
    assert Kivi(residual=64).can_trim(63) and not Kivi(residual=64).can_trim(64)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(bits=3), "bits must be one of 2, 4, got 3"),
        (dict(residual=0), "residual must be at least 32, got 0"),
        (dict(residual=100), "residual must be a multiple of 32, got 100"),
    ],
)
def test_kivi_refuses_what_it_has_no_codes_for(options, message):
    with pytest.raises(InputError, match=message):
        Kivi(**options)
