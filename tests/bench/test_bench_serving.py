"""`bench.serving`: its figures are right for given times, loads keep their number and rate, and every part has its rows."""

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.serving import __main__ as command
from bench.serving import parts, peers
from bench.serving.client import Http, Timed
from bench.serving.page import page
from bench.serving.rows import load_row, slope
from bench.serving.subject import OverHttp, Question, closed_loop, open_loop
from icejax.checks.errors import InputError

TINY = (
    "--parts load,document,batch,prefill,cancel,soak --concurrency 2 --rates 50 --requests 4 --prompt-tokens 30 --answer-tokens 4 "
    "--document-tokens 600 --questions 3 --repeats 1 --cancels 20 --minutes 0.02 -- --cache clustered --warmup 0"
)


class Clerk:
    """Answers with a token after `seconds`, and remembers how many questions were open."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.open, self.most, self.came = seconds, 0, 0, []

    async def answer(self, question: Question) -> Timed:
        self.came.append(asyncio.get_running_loop().time())
        self.open += 1
        self.most = max(self.most, self.open)
        await asyncio.sleep(self.seconds)
        self.open -= 1
        return Timed(0.0, [1.0], 1.0, tokens=1)


def test_figures_follow_from_times():
    answers = [
        Timed(10.0, [10.5, 10.6, 10.9], 11.0, tokens=3, prompt_tokens=20),
        Timed(10.0, [11.5, 11.7], 12.0, tokens=5, prompt_tokens=30),
        Timed(10.0, error="status 500"),
    ]
    row = load_row(answers, 4.0)
    assert (row["completed"], row["failed"], row["total_input_tokens"], row["total_output_tokens"]) == (2, 1, 50, 8)
    assert (row["request_throughput"], row["output_throughput"], row["error"]) == (0.5, 2.0, "status 500")
    assert (row["mean_ttft_ms"], row["median_e2el_ms"]) == (1000.0, 1500.0)
    assert row["mean_tpot_ms"] == pytest.approx((200 + 50) / 2)
    assert row["mean_itl_ms"] == pytest.approx(200) and row["p99_itl_ms"] == pytest.approx(298)
    assert slope([0, 1, 2, 3, 4, 5], [9, 1, 7, 1, 2, 3]) == pytest.approx(60)


def test_a_closed_loop_keeps_its_number_open():
    clerk = Clerk(0.01)
    answers, _ = asyncio.run(closed_loop(clerk, [Question("", 1)] * 10, 3))
    assert (len(answers), clerk.most, clerk.open) == (10, 3, 0)


def test_an_open_loop_waits_for_no_answer():
    clerk = Clerk(0.5)
    answers, duration = asyncio.run(open_loop(clerk, [Question("", 1)] * 40, 200.0))
    assert len(answers) == clerk.most == 40 and duration >= 0.5
    assert 0.05 < clerk.came[-1] - clerk.came[0] < 0.4


def quotient(one: float, other: float):
    """Returns what equals the quotient of two figures; they and it are rounded to four decimals."""
    return pytest.approx(one / other, abs=1e-4 + one / other * 5e-5 * (1 / one + 1 / other))


def test_every_part_has_its_rows(capsys, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")  # the servers run longer than they compile
    assert command.main(TINY.split()) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["subject"], row["part"]) for row in rows] == [
        *[("http", "load")] * 2,
        *[("http", "document")] * 3,
        *[("engine", "load")] * 2,
        ("http / engine", "ratio"),
        *[("http", "batch")],
        *[("http", "prefill")] * 2,
        ("http", "cancel"),
        ("http", "soak"),
    ]
    assert all(row["model"] == "bundled" and row["version"].startswith("icejax ") for row in rows)
    assert len([*page(rows)]) == 26
    for row in rows[:2] + rows[5:7]:
        assert (row["completed"], row["failed"], row["total_output_tokens"]) == (4, 0, 16) and row["p99_itl_ms"] > 0
    assert [row["cached_tokens"] for row in rows[2:5]] == [0, 0, 512]
    ratio, batch, itl, ttft = rows[7:11]
    figures = [row["output_throughput"] for row in (rows[0], rows[5])]
    assert ratio["output_throughput"] == quotient(*figures) and ratio["max_concurrency"] == 2
    assert batch["ratio"] == quotient(batch["batch_tokens_per_s"], batch["one_tokens_per_s"])
    assert itl["gaps"] >= 4 and itl["p99_s"] <= itl["max_s"] and ttft["ratio"] == quotient(ttft["ttft_s"], ttft["alone_s"])
    assert rows[-2]["extents_leaked"] == 0 and rows[-2]["cancels"] == 20 and rows[-2]["free_extents"] > 0
    assert rows[-1]["failed"] == 0 and rows[-1]["rss_end_mib"] > 100 and 0 < rows[-1]["looks"] <= rows[-1]["requests"]


FAKE_LLAMA = """
import http.server, json, threading
from types import SimpleNamespace

class CommonParams(SimpleNamespace):
    def __init__(self):
        super().__init__(model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace())

class Server:
    def __init__(self, params):
        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *given): pass
            def do_GET(self): self.answer(b"")
            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endless = asked["ignore_eos"] and asked["model"] == params.model.path
                usage = dict(completion_tokens=params.n_parallel if endless else 0, prompt_tokens=params.n_ctx)
                self.answer(b"data: " + json.dumps(dict(choices=[dict(text="a")], usage=usage)).encode() + b"\\n\\n")
            def answer(self, body):
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
        server = http.server.HTTPServer(("127.0.0.1", params.port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
"""


def test_a_peer_is_started_with_the_sizes_and_asked_in_its_words(tmp_path, monkeypatch):
    (tmp_path / "xllamacpp.py").write_text(FAKE_LLAMA)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    job, peer = peers.Job(Path("/a/model.gguf"), Path("/a/b"), slots=3, tokens=100, eos=7), peers.PEERS["llama.cpp"]

    async def ask() -> Timed:
        async with peers.running("llama.cpp", sys.executable, job) as server:
            return await OverHttp(server, peer.model(job), False, peer.endless(job)).answer(Question("text", 4))

    answer = asyncio.run(ask())
    assert (answer.error, answer.tokens, answer.prompt_tokens, len(answer.times)) == (None, 3, 300, 1)
    transformers = peers.PEERS["transformers"]
    assert transformers.model(job) == "/a/b" and transformers.endless(job) == {"logit_bias": {"7": -100.0}}


def test_a_peer_that_ends_is_told(monkeypatch):
    with pytest.raises(InputError, match="the server of llama.cpp did not start: "):
        asyncio.run(anext(peers.running("llama.cpp", "false", peers.Job(Path("a.gguf"), Path("b"), 1, 1, 0)).gen))
    with pytest.raises(InputError, match="does not have xllamacpp: expected the Python of an environment that has it"):
        peers.version("llama.cpp", sys.executable)


SETTINGS = dict(model="a", asked=dict(prompt_tokens=512, answer_tokens=64), options="")


def loads(http: float, engine: float, **fields) -> list[dict]:
    """Returns the rows of a run of a load, with the ratio."""
    common = SETTINGS | dict(max_concurrency=4, request_rate=None) | fields
    times = dict(part="load", failed=0, median_ttft_ms=1500.0, median_tpot_ms=20.0)
    rows = [common | times | dict(subject=name, output_throughput=x) for name, x in (("http", http), ("engine", engine))]
    return [*rows, common | dict(part="ratio", subject="http / engine", output_throughput=http / engine)]


def test_the_tables_have_the_figures_of_rows():
    def document(first: float, **fields) -> dict:
        known = dict(mean_ttft_ms=first, cached_tokens=8192, prompt_tokens=8210)
        return SETTINGS | dict(part="document", subject="http", question=3) | known | fields

    rows = [*loads(45.0, 50.0), *loads(60.0, 48.0, options="--slots 2"), document(250.0)]
    assert [*page(rows)] == [
        "### a, prompts of 512 tokens, answers of 64",
        "",
        "|  | 4 open: tokens/s; first token, s; ms per token |",
        "|---|---|",
        "| http | 45.0; 1.50; 20.0 |",
        "| engine | 50.0; 1.50; 20.0 |",
        "| http / engine | 0.90 |",
        "",
        "|  | question 3: first token, s (tokens of a cache) |",
        "|---|---|",
        "| http | 0.25 (8,192 of 8,210) |",
        "",
        "### a, prompts of 512 tokens, answers of 64, `--slots 2`",
        "",
        "|  | 4 open: tokens/s; first token, s; ms per token |",
        "|---|---|",
        "| http | 60.0; 1.50; 20.0 |",
        "| engine | 48.0; 1.50; 20.0 |",
        "| http / engine | 1.25 |",
        "",
    ]
    rows += [*loads(20.0, 40.0), *loads(48.0, 40.0), document(750.0), document(350.0)]
    rows += [row | dict(max_concurrency=None, request_rate=0.5) for row in loads(9.0, 9.0)]
    lines = [*page(rows)]
    assert lines[4:7] == [
        "| http | 45.0; 1.50; 20.0; 3 runs | 9.0; 1.50; 20.0 |",
        "| engine | 40.0; 1.50; 20.0; 3 runs | 9.0; 1.50; 20.0 |",
        "| http / engine | 0.90 (0.50 to 1.20) | - |",
    ]
    assert lines[10] == "| http | 0.35 (8,192 of 8,210); 3 runs |"


def test_a_watcher_that_fails_is_told(monkeypatch):
    monkeypatch.setattr(parts, "SAMPLE_S", 0.01)
    texts = [f"{parts.BYTES} {2**20}\n".encode()]

    class Server:
        async def get(self, path):
            if not texts:
                raise InputError("the server does not answer")
            return texts.pop()

    clerk, questions = Clerk(0.01), SimpleNamespace(random=lambda *_: Question("", 1))
    clerk.server, clerk.look = Server(), clerk.answer
    with pytest.raises(InputError, match="the server does not answer"):
        asyncio.run(parts.soak(clerk, questions, minutes=0.002, most_prompt=1, most_answer=1, concurrency=2))
    assert clerk.open == 0 and len(clerk.came) > 4


def test_a_response_that_is_cut_off_is_told():
    async def ask(sent: bytes) -> bytes:
        def respond(_, writer):
            writer.write(sent)
            writer.close()

        async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
            return await Http(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}").get("/metrics")

    assert asyncio.run(ask(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab")) == b"ab"
    for sent in (b"", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\na", b"no HTTP\r\n\r\n"):
        with pytest.raises(InputError, match=r"http://127.0.0.1:\d+ does not answer: "):
            asyncio.run(ask(sent))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--parts none", "--parts must be of load, document, batch, prefill, cancel, soak, got 'none'"),
        ("--rates fast", "--rates must be numbers, comma-separated, got 'fast'"),
        ("--rates 0", "--rates must be a number above 0 and at most 1e+06, got 0.0"),
        ("--against https://a", "--against must be NAME=http://HOST:PORT, got 'https://a'"),
        (
            "--peer vllm=python",
            "--peer must be NAME=PYTHON, of llama.cpp, transformers and a Python that has its package, got 'vllm",
        ),
        (f"--peer transformers={sys.executable}", "--peer needs a --model of smollm2-135m, "),
        ("--page nowhere.jsonl", "No such file or directory: 'nowhere.jsonl'"),
        (
            "--parts prefill --document-tokens 512",
            "--parts prefill needs more --document-tokens than --prompt-tokens, got 512 and 512",
        ),
        ("--requests 0", "--requests must be at least 1, got 0"),
        ("--minutes 0", "--minutes must be a number above 0 and at most 1e+06, got 0.0"),
    ],
)
def test_a_bad_option_is_told(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        command.main(arguments.split())
    assert ended.value.code == 2 and message in capsys.readouterr().err
