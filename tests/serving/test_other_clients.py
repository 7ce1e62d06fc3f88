"""The `llm` command and LiteLLM against a live server, as docs/how-to/serve-clients.md sets them up. Each is skipped where it is
not installed: no extra of icejax needs them.
"""

import os
import subprocess
import sys

import pytest

import icejax

pytestmark = pytest.mark.slow
QUESTION = "def f(a):"
MESSAGES = [{"role": "user", "content": QUESTION}]
LLM_MODELS = """- model_id: served
  model_name: bundled
  api_base: http://127.0.0.1:{port}/v1
  api_key_name: icejax
"""


def test_the_llm_command_asks_and_continues_a_conversation(server, chatty, alone, tmp_path):
    pytest.importorskip("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(LLM_MODELS.format(port=server.port))
    environment = os.environ | {"LLM_USER_PATH": str(tmp_path)}

    def llm(*arguments: str) -> str:
        command = [sys.executable, "-m", "llm", *arguments]
        run = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr
        return run.stdout

    options = ("-o", "temperature", "0", "-o", "max_tokens", "9")
    llm("keys", "set", "icejax", "--value", "none")
    first = alone(icejax.chat(chatty[1], MESSAGES), max_new_tokens=9).text
    assert llm("-m", "served", *options, QUESTION) == first + "\n"
    assert llm("-m", "served", "--no-stream", "--no-log", *options, QUESTION) == first + "\n"
    later = [*MESSAGES, {"role": "assistant", "content": first}, {"role": "user", "content": "b"}]
    assert llm("-c", *options, "b") == alone(icejax.chat(chatty[1], later), max_new_tokens=9).text + "\n"


@pytest.fixture
def litellm(monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or the import asks another host for prices
    return pytest.importorskip("litellm")


def test_litellm_asks_each_api(litellm, server, chatty, alone):
    base = f"http://127.0.0.1:{server.port}"
    known, greedy = dict(api_base=f"{base}/v1", api_key="x", num_retries=0), dict(temperature=0, max_tokens=9)
    expected = alone(icejax.chat(chatty[1], MESSAGES), max_new_tokens=9)
    answer = litellm.completion(model="openai/bundled", messages=MESSAGES, **greedy, **known)
    assert answer.choices[0].message.content == expected.text and answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (expected.prompt_tokens, 9)
    stream = litellm.completion(model="openai/bundled", messages=MESSAGES, stream=True, **greedy, **known)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected.text
    response = litellm.responses(model="openai/bundled", input=QUESTION, temperature=0, max_output_tokens=16, **known)
    assert response.output[0].content[0].text == alone(icejax.chat(chatty[1], MESSAGES), max_new_tokens=16).text
    text = litellm.text_completion(model="text-completion-openai/bundled", prompt=QUESTION, **greedy, **known)
    assert text.choices[0].text == alone(QUESTION, max_new_tokens=9).text
    message = litellm.completion(model="anthropic/bundled", messages=MESSAGES, **greedy, **known | dict(api_base=base))
    assert message.choices[0].message.content == expected.text
    assert message.usage.prompt_tokens == expected.prompt_tokens


def test_litellm_raises_its_own_errors(litellm, server):
    known = dict(api_base=f"http://127.0.0.1:{server.port}/v1", api_key="x", num_retries=0, max_retries=0)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/gpt-4", messages=MESSAGES, **known)
    with pytest.raises(litellm.BadRequestError) as error:
        litellm.completion(model="openai/bundled", messages=[dict(role="user", content="a" * 400)], **known)
    assert isinstance(error.value, litellm.ContextWindowExceededError)
