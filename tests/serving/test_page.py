"""The page at `/`, without a browser: its routes, headers and files, what `/v1/icejax` says, and the field `explain`."""

import dataclasses
import re

import numpy as np
import pytest

from icejax.engine.response import Attention, RunReport
from icejax.serving.routes import page
from icejax.serving.service import Service
from tests.helpers.server import live, read_events
from tests.serving.test_lifecycle import MODEL, Engine, piece

REPORT = RunReport(
    cache="clustered",
    budget=64,
    device_kv_bytes=1000,
    digest_bytes=200,
    host_kv_bytes=5000,
    fetch_backend="gather",
    device="cpu",
    dtype="float32",
)
PICTURE = Attention((1, 3), 4, 2, np.asarray([[0, 0.123456789, 0, 2], [1, 0, 0, 1e-9]]))


@pytest.fixture
def engine() -> Engine:
    engine = Engine()
    engine.report, engine.full_kv_bytes, engine.can_explain = REPORT, 7000, True
    return engine


def served(engine: Engine, **options):
    return live(Service(names=("m",), root="m", **options), lambda: (MODEL, None, engine))


def test_the_page_needs_no_key_and_lets_nothing_else_in(engine):
    with served(engine, keys=("sk-1",)) as server:
        for path, name in page.PATHS.items():
            response = server.send(path)
            assert response.status == 200 and response.read() == (page.FOLDER / name).read_bytes()
            policy = response.headers["content-security-policy"]
            assert policy.startswith("default-src 'self';") and "unsafe" not in policy and "http" not in policy
            assert response.headers["x-content-type-options"] == "nosniff" and response.headers["cache-control"] == "no-cache"
        assert server.send("/").headers["content-type"] == "text/html; charset=utf-8"
        assert server.send("/page/main.js").headers["content-type"] == "text/javascript; charset=utf-8"
        for path in ("/page/", "/page/../app.py", "/page/main.py", "/page/index.html/", "//"):
            assert server.send(path).status == 401
            assert server.send(path, Authorization="Bearer sk-1").status == 404
        assert server.send("/v1/icejax").status == 401
        assert server.send("/", {}, Authorization="Bearer sk-1").status == 405


def test_the_page_tells_of_the_cache(engine):
    with served(engine) as server:
        response = server.send("/v1/icejax")
        assert response.headers["cache-control"] == "no-store"
        expected = dict(model="m", has_chat_template=False, context_length=100, max_new_tokens=10, cache="clustered", budget=64)
        assert server.ask("/v1/icejax") == expected | dict(
            device_bytes=1200, host_bytes=5000, full_bytes=7000, can_explain=True
        )
        engine.can_explain = False
        assert not server.ask("/v1/icejax")["can_explain"]


def test_files_name_no_other_host_and_no_html_comes_from_text():
    names = {file.name: file.read_text() for file in page.FOLDER.iterdir()}
    assert {*names} == {*page.PATHS.values()} and sum(map(len, names.values())) < 60_000
    for name, text in names.items():
        for address in re.findall(r"[\w+.-]*:?//[^\s\"']+\.[^\s\"']+", text):
            assert address == "http://www.w3.org/2000/svg", (name, address)  # a namespace, which nobody asks for
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\bFunction\(|localStorage", text
        ), name
    html = names["index.html"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script>", html)  # the policy would refuse them
    for field in re.findall(r"<(?:input|textarea)[^>]*\bid=\"([\w-]+)\"", html):
        assert f'for="{field}"' in html or re.search(
            rf"<label[^>]*><input[^>]*id=\"{field}\"|id=\"{field}\"[^>]*aria-hidden", html
        )


@pytest.mark.parametrize("path, body", [("/v1/completions", dict(prompt="x")), ("/v1/chat/completions", dict(messages=[]))])
def test_several_answers_are_not_explained(engine, path, body):
    with served(engine) as server:
        error = server.refusal(path, body | dict(explain=True, n=2))
        assert error["message"] == "explain is of one answer, and n is 2: leave n out" and error["param"] == "explain"
        assert server.refusal(path, body | dict(explain="yes"))["param"] == "explain"
    assert engine.asked == []


def test_an_answer_tells_what_it_looks_at_if_asked(engine):
    told = dict(prompt_tokens=4, steps=2, layers=[1, 3], weights=[[0, 0.12346, 0, 2], [1, 0, 0, 0]])
    with served(engine) as server:
        for explain in (True, None):
            response = server.send("/v1/completions", dict(prompt="x", explain=explain, stream=True))
            engine.handles[-1].give(dataclasses.replace(piece("a"), attention=PICTURE if explain else None))
            engine.handles[-1].give(piece("b", "stop"))
            first, second = (event["choices"][0] for event in read_events(response.read()))
            assert first.get("attention") == (told if explain else None) and "attention" not in second
        assert [request.explain for request, _ in engine.asked] == [True, False]
