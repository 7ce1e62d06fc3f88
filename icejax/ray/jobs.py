"""Many models on a Ray cluster: lines of a prompt file, or requests of an evaluation, spread over actors with a model each.

``icejax generate --ray`` and ``icejax evaluate --ray`` call it; it needs the extra `ray`. The driver alone writes answers, each
as soon as it comes, and Ray runs the work of an actor that died again, so every line is answered once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import math
import os
import pickle
import re
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import ray
import ray.data
from ray.data.exceptions import ExecutionTimeoutError
from rich.console import Console

from icejax.api.generate import generate
from icejax.cache.protocol import CachePolicy
from icejax.checks.errors import InputError
from icejax.commands.loading import load
from icejax.commands.many.answerer import Answerer
from icejax.commands.many.lines import Line
from icejax.engine.request import Request
from icejax.engine.response import GenerationResponse
from icejax.runtime.out_of_memory import report_out_of_memory

MOST_ROUNDS = 16  # times --batch-size: the most rows that an actor has at once, and answers again if it dies
LEAST_PIECES = 4  # of the rows of an actor, so that all end at about the same time
CONNECT_S = 10.0  # seconds in which a cluster must be reached
PIECE_S = 86_400.0  # seconds without an answer after which a run ends: a line may kill each process that has it
Batch = dict[str, np.ndarray]


class Worker:
    """An actor with a model. A refusal of bad input is an answer, because Ray would run the work again."""

    def __init__(self, arguments: argparse.Namespace, *more: Any) -> None:
        try:
            self.start(arguments, *more)
            self._refusal = None
        except InputError as error:
            self._refusal = str(error)

    def start(self, arguments: argparse.Namespace, *more: Any) -> None:
        """Loads what `answer` needs."""
        raise NotImplementedError

    def answer(self, rows: list[Any]) -> Iterable[Any]:
        """Returns the answers to some rows, each as soon as it has ended."""
        raise NotImplementedError

    def __call__(self, batch: Batch) -> Batch:
        """Answers a batch of rows, whose values are pickled as the answers are."""
        refusal, answers = self._refusal, list[bytes]()
        if refusal is None:
            try:
                with report_out_of_memory("use a smaller --batch-size, or a smaller cache", None):
                    answers.extend(pickle.dumps(answer) for answer in self.answer([pickle.loads(row) for row in batch["row"]]))
            except InputError as error:
                refusal = str(error)
        refusals = [""] * len(answers)
        if refusal is not None:  # after the answers before it
            answers.append(b"")
            refusals.append(refusal)
        return {"answer": np.array(answers, object), "refusal": np.array(refusals, object)}


class LineWorker(Worker):
    """Answers lines of a prompt file."""

    def start(self, arguments: argparse.Namespace, *_: Any) -> None:
        self._answerer = Answerer(arguments, Console(stderr=True, quiet=True))

    def answer(self, rows: list[Line]) -> Iterator[tuple[Line, str]]:
        return ((line, json.dumps(fields)) for line, fields in self._answerer.answers(rows))


class RequestWorker(Worker):
    """Answers requests of an evaluation."""

    def start(self, arguments: argparse.Namespace, *more: Any) -> None:
        self._policy, self._options = more
        self._model, self._tokenizer = load(arguments, Console(stderr=True, quiet=True))

    def answer(self, rows: list[tuple[int, Request]]) -> list[GenerationResponse]:
        requests = [request for _, request in rows]
        responses = generate(self._model, self._tokenizer, requests, cache=self._policy, **self._options)
        return [dataclasses.replace(response, row=rows[response.row][0]) for response in responses]


def answers(arguments: argparse.Namespace, lines: Sequence[Line]) -> Iterator[tuple[Line, dict[str, Any]]]:
    """Yields each line of --prompt-file and its answer, in any order; errors are those of `spread`."""
    for line, fields in spread(LineWorker, lines, arguments):
        yield line, json.loads(fields)


def responses(
    arguments: argparse.Namespace, requests: Sequence[Request], *, cache: CachePolicy, **options: Any
) -> Iterator[GenerationResponse]:
    """Yields the whole answer to each request, in any order; `options` are those of `generate`, errors those of `spread`."""
    yield from spread(RequestWorker, list(enumerate(requests)), arguments, cache, options)


def spread(kind: type[Worker], rows: Sequence[Any], arguments: argparse.Namespace, *more: Any) -> Iterator[Any]:
    """Yields the answers of actors on the cluster of --ray to rows, as they come.

    Args:
        kind, more: the class of the actors, and further arguments of its `start`.

    Raises:
        InputError: no cluster answers, it has no room for an actor, or an actor refuses a row or the model.
    """
    with _cluster(arguments.ray):
        share = _share(arguments)
        count = min(_workers(arguments, share), len(rows))
        size = math.ceil(len(rows) / (count * LEAST_PIECES))
        size = min(max(size, arguments.batch_size), MOST_ROUNDS * arguments.batch_size)
        items = [{"row": pickle.dumps(row)} for row in rows]
        done = ray.data.from_items(items, override_num_blocks=math.ceil(len(rows) / size)).map_batches(
            kind,
            fn_constructor_args=(arguments, *more),
            batch_size=size,
            batch_format="numpy",
            compute=ray.data.ActorPoolStrategy(size=count, max_tasks_in_flight_per_actor=1),
            **share,
        )
        for found in _rows(done):
            if found["refusal"]:
                raise InputError(found["refusal"])
            yield pickle.loads(found["answer"])


def _rows(done: ray.data.Dataset) -> Iterator[dict[str, Any]]:
    try:
        yield from done.iter_rows()
    except ExecutionTimeoutError:
        raise InputError(f"no actor has ended its lines within {PIECE_S / 3600:g} hours: use a smaller --batch-size") from None


@contextlib.contextmanager
def _cluster(address: str) -> Iterator[None]:
    """Connects to a cluster while the block runs; `local` starts one on this machine."""
    if sys.modules.get("torch", ray) is None:  # Ray reads its attributes
        del sys.modules["torch"]
    _check_address(address)
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # else Ray writes between the lines of the command
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # some are plain ones
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"no Ray cluster can be had at --ray {address}: {reason}") from None
    signal.signal(signal.SIGTERM, on_terminate)  # Ray has set its own
    try:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = context.print_on_execution_start = False
        context.execution_no_progress_timeout_s = PIECE_S
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raises InputError if nothing listens at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address in ("auto", "local"):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(f"--ray {address} is no Ray cluster ({error}): expected HOST:PORT, auto or local") from None


def _share(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the resources of an actor: a device, or as many as --mesh names; a core where it has no devices."""
    devices = math.prod(map(int, re.findall(r"=(\d{1,4})\b", arguments.mesh or "")))  # an actor checks --mesh
    resources = ray.cluster_resources()
    if resources.get("GPU"):
        return dict(num_gpus=devices)
    return dict(resources={"TPU": devices}, num_cpus=1) if resources.get("TPU") else dict(num_cpus=1)


def _workers(arguments: argparse.Namespace, share: dict[str, Any]) -> int:
    """Returns how many actors there are: --ray-workers, else as many as have room by devices, or one on each machine.

    Raises:
        InputError: no machine has the devices of an actor.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    needs = {"GPU": share.get("num_gpus", 0)} | share.get("resources", {})
    for name, count in needs.items():
        most = max((node.get(name, 0) for node in nodes), default=0)
        if count > most:
            raise InputError(f"a machine has at most {most:g} {name}s and a model needs {count}: lower --mesh")
    if arguments.ray_workers is not None:
        return arguments.ray_workers
    for name, count in needs.items():
        if count:
            return sum(int(node.get(name, 0) // count) for node in nodes)
    return max(1, sum(node.get("CPU", 0) >= 1 for node in nodes))
