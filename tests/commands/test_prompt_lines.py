"""Prompt files with options per line, token ids as prompts, log-probabilities, and how prompts are batched."""

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

import icejax
from icejax.api import jobs
from icejax.cache.registry import Full
from icejax.commands.requests import read_prompts
from tests.helpers import families
from tests.helpers.commands import run
from tests.helpers.run import all_logits

LINES = [
    {"id": "a", "prompt": "import os\n" * 4, "max_new_tokens": 3},
    {"id": 7, "prompt": "import ", "temperature": 1.5, "seed": 5, "max_new_tokens": 12},
    {"prompt": "x = 1\n", "stop": "1", "id": None, "seed": None},
    {"id": "b", "prompt": "import ", "temperature": 1.5, "seed": 5, "max_new_tokens": 12, "stop": ["\0zz", "\0\0"]},
]
COMMON = ["--json", "--cache", "full", "--max-new-tokens", "6", "--compile-cache", "none"]


@pytest.mark.slow
def test_lines_have_what_they_ask_for_in_the_order_asked(capsys, tmp_path, bundled, monkeypatch):
    monkeypatch.setattr("icejax.commands.generate.load", lambda *_: bundled)
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(line) for line in LINES))
    status, out, err = run(capsys, "--prompt-file", str(tmp_path / "p.jsonl"), "--batch-size", "2", *COMMON)
    responses = [json.loads(line) for line in out.splitlines()]
    assert (status, err) == (0, "") and [response.get("id") for response in responses] == ["a", 7, None, "b"]
    assert [len(response["token_ids"]) for response in responses][:2] == [3, 12] and "id" not in responses[2]
    assert (
        responses[1]["token_ids"] == responses[3]["token_ids"] != responses[0]["token_ids"]
    )  # a seed draws the same tokens in any row
    for line, response in zip(LINES, responses, strict=True):
        options = {name: line[name] for name in ("seed", "stop") if line.get(name) is not None} | {"max_new_tokens": 6}
        options["max_new_tokens"] = line.get("max_new_tokens", 6)
        sampling = icejax.Sampling(temperature=line.get("temperature", 0.0))
        (single,) = icejax.generate(*bundled, line["prompt"], cache=Full(), sampling=sampling, **options)
        assert response["text"] == single.text


SAMPLED = [
    {"prompt": "import ", "temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"prompt": "import ", "repetition_penalty": 1.3, "logprobs": 2},
    {
        "prompt": "import ",
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "logit_bias": {"97": 3, "10": -100},
        "top_p": None,
    },
    {"prompt": "import ", "temperature": 0, "logprobs": 0},
    {"prompt": "import "},
]


@pytest.mark.slow
def test_lines_have_sampling_and_logprobs_of_their_own(capsys, tmp_path, bundled, monkeypatch):
    monkeypatch.setattr("icejax.commands.generate.load", lambda *_: bundled)
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(line) for line in SAMPLED))
    flags = ["--temperature", "0.7", "--presence-penalty", "0.25", "--logit-bias", "97=1"]
    status, out, err = run(capsys, "--prompt-file", str(tmp_path / "p.jsonl"), *flags, *COMMON)
    responses = [json.loads(line) for line in out.splitlines()]
    assert (status, err) == (0, "")
    requests, common = [], dict(temperature=0.7, presence_penalty=0.25, logit_bias={97: 1})
    for line in SAMPLED:
        changes = {name: value for name, value in line.items() if name not in ("prompt", "logprobs") and value is not None}
        sampling = icejax.Sampling(**common | changes)
        requests.append(icejax.Request(prompt="import ", sampling=sampling, logprobs=line.get("logprobs")))
    expected = icejax.generate(*bundled, requests, cache=Full(), max_new_tokens=6)
    for line, response, single in zip(SAMPLED, responses, expected, strict=True):
        assert response["token_ids"] == list(single.token_ids)
        reported = response["logprobs"] and [len(token["top"]) for token in response["logprobs"]]
        assert reported == ([line["logprobs"]] * len(single.token_ids) if "logprobs" in line else None)
    assert len({tuple(response["token_ids"]) for response in responses}) >= 4


@pytest.mark.slow
def test_rows_of_a_batch_report_what_each_asks_for(bundled):
    counts = (None, 3, 0, 300)
    requests = [icejax.Request(prompt="import ", logprobs=count) for count in counts]
    responses = icejax.generate(*bundled, requests, cache=Full(), max_new_tokens=3)
    full = responses[3].logprobs
    assert responses[0].logprobs is None and len(full[0].top) == 257  # the vocabulary
    for response, count in zip(responses[1:], counts[1:], strict=True):
        assert [token.top for token in response.logprobs] == [token.top[:count] for token in full]
        assert [token.chosen for token in response.logprobs] == [token.chosen for token in full]
    both = [icejax.Request(prompt="import ", logprobs=1), icejax.Request(prompt="import ")]
    responses = icejax.generate(*bundled, both, cache=Full(), max_new_tokens=3, logprobs=2)
    assert [len(response.logprobs[0].top) for response in responses] == [1, 2]
    with pytest.raises(icejax.InputError, match="logprobs must be at most 1000, got 1001"):
        icejax.generate(*bundled, icejax.Request(prompt="x", logprobs=1001))


WRONG = {
    "unknown": ({"prompt": "x", "temprature": 1}, "unknown key 'temprature': expected prompt, messages, tools, chat_template_kwargs, id, max_new_tokens, seed, stop, logprobs, temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias (did you mean temperature?)"),
    "nothing": ({"id": 3}, "expected a text 'prompt' or a list of 'messages' in the JSON object, got neither"),
    "null": ({"prompt": None}, "got neither"),
    "both": ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "got both"),
    "messages": ({"messages": [{"role": "user"}]}, "'messages' must be a list of objects with a text role, a content (text, or a list of text parts) and perhaps a text reasoning, got [{'role': 'user'}]"),
    "thoughts twice": ({"messages": [{"role": "user", "content": "x", "reasoning": "a", "reasoning_content": "b"}]}, "'messages' must be a list of objects"),
    "no messages": ({"messages": []}, "'messages' must be a list of objects"),
    "id": ({"prompt": "x", "id": [1]}, "'id' must be text or a number, got [1]"),
    "endless id": ({"prompt": "x", "id": float("nan")}, "'id' must be text or a number, got nan"),
    "true id": ({"prompt": "x", "id": True}, "'id' must be text or a number, got True"),
    "half an id": ({"prompt": "x", "id": "\ud800"}, "'id' must be text or a number, got '\\ud800'"),
    "tokens": ({"prompt": "x", "max_new_tokens": 0}, "'max_new_tokens' must be at least 1, got 0"),
    "seed": ({"prompt": "x", "seed": -1}, "'seed' must be at least 0, got -1"),
    "temperature": ({"prompt": "x", "temperature": "hot"}, "line 2: temperature must be a number from 0 to 1e+06, got 'hot'"),
    "top p": ({"prompt": "x", "top_p": 0}, "line 2: top_p must be a number above 0 and at most 1, got 0"),
    "presence": ({"prompt": "x", "presence_penalty": 3}, "line 2: presence_penalty must be a number from -2 to 2, got 3"),
    "bias": ({"prompt": "x", "logit_bias": {"a": 1}}, "line 2: a token id of logit_bias must be a whole number, got 'a'"),
    "biases": ({"prompt": "x", "logit_bias": [1]}, "line 2: logit_bias must have a number for each of some token ids, got [1]"),
    "strong bias": ({"prompt": "x", "logit_bias": {"1": -101}}, "line 2: logit_bias of token 1 must be a number from -100 to 100, got -101"),
    "logprobs": ({"prompt": "x", "logprobs": True}, "line 2: 'logprobs' must be a whole number, got True"),
    "many logprobs": ({"prompt": "x", "logprobs": 1001}, "line 2: 'logprobs' must be at most 1000, got 1001"),
    "stop": ({"prompt": "x", "stop": [""]}, "a stop string is empty: expected some text"),
    "no stop": ({"prompt": "x", "stop": 3}, "stop must be a string or several in a list, got 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_line_that_asks_for_what_cannot_be_is_refused(capsys, tmp_path, case):
    line, message = WRONG[case]
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n' + json.dumps(line))
    status, out, err = run(capsys, "--prompt-file", str(tmp_path / "p.jsonl"))
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err
    assert "line 2: " in err


def test_messages_are_no_turn_of_a_session(capsys, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}')
    status, out, err = run(capsys, "--prompt-file", str(tmp_path / "p.jsonl"), "--session", str(tmp_path / "kept"))
    assert (status, out) == (2, "") and "'messages' are a whole chat: leave --session out" in err


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_the_thoughts_of_a_message_have_two_names(tmp_path, name):
    message = {"role": "assistant", "content": "4", name: "A sum."}
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "x"}, message]}))
    (line,) = read_prompts(
        SimpleNamespace(text=[], prompt=[], prompt_file=tmp_path / "p.jsonl", model=None, context_length=1000)
    )
    assert line.messages[1] == {"role": "assistant", "content": "4", "reasoning": "A sum."}


def test_token_ids_are_prompts(bundled):
    text = "import os\nimport sys\n"
    options = dict(cache=Full(), max_new_tokens=5)
    expected = icejax.generate(*bundled, text, **options)[0].token_ids
    ids = bundled[1](text).input_ids
    for prompts in (ids, [ids], np.asarray(ids), [np.asarray(ids, np.int64)], icejax.Request(prompt=ids)):
        assert icejax.generate(*bundled, prompts, **options)[0].token_ids == expected
    for bad_prompts, message in (
        ([[1, 300]], "prompt 1 has token 300 and the model knows 257: they are of another model"),
        ([-1], "a token id of prompt 1 must be at least 0, got -1"),
        ([[]], "prompt 1 is empty"),
        ([], "no prompt: expected at least one"),
        ([["a"]], r"prompt 1 must be text or token ids, got \['a'\]"),
        ([None], "prompt 1 must be text or token ids, got None"),
        (b"abc", "prompt 1 must be text or token ids, got b'abc'"),
        ([True, False], r"prompt 1 must be text or token ids, got \[True, False\]"),
        ({1, 2}, "prompt 1 must be text or token ids"),
        (7, "prompts must be text, token ids, or several of them, got 7"),
    ):
        with pytest.raises(icejax.InputError, match=message):
            icejax.generate(*bundled, bad_prompts, **options)


@pytest.mark.slow
@pytest.mark.parametrize("cache", [Full(), icejax.Clustered(budget=2000)], ids=["full", "clustered"])
def test_log_probabilities_are_those_of_the_logits(tmp_path, cache):
    """Compares with a float64 log-softmax of the logits of one pass over prompt and answer."""
    model = families.load(families.build(families.row("llama-gqa")), tmp_path)
    prompt = families.tokens(40)

    class Numbers:
        def decode(self, ids, **_):
            return " ".join(map(str, ids))

    options = dict(cache=cache, max_new_tokens=6, logprobs=3)
    (response,) = icejax.generate(model, Numbers(), prompt, sampling=icejax.Sampling(temperature=2.0), seed=3, **options)
    logits = all_logits(model, [*prompt, *response.token_ids], Full()).astype(np.float64)[len(prompt) - 1 : -1]
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert len(response.logprobs) == len(response.token_ids) == 6
    for token, reported, row in zip(response.token_ids, response.logprobs, expected, strict=True):
        assert reported.chosen.token_id == token and reported.chosen.text == str(token)
        best = np.argsort(-row)[:3]
        assert [candidate.token_id for candidate in reported.top] == best.tolist()
        np.testing.assert_allclose(
            [reported.chosen.logprob, *(candidate.logprob for candidate in reported.top)], [row[token], *row[best]], atol=1e-3
        )
    for bad_count in (-1, 1001, 2.5):
        with pytest.raises(icejax.InputError, match="logprobs must be"):
            icejax.generate(model, Numbers(), prompt, **options | {"logprobs": bad_count})


def test_options_of_other_types_are_refused(bundled):
    for options, message in (
        (dict(sampling=0.5), r"sampling must be an icejax.Sampling\(...\), got 0.5"),
        (dict(sampling=icejax.Sampling), "sampling must be an icejax.Sampling"),
        (dict(host_memory_limit="x"), "host_memory_limit must be a whole number, got 'x'"),
        (dict(host_memory_limit=-5), "host_memory_limit must be at least 1, got -5"),
    ):
        with pytest.raises(icejax.InputError, match=message):
            icejax.generate(*bundled, "x", **options)
    for options, message in (
        (dict(index=-1), "index must be at least 0, got -1"),
        (dict(index=2**40), "index must be at most 4294967295, got 1099511627776"),
        (dict(index="a"), "index must be a whole number, got 'a'"),
        (dict(sampling="hot"), r"sampling must be an icejax.Sampling\(...\), got 'hot'"),
        (dict(special_tokens="no"), "special_tokens must be true or false, got 'no'"),
        (dict(special_tokens=0), "special_tokens must be true or false, got 0"),
    ):
        with pytest.raises(icejax.InputError, match=message):
            icejax.Request(prompt="x", **options)
    with pytest.raises(icejax.InputError, match=r"sampling must be an icejax.Sampling\(...\), got 0.5"):
        icejax.Session(*bundled).ask("x", sampling=0.5)
    with pytest.raises(icejax.InputError, match="messages must be a list of objects with a text role"):
        icejax.chat(bundled[1], [1, 2])
    for content in (5, b"a", {1, 2}):
        with pytest.raises(icejax.InputError, match="the user's message must be text"):
            icejax.chat(bundled[1], content)
        with pytest.raises(icejax.InputError, match="the user's message must be text"):
            icejax.Session(*bundled).chat(content)
    with pytest.raises(icejax.InputError, match="the system's message must be text, got 5"):
        icejax.Session(*bundled, system=5)


def test_log_probabilities_need_a_place(capsys, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "x", "logprobs": 2}')
    status, out, err = run(capsys, "--prompt-file", str(tmp_path / "p.jsonl"))
    assert (status, out) == (2, "") and "'logprobs' of a .jsonl file need --json: a text has no place for them" in err
    status, out, err = run(capsys, "--prompt", "x", "--logprobs", "5")
    assert (status, out) == (2, "") and "--logprobs needs --json: a text has no place for them" in err


def test_times_of_a_line_are_those_of_its_row(capsys, tmp_path, bundled, monkeypatch):
    """Of rows that run one after the other, and of rows that run together; a later prompt waits for earlier ones."""
    monkeypatch.setattr("icejax.commands.generate.load", lambda *_: bundled)
    counts = [12, 3]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": "a" * count, "max_new_tokens": 1}) for count in counts))
    for batch_size in (1, 2):
        started = time.perf_counter()
        line = ("--prompt-file", str(tmp_path / "p.jsonl"), "--batch-size", str(batch_size), *COMMON)
        rows = [json.loads(row) for row in run(capsys, *line)[1].splitlines()]
        took, own = time.perf_counter() - started, [row["prompt_tokens"] / row["prefill_tps"] for row in rows]
        assert [row["prompt_tokens"] for row in rows] == counts
        assert own[0] <= rows[0]["ttft_s"] and own[0] + own[1] < rows[1]["ttft_s"] < took


def test_the_time_to_the_first_token_counts_the_tokenizing(capsys, bundled, monkeypatch):
    encode = jobs.encode_prompts
    monkeypatch.setattr("icejax.commands.generate.load", lambda *_: bundled)
    monkeypatch.setattr(jobs, "encode_prompts", lambda *args, **options: time.sleep(0.5) or encode(*args, **options))
    row = json.loads(run(capsys, "--prompt", "abc", *COMMON)[1])
    assert row["prompt_tokens"] / row["prefill_tps"] + 0.5 < row["ttft_s"]
