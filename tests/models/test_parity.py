"""Logits and greedy tokens equal transformers', for the rows of the table of model families."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import icejax.checkpoint
from icejax.api.generate import ASSETS
from icejax.cache.registry import Clustered, Full
from icejax.engine.layers import run_exact
from icejax.ops.attention import dense
from tests import tolerances
from tests.helpers import families
from tests.helpers.run import all_logits, greedy, jitted

LENGTHS = (7, 150)
DYNAMIC = pytest.param("llama-dynamic", marks=pytest.mark.slow)
BFLOAT16 = ("gemma3_text-plain", "gemma4_text-experts", "gpt_oss-plain", "glm4-plain", "olmo3-plain", "phi3-long")


def reference(model, prompt) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0].numpy()


@pytest.mark.parametrize("row, scale", families.by_scale())
def test_logits_equal_transformers(row, scale, tmp_path):
    theirs = families.build(row, scale)
    ours = families.load(theirs, tmp_path)
    for length in LENGTHS:
        prompt = families.tokens(length)
        np.testing.assert_allclose(
            all_logits(ours, prompt, Full()),
            reference(theirs, prompt),
            rtol=0,
            atol=tolerances.LOGITS,
            err_msg=f"{length} tokens",
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", BFLOAT16)
def test_bf16_is_as_far_from_fp32_as_transformers(name, tmp_path):
    """At most twice as far: rounding may change which of two experts with near scores is taken."""
    theirs, prompt = families.build(families.row(name)), families.tokens(60)
    exact, folder = reference(theirs, prompt), families.save(theirs, tmp_path)
    with torch.no_grad():
        allowed = 2 * np.abs(theirs.bfloat16()(torch.tensor([prompt])).logits[0].float().numpy() - exact).mean()
    logits = all_logits(icejax.checkpoint.load_model(folder, dtype="bfloat16"), prompt, Full())
    assert np.abs(logits - exact).mean() < allowed


@pytest.mark.parametrize("row", families.by_family())
def test_greedy_text_equals_transformers(row, tmp_path):
    theirs = families.build(row)
    ours = families.load(theirs, tmp_path)
    prompt = families.tokens(140, seed=1)
    with torch.no_grad():
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)[0, len(prompt) :].numpy()
    np.testing.assert_array_equal(greedy(ours, Full(), [prompt], 64)[0][0], expected)


@pytest.mark.parametrize("name", ["llama-gqa", DYNAMIC, "mistral-window", "qwen3-layer-types"])
@pytest.mark.parametrize(
    "policy", [pytest.param(Full(), id="full"), pytest.param(Clustered(budget=512), id="clustered", marks=pytest.mark.slow)]
)
def test_prefill_then_decode_equals_one_forward(name, policy, tmp_path):
    theirs = families.build(families.row(name))
    ours = families.load(theirs, tmp_path)
    prompt = families.tokens(133, seed=2)
    chosen, logits, _ = greedy(ours, policy, [prompt], 40)
    if name == "llama-dynamic":  # its frequencies change with the length, so the reference is generated step by step
        with torch.no_grad():
            out = theirs.generate(
                torch.tensor([prompt]), max_new_tokens=40, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
        expected = torch.stack(out.logits)[:, 0].numpy()
    else:
        expected = reference(theirs, prompt + chosen[0].tolist())[len(prompt) - 1 : -1]
    np.testing.assert_allclose(logits[:, 0], expected, rtol=0, atol=tolerances.LOGITS)


CLUSTERED = Clustered(budget=64)


@pytest.mark.parametrize(
    "name, policy",
    [
        pytest.param("mistral-window", Full(), id="windows"),  # of sliding layers alone, which have no pages
        pytest.param("llama-gqa", Full(), id="full", marks=pytest.mark.slow),
        pytest.param("llama-gqa", CLUSTERED, id="clustered", marks=pytest.mark.slow),
        pytest.param("llama-dynamic", CLUSTERED, id="dynamic", marks=pytest.mark.slow),
    ],
)
def test_rows_of_a_ragged_batch_equal_single_runs(name, policy, tmp_path):
    ours = families.load(families.build(families.row(name)), tmp_path)
    prompts = [families.tokens(n, seed=n) for n in (200, 3, 41, 137)]
    together, logits, _ = greedy(ours, policy, prompts, 40)
    for i, prompt in enumerate(prompts):
        alone, alone_logits, _ = greedy(ours, policy, [prompt], 40)
        np.testing.assert_array_equal(together[i], alone[0])
        np.testing.assert_allclose(logits[:, i], alone_logits[:, 0], rtol=0, atol=tolerances.EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, pytest.param(dict(page_size=8, sinks=4, window=20), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("length", [*(pytest.param(n, marks=pytest.mark.slow) for n in (5, 30, 60)), 300])
def test_clustered_with_budget_for_all_equals_full(length, options, tmp_path):
    ours = families.load(families.build(families.row("llama-gqa")), tmp_path)
    prompt = families.tokens(length, seed=length)
    expected = greedy(ours, Full(), [prompt], 60)
    budget = max(120, length + 60)  # the short prompts have one budget, so that they share compiled programs
    actual = greedy(ours, Clustered(budget=budget, **options), [prompt], 60)
    np.testing.assert_allclose(actual[1], expected[1], rtol=0, atol=tolerances.EXACT)


@pytest.mark.parametrize("name", ["mistral-window", "qwen3_moe-plain", "deepseek_v3-yarn"])
def test_chunked_prefill_equals_whole(name, tmp_path, monkeypatch):
    """One layer, traced again with smaller blocks of attention, MLP and latent heads."""
    ours = families.load(families.build(families.row(name)), tmp_path)
    lengths, layer = jnp.asarray([250]), ours.model.layers[0]

    def output(layer, x):
        return run_exact(layer, x, lengths)[0]

    x = np.random.default_rng(0).standard_normal((1, 256, 64)).astype(np.float32)
    whole = jitted(output, layer, x)
    monkeypatch.setattr(dense, "BLOCK", 16)
    monkeypatch.setattr("icejax.models.parts.chunks.CHUNK", 32)
    monkeypatch.setattr("icejax.models.parts.latent_attention.HEADS_AT_ONCE", 3)  # of 4 heads; cut to 2, which divides 4
    chunked = jitted(output, layer, x)
    np.testing.assert_allclose(chunked[0, :250], whole[0, :250], rtol=0, atol=tolerances.EXACT)


def test_bundled_checkpoint_has_the_logits_of_transformers(bundled):
    """Within 1e-5 of the largest logit, which is about 30; the measured error is 1.3e-6 of it."""
    model, _ = bundled
    prompt = list((ASSETS / "prompt.txt").read_bytes()[-700:])
    theirs = reference(LlamaForCausalLM.from_pretrained(ASSETS, dtype=torch.float32), prompt)
    ours = all_logits(model, prompt, Full())
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())
