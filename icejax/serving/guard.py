"""The checks between the network and the endpoints: keys, hosts, origins, the size of a body, and errors as objects.

`app` puts it around all routes. A key is compared in constant time on every route but `/health`, `/metrics` and the page.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from icejax.serving.errors import ApiError, api_error, http_error
from icejax.serving.routes import page
from icejax.serving.service import Service

OPEN = ("/health", "/metrics", *page.PATHS)  # routes without a key
BODY_S = 60.0  # seconds in which a body must have come


class Guard:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self.state = SimpleNamespace(service=service)  # endpoints read `request.app.state`

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, begun = Request(scope), False
        scope["app"] = self

        def sending(message: Any) -> Awaitable[None]:
            nonlocal begun
            begun = True
            return send(message)

        try:
            self._check(request)
            await self._app(scope, receive, sending)
        except ClientDisconnect:
            return
        except Exception as error:
            if begun:  # no other response can be sent
                if isinstance(error, OSError):  # the client has left
                    return
                self._service.failed_on(error)
                raise ConnectionAbortedError("a response was cut") from None
            failure = http_error(error.status_code) if isinstance(error, HTTPException) else api_error(error)
            if failure.status >= 500 and not isinstance(error, ApiError):
                self._service.failed_on(error)
            await failure.response(path=scope["path"])(scope, receive, send)

    def _check(self, request: Request) -> None:
        """Raises ApiError for a request without a key, or one that a page of another site makes in a browser."""
        service = self._service
        if service.hosts and not _is_here(request):
            raise ApiError(403, "only this machine may ask a server without keys: start it with --api-key")
        if service.hosts and _name(request.headers.get("host", "")) not in service.hosts:
            raise ApiError(403, f"the server is known as {' or '.join(service.hosts)} alone: use that name, or --api-key")
        origin = None if service.keys else request.headers.get("origin")  # no browser adds a key by itself
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            raise ApiError(403, "pages of other sites may not call this server")
        if service.keys and request.scope["path"] not in OPEN and not _is_known(key_of(request), service.keys):
            message = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key")


def _is_here(request: Request) -> bool:
    """Says whether a request comes from this machine; one without an address does, as of a socket file."""
    try:
        return request.client is None or ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return True


def _name(host: str) -> str:
    """Returns the name in a Host header, without port and brackets."""
    name = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    return name.lower()


def owner_of(request: Request) -> str | None:
    """Returns the key of a request whose cached prefixes are its own; None: the server asks for no key."""
    return key_of(request) if request.app.state.service.keys else None


def key_of(request: Request) -> str | None:
    """Returns the key that a request brings: as OpenAI's clients send it, or as Anthropic's do."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key")


def _is_known(key: str | None, keys: tuple[str, ...]) -> bool:
    given = (key or "").encode()
    return sum(hmac.compare_digest(given, known.encode()) for known in keys) > 0  # all are compared


async def read_body(request: Request) -> bytes:
    """Returns a request's body; ApiError 413 if it is longer than any prompt, 408 if it does not come."""
    limit = request.app.state.service.body_limit
    too_long = ApiError(413, f"the body has more than {limit} bytes, as many as the context can take: shorten it")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length[:20]) > limit:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_long
    except TimeoutError:
        raise ApiError(408, f"the body has not come within {BODY_S:.0f} s") from None
    return bytes(body)
