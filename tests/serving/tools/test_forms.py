"""The form of a model's calls, from its template and tokens; a grammar writes the form's marks as tokens."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from icejax.serving.tools.form import Choice, Tool
from icejax.serving.tools.forms import form_of
from icejax.text.grammar.matcher import compiled
from tests.helpers import small_tokenizers

HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"]
TOOL = Tool(name="he", parameters={"properties": {"a": {"type": "integer"}}, "required": ["a"]})
STRICT = Tool(name=TOOL.name, parameters=TOOL.parameters, strict=True)
XML = "<tool_call>\n<function=he>\n<parameter=a>\n12\n</parameter>\n</function>\n</tool_call>"
HEADER, JSON = "<|channel|>commentary to=functions.he <|constrain|>json<|message|>", '{"a": 12}'
# added tokens, template, form, a call
MODELS = [
    (["<tool_call>", "</tool_call>"], "{{ tools }}<tool_call>", "Hermes", f'<tool_call>\n{{"name": "he", "arguments": {JSON}}}\n</tool_call>'),
    ([], "{{ tools }}<tool_call>", "Hermes", f'<tool_call>\n{{"name": "he", "arguments": {JSON}}}\n</tool_call>'),
    (["<tool_call>", "</tool_call>"], "{{ tools }}<tool_call><function=<parameter=", "QwenCoder", XML),
    ([], "{{ tools }}<tool_call><function=<parameter=", "QwenCoder", XML),
    (["<|python_tag|>"], "{{ tools }} ipython", "Llama", f'{{"name": "he", "parameters": {JSON}}}'),
    (["[TOOL_CALLS]"], "{{ tools }}[TOOL_CALLS]", "Mistral", f'[TOOL_CALLS] [{{"name": "he", "arguments": {JSON}}}]'),
    (["[TOOL_CALLS]", "[ARGS]"], "{{ tools }}[TOOL_CALLS][ARGS]", "Mistral", f"[TOOL_CALLS]he[ARGS]{JSON}"),
    (HARMONY, "{{ tools }}", "Harmony", HEADER + JSON),
    (HARMONY, "{{ tools }}", "Harmony", "<|channel|>analysis<|message|>x<|end|><|start|>assistant" + HEADER + JSON),
]  # fmt: skip


def tokenizer_of(marks, template) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(json.dumps(small_tokenizers.byte_level()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=template)
    tokenizer.add_tokens([AddedToken(mark, special=not mark.endswith("tool_call>"), normalized=False) for mark in marks])
    return tokenizer


@pytest.mark.parametrize("marks, template, form, call", MODELS)
def test_a_form_is_recognised_and_its_marks_are_tokens(marks, template, form, call):
    pytest.importorskip("llguidance")
    tokenizer = tokenizer_of(marks, template)
    known = form_of(tokenizer)
    assert type(known).__name__ == form and known.grammar([TOOL], Choice()) is None
    grammar = known.grammar([TOOL], Choice(required=True, parallel=False))
    prompt = "<|start|>assistant" if form == "Harmony" else "x"
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    matcher = compiled(grammar, tokenizer, ids, eos=(2,), vocabulary=len(tokenizer))
    tokens = tokenizer(call, add_special_tokens=False)["input_ids"]
    for token in tokens:
        matcher.take(token)  # InputError if the grammar does not have it
    assert matcher.over and {known.tokens[mark] for mark in marks if mark in call} <= {*tokens}


@pytest.mark.parametrize("marks, template, form, call", MODELS[:-2])
def test_calls_of_a_strict_tool_follow_its_schema_and_text_is_free(marks, template, form, call):
    pytest.importorskip("llguidance")
    tokenizer = tokenizer_of(marks, template)
    known = form_of(tokenizer)

    def allows(*parts: str, parallel: bool = True) -> bool:
        grammar = known.grammar([STRICT], Choice(parallel=parallel))
        matcher = compiled(grammar, tokenizer, [5], eos=(2,), vocabulary=len(tokenizer))
        for token in [id for part in parts for id in tokenizer(part, add_special_tokens=False)["input_ids"]]:
            if not matcher.mask[token // 32] >> (token % 32) & 1:
                return False
            matcher.take(token)
        return bool(matcher.mask[0] >> 2 & 1) or matcher.over

    before = "" if form == "Llama" else "he said\n"  # whose calls stand at the beginning
    assert allows("he < [o") and allows(before + call) and allows(call)
    assert not allows(before, call.replace("12", '"b"')) and not allows(before, call.replace("12", "1.5"))
    assert not allows(before + call.partition("12")[0])
    if form != "Llama":
        assert allows(call + "\nhe") and not allows(call, call, parallel=False)
    if form != "Mistral" or known.named:
        assert allows(call, {"Llama": "; ", "Mistral": ""}.get(form, "\n"), call)
    if form != "Llama" and marks:
        assert not allows(*marks[0])  # the mark, in pieces


@pytest.mark.parametrize(
    "template",
    [None, "plain", "{{ tools }}", "<tool_call> alone", "{{ tools }}<function=f>", "{{ tools }}<tool_call><function=f>"],
)
def test_other_templates_have_no_form(template):
    assert form_of(tokenizer_of([], template)) is None


def test_ids_of_mistral_have_nine_letters_and_digits():
    form = form_of(tokenizer_of([], "{{ tools }}[TOOL_CALLS]"))
    assert len(form.new_id()) == 9 and form.new_id() != form.new_id()
    assert form.known_id("abcdefgh1") == "abcdefgh1" and form.known_id("call_1") == form.known_id("call_1") != "call_1"
    assert len(form.known_id("call_1")) == len(form.known_id("abc-efgh1")) == 9
