"""Experts in host memory: the same numbers as with all on the device, the right ones brought, and as many as is said."""

import dataclasses
import io
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import torch
from rich.console import Console

import icejax
from icejax.api import generate
from icejax.cache.registry import Full
from icejax.checkpoint import load_model
from icejax.commands import generate as command
from icejax.commands.show import table
from icejax.engine.counters import StepCounters
from icejax.engine.decode_step import DecodePrograms
from icejax.engine.prefill import prefill
from icejax.ops.experts import mixture, offloaded_experts
from icejax.ops.quantized.products import Grouped
from icejax.runtime.host_reads.choose import fetch_backend
from icejax.runtime.host_reads.reader import Reader
from tests import tolerances
from tests.helpers import families
from tests.helpers.run import plan_for
from tests.ops.test_mixture import CHOSEN, COUNT, HIDDEN, INNER, drawn, plain

RESIDENT, STEPS = 3, 5
OTHERS = (
    "qwen3_moe-plain int4", "qwen3_moe-dense-layers int8", "qwen2_moe-plain", "mixtral-plain int8", "glm4_moe-groups fp8",
    "gpt_oss-plain", "gemma4_text-experts",
)  # fmt: skip
PROMPTS = [families.tokens(20), families.tokens(33, seed=1)]


def codes(rng, rows: int, columns: int) -> tuple[Grouped, np.ndarray]:
    """Random int4 codes of every expert in groups of 4 columns, and the matrices that they stand for."""
    shape = (COUNT, columns // 4, rows)
    made = rng.integers(-7, 8, (*shape, 4)).astype(np.int8)
    scale, zero = rng.uniform(0.05, 0.1, shape).astype(np.float32), rng.integers(-4, 4, shape).astype(np.int8)
    groups = (made.astype(np.float64) - zero[..., None]) * scale[..., None]
    grouped = Grouped(jnp.asarray(made, jnp.int4), jnp.asarray(scale), jnp.asarray(zero))
    return grouped, groups.swapaxes(1, 2).reshape(COUNT, rows, columns)


@pytest.mark.parametrize("tokens", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_codes_from_the_host_are_those_on_the_device(tokens):
    """Of a token that is not live nothing has to come; what several take comes once."""
    rng = np.random.default_rng(tokens)
    sizes = (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
    matrices, wide = zip(*(codes(rng, *size) for size in sizes), strict=True)
    ids, live = drawn(rng, tokens, 0.3), np.arange(tokens) != 1
    ids[-1] = ids[0]
    x, shares = (rng.standard_normal((tokens, n)).astype(np.float32) for n in (HIDDEN, CHOSEN))
    reader = Reader(fetch_backend())
    there = [
        offloaded_experts.with_live_tokens(offloaded_experts.offload(each, resident=RESIDENT, read=reader), jnp.asarray(live))
        for each in matrices
    ]
    found, missing = jax.jit(lambda x, m, i, w: (mixture.mix_experts(x, mixture.ExpertWeights(*m), i, w), m[0].missing(i)))(
        x, there, ids, shares
    )
    expected = (plain(x, mixture.ExpertWeights(*wide), ids) * shares[..., None]).sum(1)
    np.testing.assert_allclose(found[live], expected[live], rtol=0, atol=tolerances.EXACT * np.abs(expected).max())
    wanted, seen = np.zeros(ids.shape, bool), set(range(RESIDENT))
    for t, k in np.ndindex(ids.shape):
        wanted[t, k] = live[t] and ids[t, k] not in seen
        seen |= {ids[t, k]} if live[t] else set()
    np.testing.assert_array_equal(missing, wanted)
    for each, whole in zip(there, matrices, strict=True):
        for a, b in zip(jax.tree.leaves(each.whole()), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def decoded(model, prompts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits f32[n, B, V], tokens [n, B], and the experts taken and brought [n, 2, B] of greedy steps."""
    plan = plan_for(model, Full(), prompts, STEPS)
    state, step, pool = prefill(model, prompts, plan)
    decoding, steps = DecodePrograms(model, plan), [step]
    for _ in range(STEPS):
        state, step, pool = decoding.step(state, pool)
        steps.append(step)
    counters = [StepCounters.read(each.counters) for each in steps]
    experts = [(each.experts_taken, each.experts_fetched) for each in counters]
    return np.stack([np.asarray(each.logits) for each in steps]), np.stack([each.token for each in counters]), np.stack(experts)


@torch.no_grad()
def routed(theirs, tokens: list[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The logits of all tokens, and the experts that each takes in every layer that has some, by transformers."""
    said, hooks = [], []
    for layer in theirs.model.layers:
        if hasattr(layer.mlp, "experts"):
            router = layer.mlp.gate if hasattr(layer.mlp, "gate") else layer.mlp.router
            hooks.append(router.register_forward_hook(lambda module, given, out: said.append(out[2].numpy())))
    logits = theirs(torch.tensor([tokens])).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    return logits, said


@pytest.mark.parametrize(
    "name", ["qwen3_moe-plain", *(pytest.param(x, marks=pytest.mark.slow) for x in ("glm4_moe-groups", "gpt_oss-plain"))]
)
def test_experts_are_brought_as_tokens_take_them(name, tmp_path):
    """What prompts take most stays on the device; of the others each comes once a step."""
    theirs = families.build(families.row(name), num_hidden_layers=1 if name == "qwen3_moe-plain" else 3)
    families.save(theirs, tmp_path)
    model = load_model(tmp_path, experts_on_host=RESIDENT)
    logits, chosen, counts = decoded(model, PROMPTS)
    ids = []
    for row, prompt in enumerate(PROMPTS):
        expected, taken = routed(theirs, [*prompt, *chosen[:-1, row].tolist()])
        np.testing.assert_allclose(logits[:, row], expected[len(prompt) - 1 :], rtol=0, atol=tolerances.LOGITS)
        ids.append(taken)
    assert not counts[0].any()
    stacks, wanted = [x.offloaded for x in model.model.layers if x.offloaded is not None], np.zeros_like(counts)
    for layer, stack in enumerate(stacks):
        takes = [
            np.bincount(own[layer][: len(p)].ravel(), minlength=len(stack.slot)) for own, p in zip(ids, PROMPTS, strict=True)
        ]
        held = set(np.argsort(-sum(takes), kind="stable")[:RESIDENT].tolist())
        assert held == set(np.flatnonzero(np.asarray(stack.slot) >= 0).tolist())
        for step in range(STEPS):
            here = set(held)
            for row, prompt in enumerate(PROMPTS):
                taken = ids[row][layer][len(prompt) + step].tolist()
                wanted[step + 1, :, row] += len(taken), len({*taken} - here)
                here |= {*taken}
    np.testing.assert_array_equal(counts, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_logits_are_those_of_all_experts_on_the_device(case, tmp_path):
    name, _, method = case.partition(" ")
    options = dict(quantize=method) if method else {}
    sizes = dict(hidden_size=128, intermediate_size=128, moe_intermediate_size=128, head_dim=32) if method == "int4" else {}
    families.save(families.build(families.row(name), **sizes), tmp_path)
    found, expected = (decoded(load_model(tmp_path, experts_on_host=n, **options), PROMPTS) for n in (RESIDENT, None))
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=tolerances.EXACT)
    assert 0 < found[2][1:, 1].sum() < found[2][1:, 0].sum() and not expected[2].any()


@pytest.mark.slow
def test_a_wide_batch_and_a_row_that_has_ended(tmp_path):
    """Of more pairs than experts each comes at most once; of a row that has ended none does."""
    families.save(families.build(families.row("qwen3_moe-plain"), num_hidden_layers=1), tmp_path)
    prompts = [families.tokens(9, seed=i) for i in range(20)]
    found, expected = (decoded(load_model(tmp_path, experts_on_host=n), prompts) for n in (RESIDENT, None))
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=tolerances.EXACT)
    assert (found[2][1:, 1].sum(-1) <= 8 - RESIDENT).all() and (found[2][1:, 0] == 2).all()
    model = load_model(tmp_path, experts_on_host=RESIDENT)
    plan = plan_for(model, Full(), prompts, STEPS)
    state, _, pool = prefill(model, prompts, plan)
    state = dataclasses.replace(state, done=state.done.at[1:].set(True))
    _, step, _ = DecodePrograms(model, plan).step(state, pool)
    counters = StepCounters.read(step.counters)
    assert counters.experts_taken[0] == 2
    assert not counters.experts_taken[1:].any() and not counters.experts_fetched[1:].any()


def with_tokenizer(path: Path, name: str) -> Path:
    """Returns a folder of a model with experts, and a tokenizer."""
    sizes = dict(hidden_size=128, intermediate_size=128, moe_intermediate_size=128, head_dim=32, vocab_size=512)
    families.save(families.build(families.row(name), **sizes), path)
    for file in generate.ASSETS.glob("token*"):
        shutil.copy(file, path)
    (path / "generation_config.json").unlink(missing_ok=True)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return with_tokenizer(tmp_path_factory.mktemp("model"), "qwen3_moe-dense-layers")


BAD = {
    "none of them": ("llama-gqa", 3, "experts_on_host needs a model with experts, and this llama has none: leave it out"),
    "all of them": ("qwen3_moe-plain", 8, "experts_on_host must be at most 7, got 8"),
    "zero": ("qwen3_moe-plain", 0, "experts_on_host must be at least 1, got 0"),
    "a text": ("qwen3_moe-plain", "3", "experts_on_host must be a whole number, got '3'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_one_line(case, tmp_path):
    name, asked, message = BAD[case]
    row = families.row(name)
    row.config(**families.SIZES | dict(row.changes), architectures=[row.model.__name__]).save_pretrained(tmp_path)
    with pytest.raises(icejax.InputError) as error:
        load_model(tmp_path, experts_on_host=asked)
    assert str(error.value) == message


def test_too_little_host_memory_is_told_before_experts_load(folder, monkeypatch):
    free = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free._replace(available=2**17))
    with pytest.raises(
        icejax.InputError, match=r"^experts need 0\.0029\d GiB of host memory and 0.0 GiB is free: use fewer bits"
    ):
        load_model(folder, experts_on_host=2)


@pytest.mark.slow
def test_the_command_line_tells_hits_and_bytes(folder, capsys):
    def said(*options: str) -> dict:
        line = ["--model", str(folder), "--prompt", "import os\n" * 20, "--max-new-tokens", "9", "--json", "--quantize", "int8"]
        status = command.main([*line, "--compile-cache", "none", *options])
        assert status == 0
        return json.loads(capsys.readouterr().out)

    plain, half, few = said(), said("--experts-on-host"), said("--experts-on-host", "2")
    assert plain["token_ids"] == half["token_ids"] == few["token_ids"]
    assert plain["expert_hit_rate"] is plain["expert_bytes_per_token"] is None
    assert 0 <= few["expert_hit_rate"] < half["expert_hit_rate"] <= 1
    layers = taken = 2  # experts that a token takes in each
    for each in (half, few):
        brought = (1 - each["expert_hit_rate"]) * layers * taken
        assert each["expert_bytes_per_token"] == pytest.approx(brought * 3 * 2**15)  # a piece holds the 128 * 128 codes


@pytest.mark.slow
def test_a_session_goes_on_with_experts_anywhere(folder, tmp_path):
    here, tokenizer = icejax.load(folder)
    there, _ = icejax.load(folder, experts_on_host=2)
    options = dict(max_new_tokens=4)
    session = icejax.Session(here, tokenizer, cache=Full(), context_length=400)
    session.ask("import os\n", **options)
    session.save(tmp_path / "kept")
    other = icejax.Session.load(tmp_path / "kept", there, tokenizer)
    again, expected = (x.ask("import sys\n", **options) for x in (other, session))
    assert again.token_ids == expected.token_ids and again.expert_hit_rate is not None
    console = Console(file=io.StringIO(), width=200)
    console.print(table([again], console))
    assert f"{again.expert_hit_rate:.0%}" in console.file.getvalue() and "expert hits" in console.file.getvalue()


@pytest.mark.slow
def test_a_session_keeps_the_end_mark_as_all_experts_see_it(tmp_path):
    """It comes into the cache when the row has ended, and brings its experts all the same."""
    with_tokenizer(tmp_path, "qwen3_moe-plain")
    first = icejax.Session(*icejax.load(tmp_path), cache=Full(), context_length=400).ask("import os\n", max_new_tokens=6)
    families.edit_config(tmp_path, eos_token_id=first.token_ids[3])

    def second(**options) -> list[float]:
        session = icejax.Session(*icejax.load(tmp_path, **options), cache=Full(), context_length=400)
        assert session.ask("import os\n", max_new_tokens=6).finish_reason == "stop"
        (token,) = session.ask("import sys\n", max_new_tokens=1, logprobs=5).logprobs
        return [each.logprob for each in token.top]

    np.testing.assert_allclose(second(experts_on_host=2), second(), rtol=0, atol=tolerances.EXACT)


@pytest.mark.slow
def test_an_expert_that_is_not_finite_is_found(folder):
    model, tokenizer = icejax.load(folder, experts_on_host=2)
    part = model.model.layers[-1].mlp.experts.up_proj.weight
    whole = part.get_value().whole().at[7, 3, 5].set(jnp.nan)
    part.set_value(
        dataclasses.replace(
            part.get_value(), table=jax.device_put(offloaded_experts.packed(whole), part.get_value().table.sharding)
        )
    )
    with pytest.raises(icejax.InputError, match="layers.*2.*experts.up_proj.weight holds NaN"):
        icejax.generate(model, tokenizer, "import os\n" * 40, max_new_tokens=20)
