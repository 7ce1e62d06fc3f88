"""icejax as a model of lm-evaluation-harness: its log-likelihoods are transformers', and no request runs twice."""

import copy

import numpy as np
import pytest

import icejax
from icejax.api.generate import ASSETS
from icejax.cache.registry import Full
from icejax.checks.errors import InputError
from icejax.session.session import Session
from tests import tolerances

instance = pytest.importorskip("lm_eval.api.instance")
harness = pytest.importorskip("icejax.evaluation.harness")

END = 256  # the bundled tokenizer's eos
PAIRS = [("def add(a, b):\n    return ", "a + b"), ("import", " os"), ("x = [", "1, 2]\n"), ("", "import os")]


def model_of(bundled, **options):
    return harness.HarnessModel(*bundled, **dict(cache=Full(), batch_size=3) | options)


def requests(kind: str, arguments: list[tuple]):
    return [instance.Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def reference(torch_model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    import torch

    with torch.no_grad():
        logits = torch_model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1].log_softmax(-1)
    chosen = torch.tensor(continuation)
    return float(logits[range(len(chosen)), chosen].sum()), bool((logits.argmax(-1) == chosen).all())


@pytest.fixture(scope="module")
def torch_model():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(ASSETS, dtype=torch.float32)


def test_log_likelihoods_equal_transformers(bundled, torch_model):
    # The harness moves the spaces at a context's end into the continuation; a text without a context stands behind the end token.
    pairs = [(a.rstrip(" "), a[len(a.rstrip(" ")) :] + b) for a, b in PAIRS]
    expected = [reference(torch_model, list(a.encode()) or [END], list(b.encode())) for a, b in pairs]
    got = model_of(bundled).loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    tokens = np.asarray([len(b) for _, b in pairs])
    difference = [a[0] - b[0] for a, b in zip(got, expected, strict=True)] / tokens
    np.testing.assert_allclose(difference, 0, atol=tolerances.LOGITS)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in expected]
    alone = model_of(bundled, batch_size=1).loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    np.testing.assert_allclose([a for a, _ in got], [a for a, _ in alone], rtol=0, atol=tolerances.EXACT)


def test_a_whole_text_counts_each_token_once(bundled, torch_model):
    text = "import os\nimport sys\n\n\ndef add(a, b):\n"
    tokens, size = list(text.encode()), 17
    # The first window sees the end token before it; each later one the tokens before it, 16 in all.
    windows = [([END], tokens[:16]), (tokens[15:16], tokens[16:32]), (tokens[len(tokens) - 17 : 32], tokens[32:])]
    expected = sum(reference(torch_model, *window)[0] for window in windows)
    model = model_of(bundled, max_length=size)
    [got] = model.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,)]), disable_tqdm=True)
    assert got == pytest.approx(expected, abs=len(tokens) * tolerances.LOGITS)


def test_forced_tokens_have_the_log_probabilities_of_transformers(bundled, torch_model):
    import torch

    tokens = list(b"import os\nimport sys\n\n\ndef add(a, b):\n    return a")
    with torch.no_grad():
        logits = torch_model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    asked = [("text", tokens[:40], 8), ("text", tokens, 20)]
    expected = [
        [float(logits[i - 1, tokens[i]]) for i in ends] for ends in (range(32, 40), range(len(tokens) - 20, len(tokens)))
    ]
    model = model_of(bundled)
    got = model.token_logprobs(requests("token_logprobs", asked), disable_tqdm=True)
    for values, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(values, theirs, rtol=0, atol=tolerances.LOGITS)


@pytest.mark.parametrize("shared", [False, True])
def test_a_conversation_is_what_generate_answers_to_its_whole_text(bundled, shared, monkeypatch):
    text, questions = "a = 1\nb = 2\n\ndef add(a, b):\n    return a + b\n", ["# add\n", "# b\n", "# again\n"]
    options = dict(
        questions=questions, max_gen_toks=[12, 9, 7], length=512, shared=shared, chat=False, system=None, begun="def ", end="\n"
    )
    model, texts, ask = model_of(bundled), [], Session.ask
    monkeypatch.setattr(Session, "ask", lambda self, text, **options: texts.append(text) or ask(self, text, **options))
    [got] = model.converse(requests("converse", [(text, options)]), disable_tqdm=True)
    first = [text, "\n# add\ndef "] if shared else [f"{text}\n# add\ndef "]
    assert texts == [*first, "\n# b\ndef ", "\n# again\ndef "]

    def answer(prompt: list[int], count: int, stop: str | tuple = "\n"):
        return icejax.generate(*bundled, [prompt], cache=Full(), max_new_tokens=count, stop=stop)[0]

    def tokens(text: str) -> list[int]:
        return bundled[1].encode(text, add_special_tokens=False)

    held, expected = tokens(text), []
    if shared:
        held += answer(held, 1, ()).token_ids
    for question, count in zip(questions, options["max_gen_toks"], strict=True):
        prompt = held + tokens(f"\n{question}def ")
        response = answer(prompt, count)
        expected.append(response.text)
        held = held if shared else prompt + list(response.token_ids)
    assert got == expected and len(set(got)) > 1
    monkeypatch.setattr(harness.conversation, "answers", None)  # a call would fail
    assert model.converse(requests("converse", [(text, options)]), disable_tqdm=True) == [expected]


def test_answers_are_those_of_generate_and_come_once(bundled, monkeypatch):
    contexts = ["import os\nimport ", "def f(a):\n    return "]
    asked = [(text, dict(until=["\n"], max_gen_toks=12)) for text in contexts]
    model = model_of(bundled)
    got = model.generate_until(requests("generate_until", asked), disable_tqdm=True)
    expected = icejax.generate(*bundled, contexts, cache=Full(), stop="\n", max_new_tokens=12)
    assert got == [answer.text for answer in expected]
    monkeypatch.setattr(harness, "stream_generate", None)  # a call would fail
    assert model.generate_until(requests("generate_until", asked[::-1]), disable_tqdm=True) == got[::-1]


def test_drawn_answers_to_one_prompt_differ_and_come_again(bundled):
    drawn, greedy = (dict(until=["\n"], max_gen_toks=12, do_sample=one, temperature=2.0 * one) for one in (True, False))
    prompts = ["import os\nimport ", "def f(a):\n    return "]
    asked = [(text, drawn) for text in prompts for _ in range(4)]
    got = model_of(bundled).generate_until(requests("generate_until", asked), disable_tqdm=True)
    assert len({*got[:4]}) > 2 and len({*got[4:]}) > 2
    other = model_of(bundled, batch_size=1).generate_until(
        requests("generate_until", asked[4:6] + asked[:2]), disable_tqdm=True
    )
    assert other == got[4:6] + got[:2]
    model = model_of(bundled)
    [first, second] = model.generate_until(requests("generate_until", [(prompts[0], greedy)] * 2), disable_tqdm=True)
    assert first == second and len(model.asked[None]) == 1


def test_a_task_that_draws_without_a_temperature_draws_as_transformers(bundled):
    model = harness.HarnessModel(*bundled)
    assert model.cache == Full()
    cases = (
        (dict(do_sample=True), 1.0),
        (dict(temperature=0.5), 0.5),
        (dict(do_sample=False, temperature=0.5), 0.0),
        ({}, 0.0),
    )
    assert [model._request("a", options).sampling.temperature for options, _ in cases] == [value for _, value in cases]


def test_templates_that_name_the_date_give_the_same_prompt_every_day(bundled, monkeypatch):
    dated, started = copy.deepcopy(bundled[1]), []
    dated.chat_template = "{{ strftime_now('%d %b %Y') }}: {{ messages[0]['content'] }}"
    model = model_of((bundled[0], dated))
    assert model.apply_chat_template([dict(role="user", content="a")]) == "26 Jul 2024: a"
    monkeypatch.setattr(Session, "chat", lambda self, text, **_: started.append(self.started))
    options = dict(
        questions=["b", "c"], max_gen_toks=[1, 1], length=64, shared=False, chat=True, system=None, begun="", end="\n"
    )
    harness.conversation.answers(bundled[0], dated, "a", cache=Full(), host_memory_limit=None, **options)
    assert started == [harness.conversation.STARTED] * 2


def test_options_that_no_answer_has_are_refused(bundled):
    model = model_of(bundled, max_length=64)
    for options, message in (
        (dict(num_beams=4), "generation_kwargs has num_beams"),
        (dict(max_gen_toks="ten"), "generation_kwargs cannot be read .*ten.*: expected numbers of tokens and a temperature"),
        (dict(temperature="warm"), "generation_kwargs cannot be read .*warm"),
        (dict(max_gen_toks=64), "a task asks for 64 new tokens, and --context-length is 64"),
    ):
        with pytest.raises(InputError, match=message):
            model.generate_until(requests("generate_until", [("a", options)]), disable_tqdm=True)
    endless = copy.deepcopy(bundled[1])
    endless.eos_token = None
    with pytest.raises(InputError, match="names no eos token"):
        model_of((bundled[0], endless)).loglikelihood(requests("loglikelihood", [("", "a")]), disable_tqdm=True)
