"""Replicas of the server on Ray Serve: ``serve run icejax.ray.serving:server model=DIR replicas=4``.

    client -> Ray's proxy -> Front, which reads the body -> DocumentRouter -> Replica: an engine, the routes of `icejax serve`

Ray's proxy does not know bodies, so a deployment without a model stands between it and the router.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from rich.console import Console
from starlette.types import ASGIApp, Receive, Scope, Send

from icejax.checks.errors import InputError
from icejax.checks.numbers import POSITIONS, integer, number
from icejax.commands import serve as command
from icejax.commands.serving import prepared
from icejax.ray.router import document_of
from icejax.serving.app import make_app
from icejax.serving.errors import ApiError
from icejax.serving.lifecycle import BODY_BYTES, TOKEN_BYTES
from icejax.serving.service import Phase

SCOPE = (
    "type",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "headers",
    "client",
    "server",
)


def server(options: dict[str, Any]) -> Application:
    """Returns the application that `serve run` or a config of Ray Serve starts.

    Args:
        options: of ``icejax serve``, by their names with underscores, without host and port; a flag alone has the value `true`.
            Also `replicas` (1), and `gpus`, how many a replica takes (0).

    Raises:
        InputError: an option is unknown or out of range.
    """
    options = dict(options)
    replicas = integer("replicas", int(options.pop("replicas", 1)))
    gpus = number("gpus", float(options.pop("gpus", 0)), least=0, most=1024)
    for name in ("host", "port"):
        if name in options:
            raise InputError(f"{name} is Ray Serve's, which listens for all replicas: set it in its http_options")
    for name in ("coordinator", "processes", "process"):
        if name in options:
            raise InputError(f"{name} is for one model over several processes, and a replica is one: leave it out")
    line = []
    for name, value in options.items():
        line += [f"--{name.replace('_', '-')}", *([] if str(value).lower() == "true" else [str(value)])]
    arguments = command.parser("icejax.ray.serving:server").parse_args(line)
    command.check(arguments)
    router = RequestRouterConfig(request_router_class="icejax.ray.router.DocumentRouter")
    models = serve.deployment(Replica).options(
        num_replicas=replicas,
        max_ongoing_requests=2 * arguments.slots,  # beyond this another replica prefills the document too
        max_queued_requests=max(1, arguments.max_queue),
        request_router_config=router,
        ray_actor_options={"num_gpus": gpus},
        graceful_shutdown_timeout_s=arguments.drain_seconds,
    )
    front = serve.deployment(serve.ingress()(Front)).options(max_ongoing_requests=2**16, ray_actor_options={"num_cpus": 0})
    most_bytes = TOKEN_BYTES * (arguments.context_length or POSITIONS) + BODY_BYTES
    return front.bind(models.bind(line), most_bytes)


class Replica:
    """A server of one model, without a socket."""

    def __init__(self, line: list[str]) -> None:
        """Loads the model of a command line of ``icejax serve``, and compiles for it."""
        arguments = command.parser("icejax serve").parse_args(line)
        self._service, start = prepared(arguments, Console(stderr=True, quiet=True))
        self._service.fail = self._fail
        self._failure: BaseException | None = None
        service = self._service
        service.model, service.tokenizer, service.engine = start()
        service.body_limit = TOKEN_BYTES * service.engine.context_length + BODY_BYTES
        service.phase = Phase.READY
        self._app = make_app(service)

    def _fail(self, error: BaseException) -> None:
        self._failure = error

    def check_health(self) -> None:
        """Raises the error of an engine that has failed: Ray Serve then starts another replica."""
        if self._failure is not None:
            raise self._failure

    async def answer(self, document: str, scope: Scope, body: bytes) -> AsyncIterator[dict[str, Any]]:
        """Yields the messages of ASGI that answer a request; a caller that leaves cancels it.

        Args:
            document: as in `document_of`, for the router.
        """
        del document
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        left, parts = asyncio.Event(), iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            part = next(parts, None)
            if part is None:
                await left.wait()
            return part or {"type": "http.disconnect"}

        work = asyncio.create_task(self._app(scope, receive, messages.put))
        work.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
            await work
        finally:
            left.set()


class Front:
    """What stands before the replicas: it reads a body and names its document."""

    def __init__(self, replicas: DeploymentHandle, most_bytes: int) -> None:
        self._replicas, self._most_bytes = replicas.options(stream=True), most_bytes

    def __serve_build_asgi_app__(self) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:  # uvicorn takes a method for ASGI 2
            await self._answer(scope, receive, send)

        return app

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for _ in ("startup", "shutdown"):
                await send({"type": f"{(await receive())['type']}.complete"})
            return
        body, more = bytearray(), True
        while more and len(body) <= self._most_bytes:  # a replica refuses what is too long
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        plain, whole = {name: scope[name] for name in SCOPE if name in scope}, bytes(body)
        stream = self._replicas.answer.remote(document_of(whole), plain, whole)
        try:
            async for message in stream:
                await send(message)
        except BackPressureError:  # the queue before the replicas is full
            failure = ApiError(429, "as many requests wait as --max-queue allows: try again later", code="queue_full")
            await failure.response(path=scope["path"])(scope, receive, send)
        finally:
            stream.cancel()
