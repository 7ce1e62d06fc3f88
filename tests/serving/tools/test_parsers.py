"""Parsers of tool calls: transcripts of every form, cut at every place."""

import itertools
import json
import re

import pytest

from icejax.checks.errors import InputError
from icejax.serving.tools.events import CallArguments, CallBegin, CallEnd, Text
from icejax.serving.tools.form import Choice, Tool, joined
from icejax.serving.tools.harmony import Harmony
from icejax.serving.tools.hermes import Hermes
from icejax.serving.tools.llama import Llama
from icejax.serving.tools.mistral import Mistral
from icejax.serving.tools.qwen_coder import QwenCoder
from icejax.text.reasoning import Harmony as Channels

FORMS = {form.__name__.lower(): form(tokens={}, specials={}) for form in (Hermes, Llama, Mistral, Harmony, QwenCoder)}
SPECIAL = re.compile(r"(<\|[^<>|]+\|>|\[TOOL_CALLS\](?! \})|\[ARGS\]|\[CALL_ID\])")
OSLO, ROME = '{"city": "Oslo", "days": [1, {"a": null}]}', '{"city": "Rome"}'
TRICKY = json.dumps({"text": 'a </tool_call> \\" [TOOL_CALLS] }] {"name": "x"} é\n'})


def call(index, name, arguments):
    return [CallBegin(index, name), CallArguments(index, arguments), CallEnd(index)]


def xml(name: str, **values: str) -> str:
    """Returns a call in Qwen3-Coder's form."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


TYPED = {
    "properties": {
        "text": {"type": "string"},
        "days": {"type": "integer"},
        "rain": {"type": "boolean"},
        "list": {"$ref": "#/$defs/list"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "$defs": {"list": {"type": "array"}},
}
CODE = 'if a < b:\n    "</param>"\n\n<tool_call>\\ é'

# form, answer, events
TRANSCRIPTS = [
    ("hermes", f'<tool_call>\n{{"name": "f", "arguments": {OSLO}}}\n</tool_call>', call(0, "f", OSLO)),
    (
        "hermes",
        f'I look.\n\n<tool_call>{{"arguments": {ROME}, "name": "f"}}</tool_call>',
        [Text("I look."), *call(0, "f", ROME)],
    ),
    (
        "hermes",
        f'<tool_call>\n{{"name": "f", "arguments": {OSLO}}}\n</tool_call>\n<tool_call>\n{{"name": "g", "arguments": {ROME}}}\n</tool_call>\nDone.',
        [*call(0, "f", OSLO), *call(1, "g", ROME), Text("\nDone.")],
    ),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {TRICKY}}}</tool_call>', call(0, "f", TRICKY)),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {json.dumps(ROME)}}}</tool_call>', call(0, "f", ROME)),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}")),
    ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', call(0, "f", "{}")),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', [CallBegin(0, "f"), CallArguments(0, '{"a": 1'), CallEnd(0)]),
    ("hermes", "a < b <tool_ca", [Text("a < b <tool_ca")]),
    ("hermes", "<tool_call>nothing</tool_call>", [Text("<tool_call>nothing</tool_call>")]),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}} b', [Text('<tool_call>{"name": 5, "arguments": {}} b')]),
    ("hermes", '<tool_call>{"name": "f"', [Text('<tool_call>{"name": "f"')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_', call(0, "f", "{}")),
    ("hermes", "plain \n", [Text("plain \n")]),
    ("hermes", "Use <tool_call> to call.", [Text("Use <tool_call> to call.")]),
    ("hermes", "```\n<tool_call>\n```", [Text("```\n<tool_call>\n```")]),
    ("mistral", "Write [TOOL_CALLS] now", [Text("Write [TOOL_CALLS] now")]),
    ("qwencoder", "So:\n\n<tool_call> and", [Text("So:\n\n<tool_call> and")]),
    ("llama", f'{{"name": "f", "parameters": {OSLO}}}', call(0, "f", OSLO)),
    ("llama", f'<|python_tag|>{{"type": "function", "name": "f", "parameters": {TRICKY}}}', call(0, "f", TRICKY)),
    (
        "llama",
        f'{{"name": "f", "parameters": {OSLO}}}; {{"name": "g", "parameters": {ROME}}}',
        [*call(0, "f", OSLO), *call(1, "g", ROME)],
    ),
    ("llama", '{"name": "Ada", "age": 3}', [Text('{"name": "Ada", "age": 3}')]),
    ("llama", '{"name": "Ada"}', [Text('{"name": "Ada"}')]),
    ("llama", 'It is {"name": "f", "parameters": {}}', [Text('It is {"name": "f", "parameters": {}}')]),
    ("llama", '<|python_tag|>print("a")', [Text('<|python_tag|>print("a")')]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {OSLO}, "id": "abcdefghi"}}]', call(0, "f", OSLO)),
    (
        "mistral",
        f'Hm.[TOOL_CALLS][{{"name": "f", "arguments": {TRICKY}}}, {{"name": "g", "arguments": {ROME}}}]',
        [Text("Hm."), *call(0, "f", TRICKY), *call(1, "g", ROME)],
    ),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{OSLO}[TOOL_CALLS]g[ARGS]{ROME}", [*call(0, "f", OSLO), *call(1, "g", ROME)]),
    ("mistral", f"[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{TRICKY}", call(0, "f", TRICKY)),
    ("mistral", f"[TOOL_CALLS]f{OSLO}", call(0, "f", OSLO)),
    ("mistral", "[TOOL_CALLS] no, I do not", [Text("[TOOL_CALLS] no, I do not")]),
    ("mistral", "[TOOL_CALLS]f[ARGS]5", [Text("[TOOL_CALLS]f[ARGS]5")]),
    (
        "harmony",
        f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{OSLO}<|call|>",
        call(0, "f", OSLO),
    ),
    (
        "harmony",
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{TRICKY}",
        [Text("I look."), *call(0, "f", TRICKY)],
    ),
    ("harmony", "<|channel|>final<|message|>to=functions.f {}", [Text("to=functions.f {}")]),
    ("qwencoder", xml("typed", text=CODE), call(0, "typed", json.dumps({"text": CODE}, ensure_ascii=False))),
    (
        "qwencoder",
        "I look.\n"
        + xml("typed", text="5", days="5", rain="True", list='[1, "a"]', maybe="None")
        + "\n"
        + xml("f", x="a")
        + "\nDone.",
        [
            Text("I look."),
            *call(0, "typed", '{"text": "5", "days": 5, "rain": true, "list": [1, "a"], "maybe": null}'),
            *call(1, "f", '{"x": "a"}'),
            Text("\nDone."),
        ],
    ),
    ("qwencoder", xml("typed", maybe="5", days="few"), call(0, "typed", '{"maybe": "5", "days": "few"}')),
    ("qwencoder", xml("typed", days="NaN", list="[-Infinity]"), call(0, "typed", '{"days": "NaN", "list": "[-Infinity]"}')),
    ("qwencoder", "<tool_call><function=f></function></tool_call>", call(0, "f", "{}")),
    ("qwencoder", "<tool_call><function=f>\n<parameter=a>\n1\n</parameter>\n", call(0, "f", '{"a": "1"}')),
    ("qwencoder", xml("typed", text=""), call(0, "typed", '{"text": ""}')),
    ("qwencoder", "<tool_call>\n{}\n</tool_call>", [Text("<tool_call>\n{}\n</tool_call>")]),
    (
        "qwencoder",
        xml("typed", text="ab").partition("b")[0],
        [CallBegin(0, "typed"), CallArguments(0, '{"text": "a'), CallEnd(0)],
    ),
]


def pieces_of(answer: str, cuts: tuple[int, ...]) -> list[tuple[str, str | None]]:
    """Returns an answer as pieces of text, each with the special token behind it, cut at some more places of its texts."""
    parts = SPECIAL.split(answer)
    pieces, at = [], 0
    for text, special in itertools.zip_longest(parts[::2], parts[1::2]):
        ends = [cut - at for cut in cuts if 0 < cut - at < len(text)]
        starts = [0, *ends]
        texts = [text[start:end] for start, end in zip(starts, [*ends, len(text)], strict=True)]
        pieces += [*((one, None) for one in texts[:-1]), (texts[-1], special)]
        at += len(text) + len(special or "")
    return pieces


def parsed(form: str, pieces) -> list:
    """Returns the events of an answer; harmony's pieces go through the reader of channels, as in an engine's row."""
    parser, channels, events = (
        FORMS[form].parser([Tool(name="typed", parameters=TYPED)]),
        Channels(header="", begun="header"),
        [],
    )
    for text, special in pieces:
        if form == "harmony":
            text = channels.take(text, special).text
        events += parser.take(text, special)
    assert all(event.text for event in events if isinstance(event, Text | CallArguments))
    calls = parser.calls
    events = joined([*events, *parser.rest()])
    assert calls == sum(isinstance(event, CallBegin) for event in events)
    return events


@pytest.mark.parametrize("form, answer, expected", TRANSCRIPTS)
def test_an_answer_is_read_wherever_it_is_cut(form, answer, expected):
    expected = joined(expected)
    cuts = [(), tuple(range(len(answer))), *((at,) for at in range(1, len(answer)))]
    for cut in cuts:
        assert parsed(form, pieces_of(answer, cut)) == expected, cut


TOOLS = [
    Tool(
        name="f",
        parameters={"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "integer"}}, "required": ["a"]},
    ),
    Tool(name="g.h", parameters={"type": "object", "properties": {"z": {"type": "array", "uniqueItems": True}}}),
]


@pytest.mark.parametrize(
    "form, opening, between, closing",
    [
        (FORMS["hermes"], '<tool_call>\n{"name": "NAME", "arguments": ', "\n", "}\n</tool_call>"),
        (FORMS["llama"], '{"name": "NAME", "parameters": ', "; ", "}"),
        (Mistral(named=True, tokens={}, specials={}), "[TOOL_CALLS]NAME", "", ""),
        (FORMS["mistral"], '{"name": "NAME", "arguments": ', ", ", "}"),
        (FORMS["harmony"], "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", None, ""),
    ],
)
def test_a_grammar_allows_calls_that_follow_their_schemas_alone(form, opening, between, closing):
    llguidance = pytest.importorskip("llguidance")
    tokens = llguidance.LLTokenizer("byte")

    def allows(*calls: tuple[str, str], **choice) -> bool:
        text = (between or "").join(opening.replace("NAME", name) + arguments + closing for name, arguments in calls)
        text = f"[TOOL_CALLS][{text}]" if opening.startswith('{"name": "NAME", "arg') else text
        rules = form.grammar(TOOLS, Choice(required=True, **choice)).rules
        matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_lark(f"start: answer\n{rules}"), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()

    assert allows(("f", '{"a": 1}')) and allows(("g.h", "{}"))
    assert not allows(("f", '{"a": "1"}')) and not allows(("f", "{}")) and not allows(("k", "{}"))
    assert not allows(("g.h", "[1]"))
    assert allows(("f", '{"a":1}'), ("g.h", '{"z": [1, 1]}')) == (between is not None)
    assert not allows(("f", '{"a": 1}'), ("f", '{"a": 1}'), parallel=False)
    assert allows(("f", '{"a": 1}'), name="f") and not allows(("g.h", "{}"), name="f")
    if between is not None:
        assert allows(*[("g.h", "{}")] * 16) and not allows(*[("g.h", "{}")] * 17)
    assert form.grammar(TOOLS, Choice()) is None


def test_a_grammar_of_parameters_follows_their_types():
    llguidance = pytest.importorskip("llguidance")
    tokens = llguidance.LLTokenizer("byte")
    properties = TYPED["properties"] | {"kind": {"enum": ["a", "b"]}}
    tools = [Tool(name="typed", parameters=TYPED | {"properties": properties, "required": ["text"]}), Tool(name="f")]
    rules = FORMS["qwencoder"].grammar(tools, Choice(required=True, parallel=False)).rules

    def allows(text: str) -> bool:
        matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_lark(f"start: answer\n{rules}"), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.try_consume_tokens([*text.encode()]) == len(text.encode()) and matcher.is_accepting()

    assert allows(xml("typed", text=CODE)) and allows(xml("f")) and not allows(xml("g")) and not allows(xml("typed"))
    assert allows(xml("typed", text="", days="5", rain="true", list='[1, "a"]', maybe='"a"', kind="b"))
    assert not allows(xml("typed", text="", days="five")) and not allows(xml("typed", text="", kind="c"))
    assert not allows(xml("typed", text="", rain="True")) and not allows(xml("typed", text="", other="a"))
    limited = Tool(name="f", parameters={"properties": {"a": {"type": "string", "pattern": "b"}}}, strict=True)
    with pytest.raises(InputError, match="'a' of f has 'pattern', which no grammar of Qwen3-Coder's calls follows"):
        FORMS["qwencoder"].grammar([limited], Choice())


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": [], "required": 5},
        {"properties": {"a": 5}},
        *({"properties": {"a": {name: 5}}} for name in ("type", "enum", "anyOf", "oneOf", "$ref")),
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": 5},
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}] * 20}}},
    ],
)
def test_a_schema_that_is_none_fails_nothing(schema):
    tool = Tool(name="f", parameters=schema)
    assert FORMS["qwencoder"].grammar([tool], Choice(required=True)) is not None
    parser = FORMS["qwencoder"].parser([tool])
    assert parser.take(xml("f", a="text"))[0] == CallBegin(0, "f")


def test_arguments_come_as_they_are_written():
    parser = FORMS["hermes"].parser([])
    parser.take('<tool_call>{"name": "f", "arguments"')
    assert parser.take(': {"a": ') == [CallBegin(0, "f"), CallArguments(0, '{"a": ')]
    assert parser.take("1") == [CallArguments(0, "1")]
    assert parser.take("}}") == [CallArguments(0, "}"), CallEnd(0)]


def test_a_long_argument_takes_linear_time():
    parser, size = FORMS["hermes"].parser([]), 100_000
    parser.take('<tool_call>{"name": "f", "arguments": {"a": "')
    events = [event for _ in range(size // 4) for event in parser.take("abc<")]
    assert sum(len(event.text) for event in events) == size
