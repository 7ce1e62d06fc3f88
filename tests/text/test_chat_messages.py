"""Messages, tools and template arguments: what a template gets, and what is refused in one line."""

import pytest
from transformers.utils import chat_template_utils

from icejax.checks.errors import InputError
from icejax.text.chat_messages import FUNCTIONS, checked_messages, template_variables

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TAKEN = {
    "text": ({"role": "user", "content": "x"}, {"role": "user", "content": "x"}),
    "parts": ({"role": "user", "content": ({"type": "text", "text": "x"},)}, {"role": "user", "content": [{"type": "text", "text": "x"}]}),
    "thoughts": ({"role": "assistant", "content": "x", "reasoning_content": "y"}, {"role": "assistant", "content": "x", "reasoning": "y"}),
    "a call": ({"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "assistant", "content": None, "tool_calls": [CALL]}),
    "a call alone": ({"role": "assistant", "tool_calls": [CALL]}, {"role": "assistant", "tool_calls": [CALL]}),
    "a result": ({"role": "tool", "name": "add", "tool_call_id": "1", "content": "2"},) * 2,
    "nulls": ({"role": "assistant", "content": "x", "tool_calls": None, "name": None}, {"role": "assistant", "content": "x"}),
}  # fmt: skip


@pytest.mark.parametrize("case", TAKEN)
def test_messages_reach_the_template(case):
    message, expected = TAKEN[case]
    assert checked_messages("messages", [message]) == [expected]


LIST = "messages must be a list of objects with a text role, a content (text, or a list of text parts) and perhaps a text reasoning, got "
WRONG = {
    "text": ("x", LIST + "'x'"),
    "none": ([], LIST + "[]"),
    "no role": ([{"content": "x"}], LIST + "[{'content': 'x'}]"),
    "no content": ([{"role": "assistant", "content": None}], LIST + "[{'content': None, 'role': 'assistant'}]"),
    "a number": ([{"role": "assistant", "content": 3}], LIST + "[{'content': 3, 'role': 'assistant'}]"),
    "an object": ([{"role": "assistant", "content": {"a": 1}}], LIST + "[{'content': {'a': 1}, 'role': 'assistant'}]"),
    "no parts": ([{"role": "user", "content": []}], LIST + "[{'content': [], 'role': 'user'}]"),
    "another key": ([{"role": "user", "contents": "x"}], "messages: a message has no 'contents': expected role, content, reasoning, reasoning_content, name, tool_calls, tool_call_id (did you mean content?)"),
    "an image": ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages: a content has a part of type 'image_url': expected text, the only type that is read"),
    "audio": ([{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "input_audio"}]}], "messages: a content has a part of type 'input_audio': expected text, the only type that is read"),
    "a part of text": ([{"role": "user", "content": ["x"]}], "messages: a part of a content must be an object with the type 'text' and a text, got 'x'"),
    "a part without text": ([{"role": "user", "content": [{"type": "text"}]}], "messages: a part of a content must be an object with the type 'text' and a text, got {'type': 'text'}"),
    "calls": ([{"role": "assistant", "tool_calls": {"a": 1}}], "messages: 'tool_calls' must be a list of objects, got {'a': 1}"),
    "bytes": ([{"role": "user", "content": b"x"}], "messages must be made of text, numbers, lists and objects, got b'x'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_message_is_refused_in_one_line(case):
    value, message = WRONG[case]
    with pytest.raises(InputError) as raised:
        checked_messages("messages", value)
    assert str(raised.value) == message


def nested(depth):
    return [nested(depth - 1)] if depth else []


VARIABLES = {
    "tools of text": (dict(tools=["add"]), "tools must be a list of objects, got ['add']"),
    "a tool": (dict(tools={"name": "add"}), "tools must be a list of objects, got {'name': 'add'}"),
    "a function": (dict(tools=[print]), "tools must be made of text, numbers, lists and objects, got <built-in function print>"),
    "text": (dict(arguments="x"), "chat_template_kwargs must be an object of names and values, got 'x'"),
    "messages": (dict(arguments={"messages": []}), "'messages' cannot be an argument of a chat template: icejax sets it"),
    "a function of Jinja": (dict(arguments={"range": "x"}), "'range' cannot be an argument of a chat template: templates call the function of this name"),
    "a function of templates": (dict(arguments={"raise_exception": 1}), "'raise_exception' cannot be an argument of a chat template: templates call the function of this name"),
    "a name": (dict(arguments={"a-b": 1}), "'a-b' cannot be an argument of a chat template: expected letters, digits and underscores"),
    "depth": (dict(arguments={"a": nested(99)}), "chat_template_kwargs is nested more than 50 levels deep"),
    "a number": (dict(arguments={"a": 10**5000}), "chat_template_kwargs must be made of text, numbers, lists and objects, got a number of thousands of digits"),
    "no number": (dict(arguments={"a": float("nan")}), "chat_template_kwargs must be made of text, numbers, lists and objects, got nan"),
    "numbers as names": (dict(arguments={1: 2}), "chat_template_kwargs must be made of text, numbers, lists and objects, got {1: 2}"),
}  # fmt: skip


@pytest.mark.parametrize("case", VARIABLES)
def test_what_is_no_variable_is_refused_in_one_line(case):
    values, message = VARIABLES[case]
    with pytest.raises(InputError) as raised:
        template_variables(**values)
    assert str(raised.value) == message


def test_functions_of_templates_are_known():
    """Those of transformers' environment, which has the functions of Jinja."""
    known = {*chat_template_utils._compile_jinja_template("x").environment.globals, "strftime_now", "raise_exception"}
    assert {*FUNCTIONS} == known


def test_tools_and_arguments_are_variables():
    assert template_variables([CALL], {"enable_thinking": False}) == {"enable_thinking": False, "tools": [CALL]}
    assert template_variables() == template_variables([], {}) == {}
