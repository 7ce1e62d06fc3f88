"""The routes of the server, as an ASGI application that stands behind its guard."""

from __future__ import annotations

from starlette.routing import Route, Router
from starlette.types import ASGIApp

from icejax.serving.guard import Guard
from icejax.serving.routes import chat, completions, messages, page, responses, schema, status, tokens
from icejax.serving.service import Service


def make_app(service: Service) -> ASGIApp:
    """Returns the application that serves `service`."""
    routes = [
        *(Route(path, page.page) for path in page.PATHS),
        Route("/health", status.health),
        Route("/metrics", status.metrics),
        Route("/version", status.version),
        Route("/openapi.json", schema.openapi),
        Route("/v1/icejax", status.about),
        Route("/v1/models", status.models),
        Route("/v1/models/{name:path}", status.model),
        Route("/v1/completions", completions.completions, methods=["POST"]),
        Route("/v1/chat/completions", chat.chat_completions, methods=["POST"]),
        Route("/v1/responses", responses.responses, methods=["POST"]),
        Route("/v1/messages", messages.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
    ]
    return Guard(Router(routes, redirect_slashes=False), service)
