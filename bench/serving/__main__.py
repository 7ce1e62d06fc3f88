"""A server as its clients see it: ``python -m bench.serving --model smollm2-135m``.

Parts, each a JSON line per row, with figures under the names of vLLM's `benchmarks/serve.py`:

- `load`: 1, 4 and 8 requests open at once (`--concurrency`), and requests that come at random times (`--rates`, per second), to
  `icejax serve` (`http`), to an engine in this process with the same options (`engine`) and to other servers. `ratio` rows, of
  requests open at once alone: output tokens per second over HTTP by those of the engine, whose bar is 0.9
- `document`: four questions about one document, one after another: time to the first token, tokens from the prefix store
- `cancel`: clients that leave at random times, and the extents that are then missing: `extents_leaked` must be 0
- `batch`, a bar of `bench.engine`: tokens per second of streams that decode together, over those of one stream of a server with
  one slot
- `prefill`, two more: a prompt of `--document-tokens` comes beside four streams
- `soak`: random requests for `--minutes`, one of four as the page sends it (with `explain`, where the cache has pages), and the
  server's memory at the start, at the end and per hour

`compiled_after_warmup`, the programs that the server compiled while a row was measured, must be 0. Every row follows requests
that are not timed. Prompts are source code and differ in their first line, so that no prefix is shared. Answers are greedy and
have `--answer-tokens` tokens where the server knows `ignore_eos`. Servers run one after another. What follows `--` are options
of `icejax serve`.

`--peer NAME=PYTHON` starts another server (`bench.serving.peers`) with the Python of an environment that has its package.
icejax then serves the GGUF file of the model, a name of `bench.published`, as llama.cpp does. `--against NAME=URL` asks a
server that the caller has started. `--page ROWS.jsonl` prints the tables of such rows, and medians of repeated rows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import jax
import psutil

from bench import published
from bench.engine.bars import Bar
from bench.flags import listed, numbers
from bench.serving import bars, parts, peers
from bench.serving.client import Http, metric, model_of, served
from bench.serving.page import RATIO, page
from bench.serving.subject import OverHttp, Questions, Subject, in_process
from icejax import __version__
from icejax.api.generate import ASSETS
from icejax.checkpoint.folder import resolve
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer, number
from icejax.runtime import devices
from icejax.text.tokenizer import load_tokenizer

PARTS = ("load", "document", "batch", "prefill", "cancel", "soak")
HTTP_BAR = Bar(0.9, is_least=True)
ROOM = 256  # tokens of the context for a chat template and a document's questions


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="a folder, or a name of bench.published (default: the bundled model)")
    parser.add_argument("--parts", default="load,document", help=f"of {', '.join(PARTS)} (default: %(default)s)")
    parser.add_argument("--against", action="append", default=[], metavar="NAME=URL", help="another server; repeatable")
    text = f"of {', '.join(peers.PEERS)}, to start and to ask; repeatable"
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help=text)
    parser.add_argument("--page", type=Path, metavar="FILE.jsonl", help="only print the tables of these rows")
    parser.add_argument("--concurrency", default="1,4,8", metavar="N,N", help="default: %(default)s")
    parser.add_argument("--rates", default="", metavar="X,X", help="requests per second (default: none)")
    sizes = dict(requests=(32, "requests of a row of `load`"), prompt_tokens=(512, "of `load`, and most of random ones"))
    sizes |= dict(answer_tokens=(64, "of `load`, and most of random ones"), document_tokens=(8192, "of `document`"))
    sizes |= dict(questions=(4, "of `document`"), cancels=(1000, "clients that leave"), repeats=(2, "timed rounds of a bar"))
    for name, (default, text) in sizes.items():
        flag, line = f"--{name.replace('_', '-')}", f"{text} (default: %(default)s)"
        parser.add_argument(flag, type=int, default=default, metavar="N", help=line)
    parser.add_argument("--minutes", type=float, default=60.0, metavar="X", help="of `soak` (default: %(default)s)")
    parser.add_argument("serve", nargs="*", metavar="-- OPTION", help="options of icejax serve")
    return parser


class Bench:
    """The parts, on one model."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Raises InputError for an option that is out of range, before anything is loaded."""
        self.asked, self.names = arguments, listed("--parts", arguments.parts, PARTS)
        self.concurrency = numbers("--concurrency", arguments.concurrency) if arguments.concurrency else []
        self.rates = _rates(arguments.rates)
        for name in ("requests", "prompt_tokens", "answer_tokens", "document_tokens", "questions", "cancels", "repeats"):
            integer(f"--{name.replace('_', '-')}", getattr(arguments, name), most=2**30)
        number("--minutes", arguments.minutes, least=0, most=1e6, above=True)
        if "prefill" in self.names and arguments.document_tokens <= arguments.prompt_tokens:
            sizes = f"{arguments.document_tokens} and {arguments.prompt_tokens}"
            raise InputError(f"--parts prefill needs more --document-tokens than --prompt-tokens, got {sizes}")
        self.against = [_named(text) for text in arguments.against]
        asked = [peers.asked_peer(text) for text in arguments.peer]
        if asked and arguments.model not in published.MODELS:
            raise InputError(f"--peer needs a --model of {', '.join(published.MODELS)}, got {arguments.model or 'none'!r}")
        self.peers = [(name, python, peers.version(name, python)) for name, python in asked]
        folder, file = arguments.model or None, None
        if folder in published.MODELS:
            say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
            folder, file = published.folder(folder, say=say), published.gguf(folder, say=say) if asked else None
        self.tokenizer = load_tokenizer(resolve(file or folder) if folder else ASSETS)
        self.is_chat, self.questions = self.tokenizer.chat_template is not None, Questions(self.tokenizer)
        longest = max(arguments.prompt_tokens, arguments.document_tokens if {"document", "prefill"} & set(self.names) else 0)
        sizes = dict(slots=max(self.concurrency, default=8), context_length=longest + arguments.answer_tokens + ROOM)
        if asked:
            self.job = peers.Job(file, folder, sizes["slots"], sizes["context_length"], self.tokenizer.eos_token_id)
        sizes |= dict(max_new_tokens=arguments.answer_tokens, warmup=arguments.prompt_tokens + ROOM)
        flags = [part for name, value in sizes.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        self.options = [*([] if folder is None else ["--model", str(file or folder)]), *flags, *arguments.serve]

    async def run(self) -> AsyncIterator[dict]:
        """Yields all rows."""
        asked, rates = self.asked, dict[int, dict[str, float]]()
        if {"load", "document"} & set(self.names):
            with served(self.options) as server:
                async for row in self._of_server("http", OverHttp(server, await model_of(server), self.is_chat)):
                    _note(rates, row)
                    yield row
        if "load" in self.names:
            with in_process(self.options) as engine:
                async for row in self._loads(engine):
                    _note(rates, row := dict(subject="engine") | row)
                    yield row
            for most, both in rates.items():
                ratio = both["http"] / both["engine"]
                common = dict(subject=RATIO, part="ratio", max_concurrency=most, request_rate=None)
                yield common | dict(output_throughput=round(ratio, 4), bar=str(HTTP_BAR), holds=HTTP_BAR.holds(ratio))
        for name, server in self.against:
            other = OverHttp(server, await model_of(server), self.is_chat)
            async for row in self._all(other):
                yield dict(subject=name) | row
        for name, python, version in self.peers if {"load", "document"} & set(self.names) else ():
            async with peers.running(name, python, self.job) as server:
                peer = peers.PEERS[name]
                other = OverHttp(server, peer.model(self.job), self.is_chat, peer.endless(self.job))
                async for row in self._all(other):
                    yield dict(subject=name, version=version) | row
        sizes = dict(prompt_tokens=asked.prompt_tokens, answer_tokens=asked.answer_tokens, repeats=asked.repeats)
        if "batch" in self.names:
            yield dict(subject="http") | await self._batch(**sizes)
        if "prefill" in self.names:
            async for row in self._prefill(**sizes):
                yield dict(subject="http") | row
        random = dict(most_prompt=asked.prompt_tokens, most_answer=asked.answer_tokens)
        if "cancel" in self.names:
            with served([*self.options, "--prefix-memory", "0"]) as server:
                subject = OverHttp(server, await model_of(server), self.is_chat)
                yield dict(subject="http") | await parts.cancels(subject, self.questions, count=asked.cancels, **random)
        if "soak" in self.names:
            with served(self.options) as server:
                subject = OverHttp(server, await model_of(server), self.is_chat)
                before = await metric(server, parts.PROGRAMS)
                random |= dict(minutes=asked.minutes, concurrency=max(self.concurrency, default=8))
                row = await parts.soak(subject, self.questions, **random)
                compiled = int(await metric(server, parts.PROGRAMS) - before)
                yield dict(subject="http") | row | dict(compiled_after_warmup=compiled)

    async def _of_server(self, name: str, subject: OverHttp) -> AsyncIterator[dict]:
        """Yields the rows of icejax's own server, with what it compiled since questions about another document."""
        if "document" in self.names:
            sizes = dict(tokens=self.asked.document_tokens, answer_tokens=self.asked.answer_tokens, asked=2)
            _ = [row async for row in parts.document(subject, self.questions, **sizes)]
        before = await metric(subject.server, parts.PROGRAMS)
        async for row in self._all(subject):
            now = await metric(subject.server, parts.PROGRAMS)
            yield dict(subject=name) | row | dict(compiled_after_warmup=int(now - before))
            before = now

    async def _batch(self, **sizes: int) -> dict:
        """Returns the row of two servers that store no prefixes, of which one has one slot."""
        # All prompts are prefilled before the first step, so the streams decode together from their first token on.
        together = [*self.options, "--prefix-memory", "0", "--prefill-share", "1"]
        with served([*together, "--slots", "1"]) as one, served(together) as several:
            both = [OverHttp(server, await model_of(server), self.is_chat) for server in (one, several)]
            return await bars.batch(*both, self.questions, rows=max(self.concurrency, default=8), **sizes)

    async def _prefill(self, **sizes: int) -> AsyncIterator[dict]:
        slots, longest = max(bars.ROWS + 1, *self.concurrency), self.asked.document_tokens
        with served([*self.options, "--slots", str(slots), "--prefix-memory", "0", "--max-new-tokens", str(longest)]) as server:
            subject = OverHttp(server, await model_of(server), self.is_chat)
            async for row in bars.prefill(subject, self.questions, long_prompt=longest, **sizes):
                yield row

    async def _all(self, subject: Subject) -> AsyncIterator[dict]:
        if "load" in self.names:
            async for row in self._loads(subject):
                yield row
        if "document" in self.names:
            sizes = dict(tokens=self.asked.document_tokens, answer_tokens=self.asked.answer_tokens, asked=self.asked.questions)
            async for row in parts.document(subject, self.questions, **sizes):
                yield row

    def _loads(self, subject: Subject) -> AsyncIterator[dict]:
        sizes = dict(count=self.asked.requests, prompt_tokens=self.asked.prompt_tokens, answer_tokens=self.asked.answer_tokens)
        return parts.loads(subject, self.questions, concurrency=self.concurrency, rates=self.rates, **sizes)


def _note(rates: dict[int, dict[str, float]], row: dict) -> None:
    if row["part"] == "load" and row["request_rate"] is None:  # at a rate of requests, throughput is that of the rate
        rates.setdefault(row["max_concurrency"], {})[row["subject"]] = row["output_throughput"]


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",") if part]
    except ValueError:
        raise InputError(f"--rates must be numbers, comma-separated, got {text!r}") from None
    return [number("--rates", rate, least=0, most=1e6, above=True) for rate in rates]


def _named(text: str) -> tuple[str, Http]:
    name, sign, url = text.partition("=")
    if not (name and sign and url.startswith("http://")):
        raise InputError(f"--against must be NAME=http://HOST:PORT, got {text!r}")
    return name, Http(url.rstrip("/").removesuffix("/v1"))


async def _print(bench: Bench, labels: dict) -> None:
    async for row in bench.run():
        print(json.dumps(labels | row), flush=True)


def main(argv: list[str] | None = None) -> int:
    command = parser()
    arguments = command.parse_args(argv)
    try:
        if arguments.page is not None:
            print(*page([json.loads(line) for line in arguments.page.read_text().splitlines()]), sep="\n")
            return 0
        bench = Bench(arguments)
        versions = f"icejax {__version__}, jax {jax.__version__}"
        labels = dict(model=Path(arguments.model).name or "bundled", device=devices.device_name(), cores=psutil.cpu_count())
        labels |= dict(version=versions)
        sizes = dict(prompt_tokens=arguments.prompt_tokens, answer_tokens=arguments.answer_tokens)
        asyncio.run(_print(bench, labels | dict(asked=sizes, options=" ".join(arguments.serve))))
    except (InputError, OSError) as error:
        command.exit(2, f"{command.prog}: error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
