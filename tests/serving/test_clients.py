"""Real clients against a live server: the `openai` package, and lm-evaluation-harness. Each is skipped where it is not installed.

`openai` has 30 MB, so no extra installs it.
"""

import asyncio

import numpy as np
import pytest

import icejax
from icejax.cache.registry import Full
from tests import tolerances
from tests.helpers.server import wait_for

pytestmark = pytest.mark.slow
MESSAGES = [{"role": "user", "content": "def f(a):"}]
GREEDY = dict(model="bundled", temperature=0, max_tokens=9)


@pytest.fixture
def client(server):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="x", max_retries=0, timeout=60)


def test_openai_reads_whole_answers(client, chatty, alone):
    answer = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, n=2, seed=1, **GREEDY)
    expected = alone(icejax.chat(chatty[1], MESSAGES), max_new_tokens=9, logprobs=3)
    assert [choice.message.content for choice in answer.choices] == [expected.text] * 2
    assert answer.choices[0].logprobs.content[0].top_logprobs[2].token == expected.logprobs[0].top[2].text
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    text = client.completions.create(prompt="import os", logprobs=2, **GREEDY).choices[0]
    assert text.text == alone("import os", max_new_tokens=9).text and len(text.logprobs.token_logprobs) == 9
    assert [model.id for model in client.models.list()] == ["bundled", "other-name"]


def test_openai_reads_streams(client, chatty, alone):
    stream = client.chat.completions.create(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY)
    chunks = [*stream]
    text = "".join(chunk.choices[0].delta.content for chunk in chunks if chunk.choices)
    assert text == alone(icejax.chat(chatty[1], MESSAGES), max_new_tokens=9).text
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage.completion_tokens == 9
    with client.chat.completions.stream(messages=MESSAGES, stop=text[4:6], **GREEDY) as helper:
        assert helper.get_final_completion().choices[0].message.content == text[: text.index(text[4:6])]


def test_openai_raises_its_own_errors(client, server):
    import openai

    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(prompt="a" * 400, **GREEDY)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(prompt="a", model="gpt-4")
    with pytest.raises(openai.BadRequestError, match="no tool calls of a known form"):
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        client.chat.completions.create(messages=MESSAGES, tools=[tool], **GREEDY)
    server.service.keys = ("sk-1",)
    try:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
    finally:
        server.service.keys = ()


def test_openai_that_stops_reading_ends_the_request(client, server):
    engine = server.service.engine
    stream = client.completions.create(
        prompt="a", stream=True, extra_body=dict(ignore_eos=True), **GREEDY | dict(max_tokens=40)
    )
    next(iter(stream))
    stream.close()
    wait_for(lambda: engine.load.running == 0 and server.service.open_answers == 0)


def test_many_openai_clients_at_once_have_their_own_answers(server, alone):
    openai = pytest.importorskip("openai")
    texts = ["import os", "x = [", "def f(a):", "class A:", "for i in", "print("]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="x") as client:
            answers = await asyncio.gather(*(client.completions.create(prompt=text, **GREEDY) for text in texts))
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(ask()) == [alone(text, max_new_tokens=9).text for text in texts]


def test_the_harness_reads_our_own_log_likelihoods(server, chatty, tmp_path):
    """`local-completions` of lm-evaluation-harness gives what `icejax evaluate` computes with the full cache."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("aiohttp")
    pytest.importorskip("tenacity")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from icejax.evaluation.harness import HarnessModel

    chatty[1].save_pretrained(tmp_path)
    url = f"http://127.0.0.1:{server.port}/v1/completions"
    theirs = LocalCompletionsAPI(
        base_url=url, model="bundled", tokenizer=str(tmp_path), tokenizer_backend="huggingface", max_length=256
    )
    ours = HarnessModel(*chatty, cache=Full(), max_length=256)
    pairs = [("import ", "os\n"), ("def f(a):\n    return ", "a + 1"), ("x", " = [1, 2]\n" * 9), ("", "import sys")]

    def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
        return [Instance(kind, {}, argument, i) for i, argument in enumerate(arguments)]

    asked = instances("loglikelihood", pairs[:3])
    read, expected = (model.loglikelihood(asked, disable_tqdm=True) for model in (theirs, ours))
    np.testing.assert_allclose([x for x, _ in read], [x for x, _ in expected], rtol=0, atol=tolerances.LOGITS)
    assert [greedy for _, greedy in read] == [greedy for _, greedy in expected]
    until = instances("generate_until", [("import os\nimport ", dict(until=["\n"], max_gen_toks=12, do_sample=False))])
    assert theirs.generate_until(until, disable_tqdm=True) == ours.generate_until(until, disable_tqdm=True)
