"""`/openapi.json` describes the routes that exist, and no body that it allows makes the server fail."""

import re
import shutil
import subprocess

import pytest

import icejax
from icejax.serving.app import make_app
from icejax.serving.routes.page import PATHS
from icejax.serving.routes.schema import description
from icejax.serving.schemas import CompletionRequest
from icejax.serving.service import Service
from tests.helpers.server import live

SCHEMATHESIS = shutil.which("schemathesis")


def test_all_routes_and_fields_are_described():
    routes = [route for route in make_app(Service(names=("m",), root="m"))._app.routes if route.path not in PATHS]
    told = {(method, path) for path, methods in description()["paths"].items() for method in methods}
    posts = {("post", route.path) for route in routes if "POST" in (route.methods or ())}
    gets = {("get", route.path.replace(":path", "")) for route in routes if "GET" in (route.methods or ())}
    assert told == posts | gets
    schemas = description()["components"]["schemas"]
    assert {*schemas["CompletionRequest"]["properties"]} == {*CompletionRequest.model_fields}
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    assert {*re.findall(r"#/components/schemas/(\w+)", str(description()))} <= {*schemas}


def test_a_server_has_it(server):
    assert server.ask("/openapi.json")["openapi"] == "3.1.0"


@pytest.mark.slow
@pytest.mark.skipif(SCHEMATHESIS is None, reason="schemathesis is not installed: its command must be in PATH")
def test_schemathesis_never_sees_a_500(chatty, tmp_path):
    def start():
        return *chatty, icejax.Engine(*chatty, cache=icejax.Full(), batch_size=2, context_length=64, max_new_tokens=2)

    with live(Service(names=("m",), root="m", places=2), start) as server:
        url = f"http://127.0.0.1:{server.port}/openapi.json"
        options = ["--checks", "not_a_server_error", "--max-examples", "40", "--seed", "1", "--phases", "fuzzing"]
        command = [SCHEMATHESIS, "run", url, *options]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
        assert int(re.search(r"(\d+) generated", ran.stdout)[1]) > 100
        assert server.ask("/health")["status"] == "ok" and server.service.open_answers == 0
