"""What llama.cpp's and vLLM's own tests of their servers ask for, asked of ours.

A row is named after their test: `tools/server/tests/unit/` of llama.cpp, `tests/entrypoints/openai/` of vLLM. It has a request and
what must hold of its answer. `DIFFERENCES` are the behaviours that ours does not share, each with the reason.
"""

import pytest

TEXTS, CHATS, ANSWERS, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
GREEDY = dict(temperature=0, max_tokens=5)
TEXT = dict(prompt="import os\n", **GREEDY)
CHAT = dict(messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "def f(a):"}], **GREEDY)
ANTHROPIC = dict(messages=[{"role": "user", "content": "def f(a):"}], **GREEDY)
RESPONSE = dict(input=CHAT["messages"], temperature=0, max_output_tokens=5)
AB = 'root ::= "ab" "ab"?'
USAGE = dict(include_usage=True)


def user(content) -> dict:
    return CHAT | dict(messages=[{"role": "user", "content": content}])


def choice(answer) -> dict:
    return answer["choices"][0]


def entries(answer) -> list[dict]:
    return choice(answer)["logprobs"]["content"]


def tops(answer) -> list[dict]:
    return choice(answer)["logprobs"]["top_logprobs"]


ROWS = [  # their test, path, body, what holds of the answer
    ("llama.cpp test_completion", TEXTS, TEXT, lambda x: (choice(x)["finish_reason"], x["usage"]["completion_tokens"]) == ("length", 5)),
    ("llama.cpp test_completion_with_tokens_input", TEXTS, TEXT | dict(prompt=[[*b"ab"], [*b"ab"]]), lambda x: x["choices"][0]["text"] == x["choices"][1]["text"]),
    ("llama.cpp test_n_probs", TEXTS, TEXT | dict(logprobs=10), lambda x: [10 <= len(top) <= 11 and max(top.values()) <= 0 for top in tops(x)] == [True] * 5),
    ("llama.cpp test_chat_completion", CHATS, CHAT, lambda x: "cmpl" in x["id"] and choice(x)["message"]["role"] == "assistant"),
    ("llama.cpp test_chat_completion parts", CHATS, user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), lambda x: x["usage"]["prompt_tokens"] == len("<user>a\nb\n<assistant>")),
    ("llama.cpp test_chat_template_assistant_prefill", CHATS, CHAT | dict(messages=[{"role": "assistant", "content": "Whill"}]), lambda x: x["usage"]["prompt_tokens"] == len("<assistant>Whill")),
    *((f"llama.cpp test_completion_with_grammar {[*field]}", CHATS, CHAT | field, lambda x: choice(x)["message"]["content"] in ("ab", "abab")) for field in (dict(grammar=AB), dict(guided_grammar=AB), dict(structured_outputs=dict(grammar='start: "ab"~1..2')))),
    ("llama.cpp test_completion_with_json_schema", CHATS, CHAT | dict(json_schema={"const": "42"}), lambda x: choice(x)["message"]["content"] == '"42"'),
    ("llama.cpp test_logprobs", CHATS, CHAT | dict(logprobs=True, top_logprobs=10), lambda x: "".join(one["token"] for one in entries(x)) == choice(x)["message"]["content"] and all(one["logprob"] <= 0 and one["bytes"] and len(one["top_logprobs"]) == 10 for one in entries(x))),
    ("llama.cpp test_logit_bias", CHATS, CHAT | dict(logit_bias={str(token): -100 for token in range(257) if token != 65}), lambda x: choice(x)["message"]["content"] == "AAAAA"),
    ("llama.cpp test_chat_completions_multiple_choices", CHATS, CHAT | dict(n=2), lambda x: [(one["index"], one["finish_reason"]) for one in x["choices"]] == [(0, "length"), (1, "length")]),
    ("llama.cpp test_tokenize_with_pieces", "/tokenize", dict(prompt="\u5abd", return_token_strs=True), lambda x: x["count"] == len(x["tokens"]) == len(x["token_strs"]) == 3),
    ("llama.cpp test_responses_with_openai_library", ANSWERS, RESPONSE, lambda x: x["id"].startswith("resp_") and x["output"][0]["id"].startswith("msg_")),
    ("llama.cpp test_responses_with_text_format", ANSWERS, RESPONSE | dict(text=dict(format=dict(type="text"))), lambda x: x["text"]["format"]["type"] == "text"),
    ("llama.cpp test_anthropic_messages_basic", MESSAGES, ANTHROPIC, lambda x: x["content"][0]["type"] == "text" and x["usage"]["output_tokens"] == 5 and "timings" not in x),
    ("llama.cpp test_anthropic_count_tokens_no_max_tokens", MESSAGES + "/count_tokens", dict(messages=ANTHROPIC["messages"]), lambda x: list(x) == ["input_tokens"]),
    ("vllm test_single_completion", TEXTS, TEXT, lambda x: x["usage"]["total_tokens"] == x["usage"]["prompt_tokens"] + 5 and x["usage"]["prompt_tokens_details"]["cached_tokens"] == 0),
    ("vllm test_no_logprobs", TEXTS, TEXT | dict(logprobs=None), lambda x: choice(x)["logprobs"] is None),
    ("vllm test_zero_logprobs", TEXTS, TEXT | dict(logprobs=0), lambda x: len(tops(x)[0]) == 1),
    ("vllm test_some_logprobs", TEXTS, TEXT | dict(logprobs=5), lambda x: 5 <= len(tops(x)[0]) <= 6),
    ("vllm test_echo_logprob_completion", TEXTS, TEXT | dict(echo=True, logprobs=0), lambda x: choice(x)["text"].startswith(TEXT["prompt"]) and tops(x)[0] is None and all(len(top) == 1 for top in tops(x)[1:])),
    ("vllm test_batch_completions", TEXTS, TEXT | dict(prompt=["ab", "ab"], n=2), lambda x: [one["index"] for one in x["choices"]] == [0, 1, 2, 3] and len({one["text"] for one in x["choices"]}) == 1),
    ("vllm test_parallel_no_streaming", TEXTS, TEXT | dict(n=3, temperature=1.0, seed=42), lambda x: len({one["text"] for one in x["choices"]}) == 3),
    ("vllm test_chat_logit_bias_valid", CHATS, CHAT | dict(logit_bias={"256": 1.0}), lambda x: choice(x)["message"]["content"]),
    ("vllm test_zero_logprobs_chat", CHATS, CHAT | dict(logprobs=True, top_logprobs=0), lambda x: entries(x)[0]["top_logprobs"] == []),
    ("vllm test_no_logprobs_chat", CHATS, CHAT | dict(logprobs=False), lambda x: choice(x)["logprobs"] is None),
    ("vllm test_single_chat_session", CHATS, CHAT | dict(max_tokens=None, max_completion_tokens=5), lambda x: x["usage"]["completion_tokens"] == 5),
    ("vllm test_tool_choice_null", CHATS, CHAT | dict(tool_choice=None, tools=None), lambda x: choice(x)["message"]["content"]),
]  # fmt: skip


@pytest.mark.parametrize("path, body, holds", [pytest.param(*row[1:], id=row[0]) for row in ROWS])
def test_answers(server, path, body, holds):
    answer = server.ask(path, body)
    assert holds(answer), answer


REFUSALS = [  # their test, path, body, words of the message
    ("llama.cpp test_nocache_long_input_prompt", TEXTS, TEXT | dict(prompt="a" * 400), "has 400 tokens and the context holds 300"),
    ("llama.cpp test_context_size_exceeded_stream", CHATS, user("a" * 400) | dict(stream=True), "tokens and the context holds 300"),
    *((f"llama.cpp test_invalid_chat_completion_req {messages}", CHATS, dict(messages=messages), "messages") for messages in (None, "string", [123], [{}], [{"role": 123}], [{"role": "system", "content": 123}], [CHAT["messages"][0], {}])),
    ("llama.cpp test_completion_with_response_format", CHATS, CHAT | dict(response_format={"type": "sound"}), "response_format of type 'sound' is not supported"),
    ("llama.cpp test_local_media_file", CHATS, user([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]), "a part of type 'image_url'"),
    ("vllm test_empty_prompt", TEXTS, dict(prompt=None), "prompt must be text"),
    ("vllm test_empty_prompt_list", TEXTS, dict(prompt=[]), "prompt is empty"),
    ("vllm test_out_of_vocab_token_ids", TEXTS, dict(prompt=[999_999]), "has token 999999 and the model knows 257"),
    ("vllm test_too_many_completion_logprobs", TEXTS, TEXT | dict(logprobs=21), "less than or equal to 20, got 21"),
    ("vllm test_too_many_chat_logprobs", CHATS, CHAT | dict(logprobs=True, top_logprobs=21, stream=True), "less than or equal to 20, got 21"),
    ("vllm test_prompt_logprobs_completion", TEXTS, TEXT | dict(prompt_logprobs=-1), "prompt_logprobs is not supported"),
    ("vllm test_completion_stream_options", TEXTS, TEXT | dict(stream_options=dict(include_usage=None)), "stream_options needs stream: true"),
    ("vllm test_chat_completion_stream_options", CHATS, CHAT | dict(stream=False, stream_options=USAGE), "stream_options needs stream: true"),
    ("vllm test_chat_logit_bias_invalid", CHATS, CHAT | dict(logit_bias={"258": 1.0}), "logit_bias has token 258 and the model knows 257"),
    ("vllm test_chat_logit_bias_non_integer_key", CHATS, CHAT | dict(logit_bias={"not_a_token_id": 50}), "a token id of logit_bias must be a whole number, got 'not_a_token_id'"),
    ("vllm test_chat_logit_bias_non_numeric_value", CHATS, CHAT | dict(logit_bias={"1": "no"}), "logit_bias"),
    ("vllm test_chat_completion_request_rejects_non_object_body", CHATS, b'["not", "an", "object"]', "must be a JSON object"),
]  # fmt: skip


@pytest.mark.parametrize("path, body, words", [pytest.param(*row[1:], id=row[0]) for row in REFUSALS])
def test_refusals(server, path, body, words):
    assert words in server.refusal(path, body)["message"]


def text_of(events) -> str:
    return "".join(event["choices"][0].get("text", "") for event in events if event["choices"])


def ends_once(events) -> bool:
    """Whether the last event of an answer alone has a reason for its end."""
    reasons = [choice(event)["finish_reason"] for event in events if event["choices"]]
    return reasons == [None] * (len(reasons) - 1) + ["length"]


STREAMS = [  # their test, path, body, what holds of the events
    ("llama.cpp test_n_probs_stream", TEXTS, TEXT | dict(logprobs=10), lambda xs: [len(tops(x)) for x in xs] == [1] * 5),
    ("llama.cpp test_chat_completion_stream", CHATS, CHAT, lambda xs: choice(xs[0])["delta"]["role"] == "assistant" and all("role" not in choice(x)["delta"] for x in xs[1:]) and len({x["id"] for x in xs}) == 1),
    ("llama.cpp test_logprobs_stream", CHATS, CHAT | dict(logprobs=True), lambda xs: all(choice(x)["delta"]["content"] == entries(x)[0]["token"] for x in xs[1:])),
    ("vllm test_completion_streaming", TEXTS, TEXT, lambda xs: ends_once(xs) and choice(xs[-1])["text"]),
    ("vllm test_chat_streaming", CHATS, CHAT, lambda xs: ends_once(xs) and choice(xs[-1])["delta"]["content"]),
    ("vllm test_parallel_streaming", TEXTS, TEXT | dict(n=3), lambda xs: sum(choice(x)["finish_reason"] is not None for x in xs) == 3),
    ("vllm test_completion_stream_options {}", TEXTS, TEXT | dict(stream_options={}), lambda xs: all("usage" not in x for x in xs)),
    ("vllm test_completion_stream_options continuous alone", TEXTS, TEXT | dict(stream_options=dict(continuous_usage_stats=True)), lambda xs: all("usage" not in x for x in xs)),
    ("vllm test_completion_stream_options usage", TEXTS, TEXT | dict(stream_options=USAGE), lambda xs: all(x["usage"] is None for x in xs[:-1]) and xs[-1]["choices"] == [] and xs[-1]["usage"]["completion_tokens"] == 5),
    ("vllm test_chat_completion_stream_options continuous", CHATS, CHAT | dict(stream_options=USAGE | dict(continuous_usage_stats=True)), lambda xs: [x["usage"]["completion_tokens"] for x in xs] == [0, 1, 2, 3, 4, 5, 5]),
]  # fmt: skip


@pytest.mark.parametrize("path, body, holds", [pytest.param(*row[1:], id=row[0]) for row in STREAMS])
def test_streams(server, path, body, holds):
    events = server.events(path, body | dict(stream=True))
    assert holds(events), events


def test_llama_cpp_completion_stream_vs_non_stream(server):
    assert text_of(server.events(TEXTS, TEXT | dict(stream=True))) == choice(server.ask(TEXTS, TEXT))["text"]


def test_llama_cpp_results_of_equal_and_of_other_seeds(server):
    texts = [choice(server.ask(TEXTS, TEXT | dict(seed=seed, temperature=1.0, max_tokens=12)))["text"] for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1] and len({*texts}) == 3


def test_llama_cpp_tokenize_detokenize(server):
    text = "What is the capital of France ?"
    assert server.ask("/detokenize", dict(tokens=server.ask("/tokenize", dict(prompt=text))["tokens"])) == dict(prompt=text)


def test_llama_cpp_api_keys(server):
    server.service.keys = ("sk-1",)
    try:
        assert server.ask("/health")["status"] == "ok"
        for key in (None, "invalid-key"):
            headers = {} if key is None else dict(Authorization=f"Bearer {key}")
            assert server.refusal(TEXTS, TEXT, status=401, **headers)["type"] == "authentication_error"
        assert server.ask(TEXTS, TEXT, Authorization="Bearer sk-1") and server.ask(TEXTS, TEXT, X_Api_Key="sk-1")
    finally:
        server.service.keys = ()


def test_vllm_stream_text_offset_matches_non_stream_with_stop_holdback(server, alone):
    """A stop string holds the text of some tokens back; their places are those of the whole answer all the same."""
    text = alone(TEXT["prompt"], max_new_tokens=5).text
    body = TEXT | dict(logprobs=0, stop=text[:2] + "\0")
    whole = choice(server.ask(TEXTS, body))["logprobs"]["text_offset"]
    events = server.events(TEXTS, body | dict(stream=True))
    assert [offset for event in events for offset in choice(event)["logprobs"]["text_offset"]] == whole == [0, 1, 2, 3, 4]


DIFFERENCES = [  # their test, path, body, our status, why
    ("llama.cpp test_completion_with_tokens_input mixed", TEXTS, TEXT | dict(prompt=[[1, 2], "a"]), 400, "OpenAI's prompts are all texts or all token ids"),
    ("llama.cpp test_invalid_chat_completion_req two answers", CHATS, CHAT | dict(messages=[*CHAT["messages"], *[{"role": "assistant", "content": "a"}] * 2]), 200, "the model's template decides which roles may follow"),
    ("llama.cpp test_infill_without_input_extra", "/infill", dict(input_prefix="a", input_suffix="b"), 404, "`suffix` of /v1/completions does it"),
    ("llama.cpp test_server_props", "/props", None, 404, "/v1/models has the context, `icejax serve --help` the rest"),
    ("llama.cpp test_server_slots", "/slots", None, 404, "/health and /metrics say how busy the server is"),
    ("llama.cpp test_apply_chat_template", "/apply-template", dict(messages=CHAT["messages"]), 404, "/tokenize takes messages"),
    ("vllm test_batch_completions beam search", TEXTS, TEXT | dict(use_beam_search=True), 400, "beam search is not built"),
    ("vllm test_prompt_logprobs_chat", CHATS, CHAT | dict(prompt_logprobs=1), 400, "`echo` with `logprobs` gives a prompt's"),
    ("vllm test_chat_stop_token_ids_validation", CHATS, CHAT | dict(stop_token_ids=[1]), 400, "a stop string may name a token"),
    ("vllm test_chat_completion_request_cache_salt_still_validated_on_dict", CHATS, CHAT | dict(cache_salt=""), 200, "an empty salt is none"),
]  # fmt: skip


@pytest.mark.parametrize("path, body, status, why", [pytest.param(*row[1:], id=row[0]) for row in DIFFERENCES])
def test_differences(server, path, body, status, why):
    assert server.send(path, body).status == status, why


def test_vllm_request_wrong_content_type_is_read(server):
    """vLLM refuses a JSON body that calls itself a form; `curl -d` sends one, so ours reads it."""
    assert server.ask(TEXTS, TEXT, Content_Type="application/x-www-form-urlencoded")["choices"]


def test_llama_cpp_cors_options_are_refused(server):
    """llama.cpp lets every site's pages in by default; ours lets none in."""
    assert server.send(TEXTS, method="OPTIONS", Origin="http://web.mydomain.fr").status == 403
