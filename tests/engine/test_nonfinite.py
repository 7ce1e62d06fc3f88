"""NaN or infinite logits end a generation at once, with one error line that names the weight or layer at fault."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import icejax
from icejax.api.generate import ASSETS
from icejax.cache.registry import Full
from icejax.commands import generate as command
from icejax.session.session import Session
from tests.helpers import families
from tests.helpers.letters import Letters

PROMPTS = ["a" * 30, "b" * 50 + "c"]


@pytest.fixture
def model(tmp_path):
    """Returns a model that the test may change; its head is not tied to its embedding."""
    return families.load(families.build(families.row("llama-gqa")), tmp_path)


def plant(parameter, value: float, *index: int) -> None:
    parameter[...] = parameter[...].at[index].set(value)


def ask(model, prompts=PROMPTS, **options):
    return icejax.generate(model, Letters(), prompts, **dict(cache=Full(), max_new_tokens=8) | options)


def message(model, *arguments, **options) -> str:
    with pytest.raises(icejax.InputError) as error:
        ask(model, *arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("cache", [Full(), icejax.Clustered(budget=64)], ids=["full", "clustered"])
def test_a_weight_of_nan_is_named(model, cache):
    plant(model.model.layers[2].mlp.up_proj.weight, jnp.nan, 5, 7)
    assert message(model, cache=cache) == (
        "prompt 1: the model's logits are not finite: model.layers.2.mlp.up_proj.weight holds NaN: fetch the checkpoint again"
    )


def test_infinity_in_the_head_is_named_first_weight_wins(model):
    plant(model.lm_head.weight, jnp.inf, 5)
    assert message(model, icejax.Request(prompt="x", index=4)).startswith(
        "prompt 5: the model's logits are not finite: lm_head.weight holds an inf"
    )
    plant(model.model.layers[1].self_attn.k_proj.weight, -jnp.inf, 0, 0)
    assert "model.layers.1.self_attn.k_proj.weight holds an infinity" in message(model)


@pytest.mark.slow
def test_a_layer_that_overflows_is_named(tmp_path):
    built = families.build(families.row("llama-gqa"))
    model = icejax.checkpoint.load_model(families.save(built, tmp_path), dtype="float16")
    weight = model.model.layers[1].mlp.down_proj.weight
    weight[...] = weight[...] * 6e4 / jnp.abs(weight[...]).max()
    assert message(model).endswith("the output of layer 1 is not finite in float16: try --dtype float32")
    model.model.layers[1].mlp.down_proj.weight[...] *= 0
    model.model.norm.weight[...] = jnp.full_like(model.model.norm.weight[...], 6e4)
    assert message(model).endswith("every layer's output is finite in float16, the final norm's or the head's is not: try --dtype float32")  # fmt: skip


def test_a_step_that_is_not_the_first_ends_it_too(model):
    """NaN stands in the embedding of a token that only the second prompt's answer generates."""
    first, second = ask(model)
    fresh = [token for token in second.token_ids[1:-1] if token not in (*first.token_ids, ord("a") - 33, ord("b") - 33)]
    plant(model.model.embed_tokens.weight, jnp.nan, fresh[0])
    pieces, received = icejax.stream_generate(model, Letters(), PROMPTS, cache=Full(), max_new_tokens=8), []
    with pytest.raises(icejax.InputError, match="prompt 2: the model's logits .* model.embed_tokens.weight holds NaN"):
        for piece in pieces:
            received.append(piece)
    streamed_ids = [piece.token_ids[0] for piece in received if piece.row == 1]
    assert (
        streamed_ids == list(second.token_ids[: len(streamed_ids)]) and streamed_ids[-1] == fresh[0] and len(streamed_ids) > 1
    )
    assert ask(model, PROMPTS[:1])[0].token_ids == first.token_ids


def test_a_row_that_has_ended_does_not_matter(model):
    """The first row ends with its first token; the NaN that its place in the batch computes later is ignored."""
    first, second = ask(model)
    model.config = dataclasses.replace(model.config, eos_token_ids=(first.token_ids[0],))
    plant(model.model.embed_tokens.weight, jnp.nan, first.token_ids[0])
    assert first.token_ids[0] not in second.token_ids
    results = ask(model)
    assert results[0].finish_reason == "stop" and results[1].token_ids == second.token_ids


def test_log_probabilities_do_not_hide_it(model):
    plant(model.model.layers[0].input_layernorm.weight, jnp.nan, 3)
    with pytest.raises(icejax.InputError, match=r"model\.layers\.0\.input_layernorm\.weight holds NaN"):
        ask(model, logprobs=2)


@pytest.mark.slow
def test_a_row_whose_text_has_ended_is_done(model):
    """A row that reaches its own limit of new tokens is done, while the other row decodes on."""
    done, requests = [], [icejax.Request(prompt="a" * 60, max_new_tokens=2), icejax.Request(prompt="b" * 60, max_new_tokens=12)]
    watch = lambda state: done.append(np.asarray(state.done).tolist())  # noqa: E731
    results = icejax.generate(model, Letters(), requests, cache=icejax.Clustered(budget=64), watch=watch, logprobs=0)
    assert [len(result.token_ids) for result in results] == [2, 12]
    assert (
        [row_done[1] for row_done in done] == [False] * len(done)
        and [row_done[0] for row_done in done][2:] == [True] * (len(done) - 2)
        and len(done) > 3
    )


@pytest.mark.slow
def test_a_session_says_so_and_penalties_do_not_hide_it(model):
    session = Session(model, Letters(), cache=Full(), context_length=300)
    sampling = icejax.Sampling(temperature=1.0, repetition_penalty=1.2, top_k=5, top_p=0.9)
    session.ask("a" * 20, max_new_tokens=3, sampling=sampling)
    plant(model.model.layers[0].input_layernorm.weight, jnp.nan, 3)
    with pytest.raises(icejax.InputError, match=r"model\.layers\.0\.input_layernorm\.weight holds NaN"):
        session.ask("b", max_new_tokens=3, sampling=sampling)


@pytest.mark.slow
def test_the_command_line_says_so(capsys, monkeypatch, bundled):
    model, tokenizer = icejax.load()
    plant(model.model.layers[2].mlp.gate_proj.weight, jnp.nan, 0, 0)
    monkeypatch.setattr(command, "load", lambda *_, **__: (model, tokenizer))
    status = command.main(["--model", str(ASSETS), "--prompt", "x", "--cache", "full", "--compile-cache", "none"])
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and "\0" not in out
    assert err == (
        "icejax.generate: error: prompt 1: the model's logits are not finite: "
        "model.layers.2.mlp.gate_proj.weight holds NaN: fetch the checkpoint again\n"
    )
