"""The grammar that a request asks for: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`, and llama.cpp's
`grammar` and `json_schema`.
"""

from __future__ import annotations

from typing import Any

from icejax.checks.errors import quoted
from icejax.serving.errors import ApiError
from icejax.serving.parameters import checked
from icejax.serving.schemas import AnswerFields
from icejax.text.grammar.rules import Grammar

MAKERS = {"json": Grammar.json_schema, "regex": Grammar.regex, "choice": Grammar.choice, "grammar": Grammar.context_free}
FIELDS = {f"guided_{name}": name for name in MAKERS} | {"grammar": "grammar", "json_schema": "json"}  # and what they are


def grammar_of(fields: AnswerFields) -> Grammar | None:
    """Returns the grammar of the answers; None: they may be anything. ApiError 400 for two, or one that cannot be made."""
    asked = {name: (kind, value) for name, kind in FIELDS.items() if (value := getattr(fields, name)) not in (None, "")}
    if fields.structured_outputs is not None:
        asked["structured_outputs"] = _structured(fields.structured_outputs)
    if (fields.response_format or {}).get("type", "text") != "text":
        asked["response_format"] = _format(fields.response_format)
    if len(asked) > 1:
        raise ApiError(400, f"the request has {' and '.join(asked)}: give one of them", param=[*asked][-1])
    for name, (kind, value) in asked.items():
        return checked(name, lambda kind=kind, value=value: MAKERS[kind](value))
    return None


def _format(form: dict[str, Any]) -> tuple[str, Any]:
    """Returns the kind and the value of a `response_format` that is not text."""
    kind = form["type"]
    if kind == "json_object":
        return "json", {"type": "object"}
    if kind != "json_schema":
        message = f"response_format of type {quoted(kind)} is not supported: expected text, json_object or json_schema"
        raise ApiError(400, message, param="response_format", code="unsupported_parameter")
    described = form.get("json_schema")
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        raise ApiError(
            400, "response_format must have a json_schema with a schema, which is an object", param="response_format"
        )
    return "json", described["schema"]


def _structured(asked: Any) -> tuple[str, Any]:
    """Returns the kind and the value of `structured_outputs`."""
    given = {name: value for name, value in asked.items() if value is not None} if isinstance(asked, dict) else {}
    if given.get("json_object") is True and len(given) == 1:
        return "json", {"type": "object"}
    if len(given) != 1 or (kind := next(iter(given))) not in MAKERS:
        message = f"structured_outputs must have one of {', '.join(MAKERS)} and json_object, got {quoted(asked)}"
        raise ApiError(400, message, param="structured_outputs")
    return kind, given[kind]


def chat_format(form: dict[str, Any], *, field: str) -> dict[str, Any]:
    """Returns a form whose schema stands beside its type as the `response_format` of a chat; ApiError 400 without a schema."""
    if form.get("type") != "json_schema":
        return form
    if not isinstance(form.get("schema"), dict):
        message = f"{field}.format of type json_schema needs a schema, which is an object, got {quoted(form.get('schema'))}"
        raise ApiError(400, message, param=field)
    return dict(type="json_schema", json_schema={name: form[name] for name in ("name", "schema", "strict") if name in form})
