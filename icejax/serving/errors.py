"""Errors of the server, as OpenAI's objects. All endpoints raise `ApiError`; `guard` turns it into a response.

OpenAI's clients try 408, 409, 429 and 5xx again, so what can never succeed is a 400.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from icejax.api.prompts import ContextFull
from icejax.checks.errors import InputError
from icejax.engine.serving.scheduler import QueueFull
from icejax.serving.json_text import json_bytes

RETRY_S = 1  # seconds after which a client may ask again


class ApiError(Exception):
    """Raised for a request that is not answered.

    Attributes:
        status: HTTP status.
        message: one line, without the prompt.
        param: the field of the body that is at fault; None: no single one.
        code: a word that programs read; None: none.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """Returns the object that clients read."""
        return {"error": dict(message=self.message, type=_kind(self.status), param=self.param, code=self.code)}

    def anthropic_body(self) -> dict[str, Any]:
        """Returns the object that Anthropic's clients read."""
        kind = "overloaded_error" if self.status == 503 else "api_error" if self.status >= 500 else _kind(self.status)
        return dict(type="error", error=dict(type=kind, message=self.message))

    def response(self, *, path: str = "") -> Response:
        """Returns the HTTP response to a request of `path`."""
        headers = {"Retry-After": str(RETRY_S)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (408, 413):  # the rest of the body is not read
            headers["Connection"] = "close"
        body = self.anthropic_body() if path.startswith("/v1/messages") else self.body()
        return Response(json_bytes(body), self.status, headers, "application/json")


def _kind(status: int) -> str:
    """Returns OpenAI's `type` of an error."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return kinds.get(status, "invalid_request_error" if status < 500 else "server_error")


def api_error(error: BaseException) -> ApiError:
    """Returns what a client is told of an error; of an unexpected one only that there was one."""
    match error:
        case ApiError():
            return error
        case ContextFull():  # in Anthropic's words, by which LiteLLM knows it
            message = f"prompt is too long: {error}"
            return ApiError(400, message, param="messages or prompt", code="context_length_exceeded")
        case QueueFull():
            return ApiError(429, str(error), code="queue_full")
        case InputError():
            return ApiError(400, str(error))
        case RuntimeError() if str(error).startswith("the engine"):
            return ApiError(503, "the engine has ended: the server stops")
        case _:
            return ApiError(500, f"the server failed on this request ({type(error).__name__})")


def http_error(status: int) -> ApiError:
    """Returns the error of a route that is not there (404), or not with this method (405)."""
    phrase = HTTPStatus(status).phrase
    return ApiError(status, f"{phrase}: docs/http-api.md lists the routes" if status == 404 else phrase)
