"""Experts in host memory: outputs equal those with all experts on the device, and the counters tell which were fetched."""

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
from icejax.commands.terminal.show import table
from icejax.engine.decode.counters import StepCounters
from icejax.engine.decode.step import DecodePrograms
from icejax.engine.prefill import prefill
from icejax.ops.experts import mixture, offloaded_experts
from icejax.ops.quantized.products import Grouped
from icejax.runtime.host_reads.choose import fetch_backend
from icejax.runtime.host_reads.reader import Reader
from tests import tolerances
from tests.helpers import families
from tests.helpers.letters import Letters
from tests.helpers.run import plan_for
from tests.ops.test_mixture import CHOSEN, COUNT, HIDDEN, INNER, drawn, plain

RESIDENT, STEPS = 3, 5
CASES = (
    "qwen3_moe-plain int4", "qwen3_moe-dense-layers int8", "qwen2_moe-plain", "mixtral-plain int8", "glm4_moe-groups fp8",
    "gpt_oss-plain", "gemma4_text-experts",
)  # fmt: skip
PROMPTS = [families.tokens(20), families.tokens(33, seed=1)]


def codes(rng, rows: int, columns: int) -> tuple[Grouped, np.ndarray]:
    """Returns random int4 codes of every expert, in groups of 4 columns, and the float64 matrices that they stand for."""
    shape = (COUNT, columns // 4, rows)
    values = rng.integers(-7, 8, (*shape, 4)).astype(np.int8)
    scale, zero = rng.uniform(0.05, 0.1, shape).astype(np.float32), rng.integers(-4, 4, shape).astype(np.int8)
    groups = (values.astype(np.float64) - zero[..., None]) * scale[..., None]
    grouped = Grouped(jnp.asarray(values, jnp.int4), jnp.asarray(scale), jnp.asarray(zero))
    return grouped, groups.swapaxes(1, 2).reshape(COUNT, rows, columns)


@pytest.mark.parametrize("tokens", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_codes_from_the_host_are_those_on_the_device(tokens):
    """A token that is not live fetches no expert; an expert that several tokens take is fetched once."""
    rng = np.random.default_rng(tokens)
    sizes = (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
    matrices, dequantised = zip(*(codes(rng, *size) for size in sizes), strict=True)
    ids, live = drawn(rng, tokens, 0.3), np.arange(tokens) != 1
    ids[-1] = ids[0]
    x, shares = (rng.standard_normal((tokens, n)).astype(np.float32) for n in (HIDDEN, CHOSEN))
    reader = Reader(fetch_backend())
    offloaded = [
        offloaded_experts.with_live_tokens(offloaded_experts.offload(matrix, resident=RESIDENT, read=reader), jnp.asarray(live))
        for matrix in matrices
    ]
    actual, missing = jax.jit(lambda x, m, i, w: (mixture.mix_experts(x, mixture.ExpertWeights(*m), i, w), m[0].missing(i)))(
        x, offloaded, ids, shares
    )
    expected = (plain(x, mixture.ExpertWeights(*dequantised), ids) * shares[..., None]).sum(1)
    np.testing.assert_allclose(actual[live], expected[live], rtol=0, atol=tolerances.EXACT * np.abs(expected).max())
    expected_missing, available = np.zeros(ids.shape, bool), set(range(RESIDENT))
    for t, k in np.ndindex(ids.shape):
        expected_missing[t, k] = live[t] and ids[t, k] not in available
        available |= {ids[t, k]} if live[t] else set()
    np.testing.assert_array_equal(missing, expected_missing)
    for matrix, on_device in zip(offloaded, matrices, strict=True):
        for actual_leaf, expected_leaf in zip(jax.tree.leaves(matrix.whole()), jax.tree.leaves(on_device), strict=True):
            np.testing.assert_array_equal(np.asarray(actual_leaf, np.float32), np.asarray(expected_leaf, np.float32))


def decode_greedily(model, prompts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns logits f32[n, B, V], token ids [n, B], and the numbers of experts taken and fetched [n, 2, B] of greedy steps."""
    plan = plan_for(model, Full(), prompts, STEPS)
    state, step, pool = prefill(model, prompts, plan)
    programs, steps = DecodePrograms(model, plan), [step]
    for _ in range(STEPS):
        state, step, pool = programs.step(state, pool)
        steps.append(step)
    counters = [StepCounters.read(item.counters) for item in steps]
    experts = [(item.experts_taken, item.experts_fetched) for item in counters]
    return np.stack([np.asarray(item.logits) for item in steps]), np.stack([item.token for item in counters]), np.stack(experts)


@torch.no_grad()
def reference(theirs, tokens: list[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns transformers' logits of all tokens, and the experts that each token takes in every layer with experts."""
    expert_ids, hooks = [], []
    for layer in theirs.model.layers:
        if hasattr(layer.mlp, "experts"):
            router = layer.mlp.gate if hasattr(layer.mlp, "gate") else layer.mlp.router
            hooks.append(router.register_forward_hook(lambda module, inputs, out: expert_ids.append(out[2].numpy())))
    logits = theirs(torch.tensor([tokens])).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    return logits, expert_ids


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe-plain",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("glm4_moe-groups", "gpt_oss-plain")),
    ],
)
def test_experts_are_brought_as_tokens_take_them(name, tmp_path):
    """The experts that the prompts take most often stay on the device; any other is fetched at most once a step."""
    theirs = families.build(families.row(name), num_hidden_layers=1 if name == "qwen3_moe-plain" else 3)
    families.save(theirs, tmp_path)
    model = load_model(tmp_path, experts_on_host=RESIDENT)
    logits, token_ids, counts = decode_greedily(model, PROMPTS)
    ids = []
    for row, prompt in enumerate(PROMPTS):
        expected, expert_ids = reference(theirs, [*prompt, *token_ids[:-1, row].tolist()])
        np.testing.assert_allclose(logits[:, row], expected[len(prompt) - 1 :], rtol=0, atol=tolerances.LOGITS)
        ids.append(expert_ids)
    assert not counts[0].any()
    stacks, expected_counts = (
        [x.offloaded for x in model.model.layers if x.offloaded is not None],
        np.zeros_like(counts),
    )
    for layer, stack in enumerate(stacks):
        uses = [
            np.bincount(row_ids[layer][: len(prompt_ids)].ravel(), minlength=len(stack.slot))
            for row_ids, prompt_ids in zip(ids, PROMPTS, strict=True)
        ]
        resident = set(np.argsort(-sum(uses), kind="stable")[:RESIDENT].tolist())
        assert resident == set(np.flatnonzero(np.asarray(stack.slot) >= 0).tolist())
        for step in range(STEPS):
            available = set(resident)
            for row, prompt in enumerate(PROMPTS):
                expert_ids = ids[row][layer][len(prompt) + step].tolist()
                expected_counts[step + 1, :, row] += len(expert_ids), len({*expert_ids} - available)
                available |= {*expert_ids}
    np.testing.assert_array_equal(counts, expected_counts)


def test_generate_decodes_with_the_experts_that_prefill_moved(tmp_path):
    """A session takes the weights after the prefill; so must generate, or it fetches what is on the device."""
    families.save(families.build(families.row("qwen3_moe-plain"), num_hidden_layers=1), tmp_path)
    options = dict(cache=icejax.Full(), context_length=60)
    (answer,) = icejax.generate(
        load_model(tmp_path, experts_on_host=RESIDENT), Letters(), "abcab" * 6, max_new_tokens=12, **options
    )
    session = icejax.Session(load_model(tmp_path, experts_on_host=RESIDENT), Letters(), **options)
    expected = session.ask("abcab" * 6, max_new_tokens=12)
    assert answer.token_ids == expected.token_ids and 0 < answer.expert_hit_rate == expected.expert_hit_rate


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_all_experts_on_the_device(case, tmp_path):
    name, _, method = case.partition(" ")
    options = dict(quantize=method) if method else {}
    sizes = dict(hidden_size=128, intermediate_size=128, moe_intermediate_size=128, head_dim=32) if method == "int4" else {}
    families.save(families.build(families.row(name), **sizes), tmp_path)
    actual, expected = (decode_greedily(load_model(tmp_path, experts_on_host=n, **options), PROMPTS) for n in (RESIDENT, None))
    np.testing.assert_allclose(actual[0], expected[0], rtol=0, atol=tolerances.EXACT)
    assert 0 < actual[2][1:, 1].sum() < actual[2][1:, 0].sum() and not expected[2].any()


@pytest.mark.slow
def test_a_wide_batch_and_a_row_that_has_ended(tmp_path):
    """A step of 20 rows fetches no expert twice, and a row that has ended fetches none."""
    families.save(families.build(families.row("qwen3_moe-plain"), num_hidden_layers=1), tmp_path)
    prompts = [families.tokens(9, seed=i) for i in range(20)]
    actual, expected = (decode_greedily(load_model(tmp_path, experts_on_host=n), prompts) for n in (RESIDENT, None))
    np.testing.assert_allclose(actual[0], expected[0], rtol=0, atol=tolerances.EXACT)
    assert (actual[2][1:, 1].sum(-1) <= 8 - RESIDENT).all() and (actual[2][1:, 0] == 2).all()
    model = load_model(tmp_path, experts_on_host=RESIDENT)
    plan = plan_for(model, Full(), prompts, STEPS)
    state, _, pool = prefill(model, prompts, plan)
    state = dataclasses.replace(state, done=state.done.at[1:].set(True))
    _, step, _ = DecodePrograms(model, plan).step(state, pool)
    counters = StepCounters.read(step.counters)
    assert counters.experts_taken[0] == 2
    assert not counters.experts_taken[1:].any() and not counters.experts_fetched[1:].any()


def with_tokenizer(path: Path, name: str) -> Path:
    """Writes a model with experts and a tokenizer to a folder, and returns it."""
    sizes = dict(hidden_size=128, intermediate_size=128, moe_intermediate_size=128, head_dim=32, vocab_size=512)
    families.save(families.build(families.row(name), **sizes), path)
    for file in generate.ASSETS.glob("token*"):
        shutil.copy(file, path)
    (path / "generation_config.json").unlink(missing_ok=True)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return with_tokenizer(tmp_path_factory.mktemp("model"), "qwen3_moe-dense-layers")


REFUSED = {
    "none of them": ("llama-gqa", 3, "experts_on_host needs a model with experts, and this llama has none: leave it out"),
    "all of them": ("qwen3_moe-plain", 8, "experts_on_host must be at most 7, got 8"),
    "zero": ("qwen3_moe-plain", 0, "experts_on_host must be at least 1, got 0"),
    "a text": ("qwen3_moe-plain", "3", "experts_on_host must be a whole number, got '3'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_one_line(case, tmp_path):
    name, number, message = REFUSED[case]
    row = families.row(name)
    row.config(**families.SIZES | dict(row.changes), architectures=[row.model.__name__]).save_pretrained(tmp_path)
    with pytest.raises(icejax.InputError) as error:
        load_model(tmp_path, experts_on_host=number)
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
    def run_command(*options: str) -> dict:
        line = ["--model", str(folder), "--prompt", "import os\n" * 20, "--max-new-tokens", "9", "--json", "--quantize", "int8"]
        status = command.main([*line, "--compile-cache", "none", *options])
        assert status == 0
        return json.loads(capsys.readouterr().out)

    on_device, half, two = run_command(), run_command("--experts-on-host"), run_command("--experts-on-host", "2")
    assert on_device["token_ids"] == half["token_ids"] == two["token_ids"]
    assert on_device["expert_hit_rate"] is on_device["expert_bytes_per_token"] is None
    assert 0 <= two["expert_hit_rate"] < half["expert_hit_rate"] <= 1
    layers = experts_per_token = 2  # two layers have experts, and a token takes two in each
    for result in (half, two):
        fetched = (1 - result["expert_hit_rate"]) * layers * experts_per_token
        # Each of the 3 matrices, of 128 x 128 int8 codes, takes 2**15 bytes of the table.
        assert result["expert_bytes_per_token"] == pytest.approx(fetched * 3 * 2**15)


@pytest.mark.slow
def test_a_session_goes_on_with_experts_anywhere(folder, tmp_path):
    model, tokenizer = icejax.load(folder)
    offloaded_model, _ = icejax.load(folder, experts_on_host=2)
    options = dict(max_new_tokens=4)
    session = icejax.Session(model, tokenizer, cache=Full(), context_length=400)
    session.ask("import os\n", **options)
    session.save(tmp_path / "kept")
    resumed = icejax.Session.load(tmp_path / "kept", offloaded_model, tokenizer)
    reply, expected = (x.ask("import sys\n", **options) for x in (resumed, session))
    assert reply.token_ids == expected.token_ids and reply.expert_hit_rate is not None
    console = Console(file=io.StringIO(), width=200)
    console.print(table([reply], console))
    assert f"{reply.expert_hit_rate:.0%}" in console.file.getvalue() and "expert hits" in console.file.getvalue()


@pytest.mark.slow
def test_a_session_keeps_the_end_mark_as_all_experts_see_it(tmp_path):
    """The end mark enters the cache after the row has ended; its experts are fetched all the same."""
    with_tokenizer(tmp_path, "qwen3_moe-plain")
    first = icejax.Session(*icejax.load(tmp_path), cache=Full(), context_length=400).ask("import os\n", max_new_tokens=6)
    families.edit_config(tmp_path, eos_token_id=first.token_ids[3])

    def second_logprobs(**options) -> list[float]:
        session = icejax.Session(*icejax.load(tmp_path, **options), cache=Full(), context_length=400)
        assert session.ask("import os\n", max_new_tokens=6).finish_reason == "stop"
        (token,) = session.ask("import sys\n", max_new_tokens=1, logprobs=5).logprobs
        return [candidate.logprob for candidate in token.top]

    np.testing.assert_allclose(second_logprobs(experts_on_host=2), second_logprobs(), rtol=0, atol=tolerances.EXACT)


@pytest.mark.slow
def test_an_expert_that_is_not_finite_is_found(folder):
    model, tokenizer = icejax.load(folder, experts_on_host=2)
    parameter = model.model.layers[-1].mlp.experts.up_proj.weight
    experts = parameter.get_value().whole().at[7, 3, 5].set(jnp.nan)
    parameter.set_value(
        dataclasses.replace(
            parameter.get_value(), table=jax.device_put(offloaded_experts.packed(experts), parameter.get_value().table.sharding)
        )
    )
    with pytest.raises(icejax.InputError, match="layers.*2.*experts.up_proj.weight holds NaN"):
        icejax.generate(model, tokenizer, "import os\n" * 40, max_new_tokens=20)
