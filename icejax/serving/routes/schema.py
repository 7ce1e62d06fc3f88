"""`/openapi.json`: the routes and their bodies in OpenAPI's words, made from the same models that check the bodies."""

from __future__ import annotations

import functools
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from icejax import __version__
from icejax.serving.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    MessagesRequest,
    ResponsesRequest,
    Schema,
    TokenizeRequest,
)
from icejax.serving.streaming import json_response

BODIES: dict[str, type[Schema]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": MessagesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
READ = ("/health", "/metrics", "/version", "/v1/models", "/v1/icejax", "/openapi.json")
REFUSALS = "4XX", "5XX"


async def openapi(request: Request) -> Response:
    """Returns the description."""
    return json_response(description())


@functools.cache
def description() -> dict[str, Any]:
    """Returns the OpenAPI description of all routes."""
    kinds = [(kind, "validation") for kind in dict.fromkeys(BODIES.values())]
    names, schemas = models_json_schema(kinds, ref_template="#/components/schemas/{model}")
    answers = {"200": {"description": "the answer"}} | {status: {"description": "an error object"} for status in REFUSALS}
    paths: dict[str, Any] = {path: {"get": {"responses": answers}} for path in READ}
    for path, kind in BODIES.items():
        body = {"required": True, "content": {"application/json": {"schema": names[kind, "validation"]}}}
        paths[path] = {"post": {"requestBody": body, "responses": answers}}
    model = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{name}"] = {"get": {"parameters": [model], "responses": answers}}
    components = dict(schemas=schemas["$defs"], securitySchemes={"key": {"type": "http", "scheme": "bearer"}})
    about = dict(title="icejax", version=__version__)
    return dict(openapi="3.1.0", info=about, paths=paths, components=components, security=[{}, {"key": []}])
