"""`/health`, `/metrics`, `/v1/models` and `/v1/icejax`: what routers, dashboards and clients ask before they ask a question."""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from icejax import __version__
from icejax.serving.errors import RETRY_S
from icejax.serving.service import Phase, Service
from icejax.serving.streaming import json_response


async def health(request: Request) -> Response:
    """Says whether the server takes requests: 200 or 503, with how busy it is."""
    service: Service = request.app.state.service
    service.look_at_engine()
    value: dict[str, Any] = dict(status="ok" if service.phase is Phase.READY else service.phase.value)
    if service.engine is not None:
        load = service.engine.load
        value |= dict(running=load.running, waiting=load.waiting, cache_used=round(load.used, 4), works=load.works)
    response = json_response(value, 200 if service.phase is Phase.READY else 503)
    if service.phase is not Phase.READY:
        response.headers["Retry-After"] = str(RETRY_S)
    return response


async def metrics(request: Request) -> Response:
    """Returns the metrics for Prometheus."""
    service: Service = request.app.state.service
    if service.engine is None:
        service.check_ready()
    return Response(service.metrics.text(service.engine.load), headers={"content-type": CONTENT_TYPE_LATEST})


async def models(request: Request) -> Response:
    """Lists the names that requests know the model by; `models` is there for Codex, which expects the key."""
    service: Service = request.app.state.service
    service.check_ready()
    return json_response(dict(object="list", data=[_model(service, name) for name in service.names], models=[]))


async def model(request: Request) -> Response:
    """Describes one model."""
    service: Service = request.app.state.service
    service.check_ready()
    return json_response(_model(service, service.check_model(request.path_params["name"])))


async def about(request: Request) -> Response:
    """Describes the model and its cache: what the page at `/` shows. Bytes are those that an answer's place reserves."""
    service: Service = request.app.state.service
    service.check_ready()
    engine, report = service.engine, service.engine.report
    model = dict(model=service.names[0], has_chat_template=bool(getattr(service.tokenizer, "chat_template", None)))
    sizes = dict(context_length=engine.context_length, max_new_tokens=engine.max_new_tokens)
    cache = dict(cache=report.cache, budget=report.budget, device_bytes=report.device_kv_bytes + report.digest_bytes)
    cache |= dict(host_bytes=report.host_kv_bytes, full_bytes=engine.full_kv_bytes, can_explain=engine.can_explain)
    response = json_response(model | sizes | cache)
    response.headers["Cache-Control"] = "no-store"
    return response


async def version(request: Request) -> Response:
    """Returns icejax's version."""
    return json_response(dict(version=__version__))


def _model(service: Service, name: str) -> dict[str, Any]:
    common = dict(object="model", created=service.created, owned_by="icejax", root=service.root, parent=None)
    return dict(id=name, **common, max_model_len=service.engine.context_length)
