"""A prompt's output depends neither on its batch nor on a batch size or context length far larger than needed."""

import dataclasses
import json

import pytest

import icejax
from icejax.cache.registry import Full
from icejax.commands import generate as command

PROMPTS = ["import os", "x = [", "def f(a):", "class A:", "import os"]


@pytest.fixture
def answers(bundled, monkeypatch, capsys):
    """Returns a function that runs the command line on the bundled model, loaded once, and returns the token ids."""
    monkeypatch.setattr(command, "load", lambda *_, **__: bundled)

    def run(*arguments: str) -> list[tuple[int, ...]]:
        prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
        options = ["--max-new-tokens", "12", "--cache", "full", "--compile-cache", "none", "--json"]
        assert command.main([*prompts, *options, *arguments]) == 0
        out, err = capsys.readouterr()
        run.err = err
        return [tuple(json.loads(line)["token_ids"]) for line in out.splitlines()]

    return run


@pytest.mark.slow
def test_sampled_texts_are_the_same_in_batches_of_any_size(answers):
    sampling_options = ("--temperature", "1.2", "--seed", "3")
    runs = [answers(*sampling_options, "--batch-size", size) for size in ("1", "2", str(10**12))]
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][0] != runs[0][4]  # equal prompts draw different samples, in one batch and in several
    assert answers("--temperature", "1.2", "--seed", "4") != runs[0]


@pytest.mark.slow
def test_index_names_the_prompt_of_a_run_and_its_seed(bundled):
    options = dict(cache=Full(), sampling=icejax.Sampling(temperature=1.2), max_new_tokens=12)
    together = icejax.generate(*bundled, PROMPTS[:3], **options)
    requests = [icejax.Request(prompt=text, index=i) for i, text in enumerate(PROMPTS[:3])]
    alone = [icejax.generate(*bundled, request, **options)[0] for request in requests]
    assert [a.token_ids for a in alone] == [t.token_ids for t in together]
    seeded = [icejax.Request(prompt=PROMPTS[0], seed=7, index=i) for i in range(2)]
    first, second = icejax.generate(*bundled, seeded, **options)
    assert first.token_ids == second.token_ids == icejax.generate(*bundled, PROMPTS[0], seed=7, **options)[0].token_ids
    assert first.token_ids != together[0].token_ids


SAMPLINGS = (
    icejax.Sampling(temperature=1.2),
    icejax.Sampling(),
    icejax.Sampling(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.3),
    icejax.Sampling(repetition_penalty=1.5),
    icejax.Sampling(temperature=1.5, min_p=0.05),
    icejax.Sampling(frequency_penalty=1.0, presence_penalty=0.5),
    icejax.Sampling(temperature=1.0, presence_penalty=-1.0, logit_bias={101: 5.0, 32: -100}),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cache, rows",
    [pytest.param(Full(), tuple(range(7)), marks=pytest.mark.slow), (icejax.Clustered(budget=64), (6, 1))],
    ids=repr,
)
def test_each_row_samples_in_its_own_way_as_it_would_alone(bundled, cache, rows):
    """Row 1 is greedy: alone, it is run by the program that never samples."""
    options = dict(cache=cache, max_new_tokens=24)
    requests = [icejax.Request(prompt=PROMPTS[i % 5] * 8, sampling=SAMPLINGS[i], index=i) for i in rows]
    together = icejax.generate(*bundled, requests, **options)
    alone = [icejax.generate(*bundled, request, **options)[0].token_ids for request in requests]
    assert [result.token_ids for result in together] == alone
    assert together[rows.index(1)].token_ids == icejax.generate(*bundled, PROMPTS[1] * 8, **options)[0].token_ids


@pytest.mark.slow
def test_a_request_without_sampling_has_that_of_the_call(bundled):
    options = dict(cache=Full(), max_new_tokens=12, sampling=SAMPLINGS[0])
    requests = [icejax.Request(prompt=PROMPTS[0], sampling=sampling) for sampling in (None, SAMPLINGS[0], SAMPLINGS[1])]
    of_call, of_request, greedy = icejax.generate(
        *bundled, [dataclasses.replace(request, seed=3) for request in requests], **options
    )
    assert of_call.token_ids == of_request.token_ids != greedy.token_ids


def test_a_context_beyond_the_models_own_is_warned_of_once(answers):
    answers("--batch-size", "2", "--context-length", "40000")
    assert answers.err == (
        "icejax.generate: warning: a context length of 40000 is beyond the model's own 32768: expect worse answers there\n"
    )
    answers("--batch-size", "2", "--context-length", "32768")
    assert answers.err == ""


def test_a_session_and_generate_log_the_same_warning(bundled, caplog):
    icejax.Session(*bundled, context_length=40000)
    icejax.generate(*bundled, "x", max_new_tokens=1, cache=Full(), context_length=40000)
    assert [r.message for r in caplog.records if "beyond the model's own 32768" in r.message] == [caplog.records[0].message] * 2
