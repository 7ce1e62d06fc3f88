"""What Codex and Claude Code send over several turns with tools, and what they read.

The bodies have the fields of Codex 0.171 and Claude Code 2.1, with short texts. The answers are given.
"""

import copy
import json
import random

import pytest

import icejax
from icejax.serving.routes import turns
from tests.serving.conftest import SIZES
from tests.serving.test_responses import kinds, read

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages?beta=true"
HEAD = (
    "{% for tool in tools or [] %}{{ tool.function | tojson }}\n{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<tool>{{ m.content }}\n{% else %}"
)
TAIL = (
    "<{{ m.role }}>{% if m.reasoning %}({{ m.reasoning }}){% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{{ '\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEMPLATE = HEAD + TAIL
STRICT = HEAD + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}" + TAIL  # as many are


@pytest.fixture(scope="module", params=["given", pytest.param("bound", marks=pytest.mark.slow)])
def agents(request, chatty):
    """A server whose answers are the texts in `script`, written by nobody or by the model, and which has its prompts in `prompts`."""
    from icejax.serving.service import Service
    from tests.helpers.scripted import Bound, Given
    from tests.helpers.server import live

    model, tokenizer = chatty[0], copy.deepcopy(chatty[1])
    tokenizer.chat_template = TEMPLATE
    if request.param == "given":
        engine = Given(tokenizer, context_length=2048, max_new_tokens=200)
    else:
        engine = Bound(model, tokenizer, cache=icejax.Full(), **SIZES | dict(context_length=2048))
    with live(Service(names=("bundled",), root="here", places=3), lambda: (model, tokenizer, engine)) as server:
        server.prompts, server.script = engine.prompts, engine.script
        yield server


def call_of(name: str, **arguments) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def text(kind: str, *texts: str) -> list[dict]:
    return [dict(type=kind, text=one) for one in texts]


def message(role: str, *texts: str) -> dict:
    return dict(type="message", id="msg_1", role=role, content=text("input_text", *texts))


def tool_names(prompt: str) -> list[str]:
    return [json.loads(line)["name"] for line in prompt.splitlines() if line.startswith("{")]


COMMAND = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"], "additionalProperties": False}
SHELL = dict(type="function", name="exec_command", description="d", strict=False, parameters=COMMAND)
PATCH = dict(
    type="custom", name="apply_patch", description="d", format=dict(type="grammar", syntax="lark", definition="start: A")
)
WEATHER = dict(SHELL, name="weather")
MCP = dict(type="namespace", name="mcp__w", description="d", tools=[WEATHER])
CODEX = dict(
    model="bundled",
    stream=True,
    input=[message("developer", "d1"), message("developer", "d2", "d3"), message("user", "env"), message("user", "hi")],
    tools=[SHELL, PATCH, MCP, dict(type="tool_search", execution="client", description="d", parameters=COMMAND),
           dict(type="web_search", external_web_access=True), dict(type="image_generation", output_format="png")],
    tool_choice="auto",
    parallel_tool_calls=True,
    reasoning=dict(effort="medium", summary="auto", context="all_turns"),
    store=False,
    include=["reasoning.encrypted_content"],
    service_tier="auto",
    prompt_cache_key="01a2",
    text=dict(verbosity="low"),
    client_metadata={"session_id": "01a2"},
)  # fmt: skip


def turn(server, items: list[dict], answer: str) -> tuple[list[dict], list[dict]]:
    """Returns the events of Codex's next turn, and its items with those of the answer, as Codex sends them again."""
    server.script.append(answer)
    values = read(server.send(RESPONSES, CODEX | dict(input=items)).read())
    assert values[-1]["type"] == "response.completed" and values[-1]["response"]["usage"]["output_tokens"] > 0
    done = [value["item"] for value in values if value["type"] == "response.output_item.done"]
    assert done == values[-1]["response"]["output"]
    return values, [*items, *done]


def test_codex_calls_functions_of_namespaces_and_custom_tools(agents):
    values, items = turn(agents, CODEX["input"], "I look." + call_of("exec_command", cmd="ls"))
    prompt = agents.prompts[-1]
    assert prompt.endswith("<system>d1\n\nd2\nd3\n<user>env\n\nhi\n<assistant>")  # one system message, one of the user
    assert tool_names(prompt) == ["exec_command", "apply_patch", "mcp__w__weather"]
    assert "A text that this grammar (lark) matches:" in prompt
    said, call = items[-2:]
    assert said["content"][0]["text"] == "I look." and "namespace" not in call
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "exec_command", '{"cmd": "ls"}')
    assert [tool["type"] for tool in values[-1]["response"]["tools"]] == ["function", "custom", "namespace"]

    items += [dict(type="function_call_output", id="fco_1", call_id=call["call_id"], output="a.txt")]
    _, items = turn(agents, items, call_of("mcp__w__weather", city="Oslo"))
    call = items[-1]
    assert (call["name"], call["namespace"], call["arguments"]) == ("weather", "mcp__w", '{"city": "Oslo"}')
    assert "</tool_call>\n<tool>a.txt\n<assistant>" in agents.prompts[-1]

    image = dict(type="input_image", image_url="data:image/png;base64,AA==", detail="high")
    output = [*text("input_text", "Wall time: 0.1 seconds", "rain"), image]
    items += [dict(type="function_call_output", call_id=call["call_id"], output=output)]
    patch = '*** Begin Patch\n+ "a"\n*** End Patch'
    values, items = turn(agents, items, call_of("apply_patch", input=patch))
    assert '"name": "mcp__w__weather"' in agents.prompts[-1]
    assert "<tool>Wall time: 0.1 seconds\nrain\n[an image, which this model cannot see]\n" in agents.prompts[-1]
    call = items[-1]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", patch)
    events = [f"custom_tool_call_input.{name}" for name in ("delta", "done")]
    assert kinds(values)[2:] == ["output_item.added", *events, "output_item.done", "completed"]

    items += [dict(type="custom_tool_call_output", id="ctco_1", call_id=call["call_id"], output="Success.")]
    items += [dict(type="web_search_call", status="completed", action=dict(type="search", query="q"))]
    items += [dict(type="reasoning", summary=[], encrypted_content="gAAA"), message("developer", "later"), message("user", "b")]
    turn(agents, items, "done")
    function = json.dumps(dict(name="apply_patch", arguments=dict(input=patch)))
    assert agents.prompts[-1].endswith(f"{function}</tool_call>\n<tool>Success.\n<system>later\n<user>b\n<assistant>")


def test_codex_may_bring_its_tools_as_an_item(agents):
    """Codex does so with the models of OpenAI that it knows by name; a later item's tools are in the place of earlier ones."""
    own = dict(
        type="namespace", name="functions", description="", tools=[dict(type="custom", name="exec", description="Runs.")]
    )
    items = [dict(type="additional_tools", role="developer", tools=tools) for tools in ([own, SHELL], [MCP, SHELL])]
    agents.script.append(call_of("exec", input="1") + "\n" + call_of("mcp__w__weather"))
    body = {name: value for name, value in CODEX.items() if name != "tools"}
    response = agents.ask(RESPONSES, body | dict(input=[*items, message("user", "hi")], stream=False))
    assert tool_names(agents.prompts[-1]) == ["exec", "mcp__w__weather", "exec_command"]
    code, call = response["output"]
    assert (code["type"], code["name"], code["input"], "namespace" in code) == ("custom_tool_call", "exec", "1", False)
    assert (call["name"], call["namespace"], call["arguments"]) == ("weather", "mcp__w", "{}")


def test_what_codex_cannot_have_is_told(agents):
    error = agents.refusal(RESPONSES, CODEX | dict(previous_response_id="resp_1"))
    assert error["message"].endswith("send the whole conversation as 'input', with the output items of earlier responses")
    item = dict(type="additional_tools", role="developer", tools=[SHELL | dict(name=[])])
    error = agents.refusal(RESPONSES, CODEX | dict(tools=[], input=[item, message("user", "hi")]))
    assert error["message"] == "tools[0]: the name must be 1 to 128 letters, digits, '_', '-' and '.', got []"
    for kind in ("compaction", "local_shell_call"):
        error = agents.refusal(RESPONSES, CODEX | dict(input=[dict(type=kind, encrypted_content="gAAA")]))
        assert error["message"].startswith(f"input has an item of type '{kind}': expected message, reasoning, or a call")


CACHED = dict(cache_control=dict(type="ephemeral"))
BASH = dict(name="Bash", description="d", input_schema=COMMAND)
CLAUDE = dict(
    model="bundled",
    max_tokens=32000,
    stream=True,
    system=[
        dict(type="text", text="x-anthropic-billing-header: cc_version=2.1.197.1c0; cc_entrypoint=cli; cch=12af9;"),
        dict(type="text", text="You help.") | CACHED,
        dict(type="text", text="Be short.") | CACHED,
    ],
    messages=[
        dict(role="user", content=[*text("text", "<system-reminder>r"), dict(type="text", text="hi") | CACHED]),
        dict(role="system", content="Agents: none."),
    ],
    tools=[BASH, BASH | dict(name="mcp__w__weather") | CACHED],
    thinking=dict(type="adaptive"),
    context_management=dict(edits=[dict(type="clear_thinking_20251015", keep="all")]),
    output_config=dict(effort="high"),
    metadata=dict(user_id='{"device_id":"3"}'),
)


def blocks_of(data: bytes) -> tuple[list[dict], str]:
    """Returns the blocks of a streamed message, as Anthropic's clients put them together, and the reason of its end."""
    values = [json.loads(one.split("data: ")[1]) for one in data.decode().split("\n\n")[:-1]]
    blocks, reason = [], None
    for value in values:
        if value["type"] == "content_block_start":
            blocks.append(value["content_block"] | dict(json=""))
        elif value["type"] == "content_block_delta":
            kind = value["delta"]["type"]
            field = "json" if kind == "input_json_delta" else kind.removesuffix("_delta")
            blocks[-1][field] += value["delta"]["partial_json" if field == "json" else field]
        elif value["type"] == "message_delta":
            reason = value["delta"]["stop_reason"]
    for block in blocks:
        given = block.pop("json")
        block |= dict(input=json.loads(given)) if block["type"] == "tool_use" else {}
    return blocks, reason


def test_claude_code_calls_tools_over_several_turns(agents):
    agents.script.append("I look." + call_of("Bash", cmd="ls"))
    blocks, reason = blocks_of(agents.send(MESSAGES, CLAUDE).read())
    assert reason == "tool_use" and [block["type"] for block in blocks] == ["text", "tool_use"]
    assert blocks[1]["input"] == {"cmd": "ls"}
    prompt = agents.prompts[-1]
    begun = "<system>You help.\nBe short.\n<user><system-reminder>r\nhi\n<system>Agents: none.\n"
    assert begun + "<assistant>" in prompt and "billing" not in prompt

    thought = dict(type="thinking", thinking="t", signature="")
    image = dict(type="image", source=dict(type="base64", media_type="image/png", data="AA=="))
    use = dict(type="tool_use", id="toolu_2", name="mcp__w__weather", input={"cmd": "o"})
    results = [
        dict(type="tool_result", tool_use_id=blocks[1]["id"], content="a.png", is_error=False),
        dict(type="tool_result", tool_use_id="toolu_2", content=[*text("text", "rain"), image], is_error=True) | CACHED,
        dict(type="text", text="<system-reminder>s"),
    ]
    said = [dict(role="assistant", content=[thought, *blocks, use]), dict(role="user", content=results)]
    body = CLAUDE | dict(messages=[*CLAUDE["messages"], *said, dict(role="user", content="and?")])
    agents.script.append("done")
    blocks, reason = blocks_of(agents.send(MESSAGES, body).read())
    assert (blocks, reason) == ([dict(type="text", text="done")], "end_turn")
    calls = [dict(name="Bash", arguments={"cmd": "ls"}), dict(name="mcp__w__weather", arguments={"cmd": "o"})]
    calls = "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    results = "<tool>a.png\n<tool>rain\n[a part of type image, which this model cannot read]\n<user><system-reminder>s\nand?\n"
    assert agents.prompts[-1].endswith(f"{begun}<assistant>(t)I look.{calls}\n{results}<assistant>")
    counted = {name: body[name] for name in ("model", "system", "messages", "tools", "thinking")}
    assert agents.ask(MESSAGES.replace("?", "/count_tokens?"), counted) == dict(input_tokens=len(agents.prompts[-1]))


def test_a_later_system_message_is_the_users_where_the_template_refuses_it(agents, monkeypatch):
    monkeypatch.setattr(agents.service.tokenizer, "chat_template", STRICT)
    tries = []
    monkeypatch.setattr(turns, "chat", lambda *asked: tries.append(asked) or icejax.chat(*asked))
    agents.script += ["a", "b"]
    agents.send(MESSAGES, CLAUDE).read()
    assert agents.prompts[-1].endswith("<user><system-reminder>r\nhi\nAgents: none.\n<assistant>")
    agents.send(RESPONSES, CODEX | dict(input=[*CODEX["input"], message("developer", "later")])).read()
    assert agents.prompts[-1].endswith("<user>env\n\nhi\n\nlater\n<assistant>")
    assert len(tries) == 1  # each template is tried once


def test_thoughts_can_be_turned_off(agents, monkeypatch):
    template = "{% if enable_thinking is false %}-{% endif %}" + TEMPLATE
    monkeypatch.setattr(agents.service.tokenizer, "chat_template", template)
    for path, body in (
        (MESSAGES, CLAUDE | dict(thinking=dict(type="disabled"))),
        (RESPONSES, CODEX | dict(reasoning=dict(effort="none"))),
        (RESPONSES, CODEX),
    ):
        agents.script.append("a")
        agents.send(path, body).read()
        assert agents.prompts[-1].startswith("-") == (body is not CODEX)


TURNS = [  # bodies of later turns
    (RESPONSES, CODEX | dict(stream=False, input=[
        *CODEX["input"], dict(type="additional_tools", role="developer", tools=[MCP]),
        dict(type="reasoning", summary=[], content=text("reasoning_text", "t"), encrypted_content=None),
        dict(type="function_call", call_id="c1", name="weather", namespace="mcp__w", arguments="{}"),
        dict(type="function_call_output", call_id="c1", output=text("input_text", "rain")),
        dict(type="custom_tool_call", call_id="c2", name="apply_patch", input="x"),
        dict(type="custom_tool_call_output", call_id="c2", output="ok"), message("user", "b"),
    ])),
    (MESSAGES, CLAUDE | dict(stream=False, messages=[
        *CLAUDE["messages"],
        dict(role="assistant", content=[dict(type="thinking", thinking="t", signature=""), dict(type="tool_use", id="t1", name="Bash", input={})]),
        dict(role="user", content=[dict(type="tool_result", tool_use_id="t1", content=text("text", "rain"))]),
    ])),
]  # fmt: skip
JUNK = [None, True, -1, 1.5, "", "x", [], {}, [[]], [None], {"type": []}, {"type": "namespace"}, {"type": "text"}]


def with_change(rng: random.Random, value):
    """Returns a value with something else in one place of it."""
    inner = [*value] if isinstance(value, dict) else [*range(len(value))] if isinstance(value, list) else []
    if not inner or rng.random() < 0.15:
        return rng.choice(JUNK)
    at = rng.choice(inner)
    copied = value.copy()
    copied[at] = with_change(rng, value[at])
    return copied


def test_a_change_anywhere_is_answered_or_refused(agents):
    rng, statuses = random.Random(0), {200: 0, 400: 0, 404: 0}
    for _ in range(60):
        path, body = rng.choice(TURNS)
        agents.script[:] = ["a"]
        response = agents.send(path, json.dumps(with_change(rng, body)).encode())
        told = response.read()
        assert response.status in statuses, told
        statuses[response.status] += 1
    assert min(statuses[200], statuses[400]) > 10, statuses
