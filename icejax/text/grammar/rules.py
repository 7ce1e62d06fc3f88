"""What an answer's text may be, as rules of llguidance (https://github.com/guidance-ai/llguidance)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from icejax.checks.errors import InputError, printable, quoted
from icejax.text.chat_messages import json_value

WIDEST = 1000  # keys of an object in a schema: llguidance takes time with their square, 1.2 s for 4,000
MOST_GBNF = 500  # rules of a grammar in GBNF, and 2^15 characters: its conversion takes time with their square, 0.3 s for 500
SPACES = "( |\\n[ \\t]{0,24})"  # between the parts of JSON: without an end to them a small model may write spaces for ever


@dataclass(frozen=True)
class Grammar:
    """What an answer's text may be. Thoughts before the answer are free.

    Attributes:
        rules: rules in llguidance's form of Lark, one of them named `answer`.
        has_marks: whether they also write the marks of a harmony message; False: the text of a message.
    """

    rules: str
    has_marks: bool = False

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool, *, lenient: bool = False) -> Grammar:
        """Returns the grammar of JSON that follows a JSON schema; properties come in the schema's order.

        Args:
            lenient: whether parts of the schema that no grammar has, such as `uniqueItems`, are left out; False: `compiled`
                refuses them.

        Raises:
            InputError: the schema is no JSON object.
        """
        options = dict(whitespace_flexible=True, whitespace_pattern=SPACES, lenient=lenient)
        return cls("answer: " + json_rule("the schema", schema, **options))

    @classmethod
    def json_object(cls) -> Grammar:
        """Returns the grammar of any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, expression: str) -> Grammar:
        """Returns the grammar of a text that the expression (Rust's regex, without look-around) matches as a whole.

        Raises:
            InputError: the expression is no text.
        """
        if not isinstance(expression, str):
            raise InputError(f"a grammar's expression must be text, got {quoted(expression)}")
        between_slashes = re.sub(r"\\.|/|\n", lambda found: {"/": "\\/", "\n": "\\n"}.get(found[0], found[0]), expression)
        return cls(f"answer: /{between_slashes}/")

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """Returns the grammar of one of several texts.

        Raises:
            InputError: they are no texts, or none is given.
        """
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise InputError(f"a grammar's texts must be a list of texts, got {quoted(texts)}")
        return cls("answer: " + " | ".join(map(literal, texts)))

    @classmethod
    def context_free(cls, text: str) -> Grammar:
        """Returns a grammar in llguidance's form of Lark, whose first rule is `start`, or in llama.cpp's GBNF, with `root`.

        Raises:
            InputError: it is no text, or GBNF that is broken, too long, or cannot be read because llguidance is not installed.
        """
        if not isinstance(text, str):
            raise InputError(f"a grammar must be text, got {quoted(text)}")
        return cls(f"answer: %lark {{\n{_lark(text)}\n}}")


def _lark(text: str) -> str:
    """Returns a grammar in Lark."""
    try:
        from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax
    except ImportError:
        raise InputError("grammars need the package llguidance: pip install 'icejax[serve]'") from None
    count = text.count("::=")
    if not is_lark_syntax(text) and (count > MOST_GBNF or len(text) > 2**15):
        message = f"a grammar in GBNF has {count} rules and {len(text)} characters, of at most {MOST_GBNF} and {2**15}"
        raise InputError(f"{message}: shorten it, or write it in Lark")
    try:
        return any_to_lark(text)
    except RecursionError:
        raise InputError("a grammar in GBNF is nested too deeply") from None
    except Exception as error:  # of its classes the package exports none, and some are plain
        reason = printable(" ".join(str(error).split()))[:200]
        raise InputError(f"the grammar is neither Lark, with a rule 'start:', nor GBNF: {reason}") from None


def literal(text: str) -> str:
    """Returns a rule's part that matches a text."""
    return json.dumps(text)


def json_rule(name: str, schema: Any, **options: Any) -> str:
    """Returns a rule's part that matches JSON of a schema; the options are llguidance's.

    Raises:
        InputError: the schema, which the message calls `name`, is no JSON object, or one too wide.
    """
    schema = json_value(name, {} if schema is True else schema)
    if not isinstance(schema, dict):
        raise InputError(f"{name} must be a JSON schema, which is an object, got {quoted(schema)}")
    if (widest := _widest(schema)) > WIDEST:
        raise InputError(f"{name} has an object of {widest} keys: expected at most {WIDEST}")
    return "%json " + json.dumps(schema | {"x-guidance": options})


def _widest(value: Any) -> int:
    """Returns the number of keys of the object that has most of them, in a value of JSON."""
    inner = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return max([len(value) if isinstance(value, dict) else 0, *map(_widest, inner)])
