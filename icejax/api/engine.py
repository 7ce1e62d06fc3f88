"""An engine for callers that come at any time: one model, one device, one batch whose rows come and go. Python callers use it.

with icejax.Engine(*icejax.load(FOLDER)) as engine:
    first, second = engine.submit("import os"), engine.submit("def f(a):", max_new_tokens=100)
    for piece in first: print(piece.text, end="")
    print(second.result().text)
"""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path
from typing import Any

from icejax.api.choice import batch_choice
from icejax.api.jobs import jobs_of
from icejax.api.prompts import check_context
from icejax.cache.protocol import CachePolicy
from icejax.cache.registry import checked_policy
from icejax.checks.errors import InputError, quoted
from icejax.checks.numbers import integer, is_unicode, number
from icejax.engine.request import Prompt, Request, answer_options, requests
from icejax.engine.serving.core import Core
from icejax.engine.serving.group import FollowingCore, LeadingCore
from icejax.engine.serving.job import CoreSizes
from icejax.engine.serving.scheduler import Load
from icejax.engine.serving.thread import EngineThread, Handle
from icejax.files.atomic_folder import as_path
from icejax.models.decoder import CausalLM
from icejax.runtime import devices, processes
from icejax.runtime.channel import open_channel
from icejax.runtime.mesh import check_one_process, processes_of
from icejax.runtime.processes import LOST_LINE, GroupError


class Engine:
    """Answers the requests of any number of threads, on one device that a thread of the engine owns.

    A request waits until one of `batch_size` rows is free, its prompt is prefilled in units, and its row joins the batch
    between two decode steps of the other rows. As a context it closes at the end. Rows that sample draw the same tokens
    whatever else runs; a cache with pages chooses its pages by when the row joined, so texts may part where two tokens are
    about as likely.

    If several processes share the model, all of them make an engine with the same options. Process 0 takes the requests; the
    others call `follow`.

    Attributes:
        context_length: maximum number of tokens of a prompt and its answer together.
        max_new_tokens: maximum number of tokens of an answer.
        cache_choice: a line that says which cache was chosen and why; None: the caller named one.
        report: the cache and the bytes that it reserves for each row, as in a response's `run`.
        full_kv_bytes: bytes that a full cache takes for `context_length` tokens.
        can_explain: whether a request may ask to `explain`.
        prefill_share: most of the time that prefill may take while other rows decode.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Any,
        *,
        cache: CachePolicy | None = None,
        batch_size: int = 4,
        context_length: int | None = None,
        max_new_tokens: int = 1024,
        device_memory: int | None = None,
        host_memory_limit: int | None = None,
        prefill_share: float = 0.7,
        prefix_memory: int = 2**30,
        prefix_dir: str | Path | None = None,
        prefix_disk: int = 2**36,
        max_queue: int = 256,
    ) -> None:
        """Allocates the cache and starts the thread.

        Args:
            cache: the cache policy; None: `Full()` where it fits the device and is no slower, else `Clustered()`.
            batch_size: rows that decode at once.
            context_length: maximum number of tokens of a prompt and its answer; None: the model's own.
            max_new_tokens: maximum number of tokens of an answer, for which every row has room.
            device_memory: bytes of the device's memory, for the choice of a cache, as in `stream_generate`.
            host_memory_limit: bytes of host memory that the cache may take; None: all free memory.
            prefill_share: most of the time that prefill may take while other rows decode, above 0 and up to 1; with 1 they
                stand still while a prompt is prefilled.
            prefix_memory: bytes of host memory for cached prefixes of earlier prompts; 0: none.
            prefix_dir: a folder for cached prefixes that several prompts share, for later engines; None: they stay in memory.
            prefix_disk: most bytes of all files in that folder.
            max_queue: requests that may wait.

        Raises:
            InputError: an option is out of range, the host has too little memory, the folder cannot be used, or another process
                that shares the model has other options.
            GroupError: such a process has ended, or cannot be reached.
        """
        self._model, self._tokenizer, policy = model, tokenizer, checked_policy(cache)
        self.context_length, limit = check_context(model, context_length), devices.check_limit(host_memory_limit)
        integer("context_length", self.context_length, least=2)  # a token of a prompt and one of its answer
        self.max_new_tokens = min(integer("max_new_tokens", max_new_tokens, most=2**31), self.context_length - 1)
        integer("batch_size", batch_size, most=2**16)
        self.prefill_share = number("prefill_share", prefill_share, least=0, most=1, above=True)
        integer("prefix_memory", prefix_memory, least=0, most=2**60)
        integer("prefix_disk", prefix_disk, least=0, most=2**60)
        folder = None if prefix_dir is None else as_path(prefix_dir)
        if folder is not None and not prefix_memory:
            raise InputError("prefix_dir stores what prefix_memory holds, which is 0: give both, or leave prefix_dir out")
        if folder is not None:
            check_one_process(model.mesh, "an engine with a prefix_dir")
        integer("max_queue", max_queue, most=2**31)
        sizes = CoreSizes(
            places=batch_size,
            prompt_tokens=self.context_length - 1,
            new_tokens=self.max_new_tokens,
            prompts=(self.context_length - 1,) * batch_size,
            joins=True,
            resizes=True,
            prefix_memory=prefix_memory,
            prefix_disk=prefix_disk,
        )
        self.cache_choice = None
        if policy is None:
            asked = dict(batch_size=batch_size, prompt_tokens=sizes.prompt_tokens, new_tokens=sizes.new_tokens, joins=True)
            room = max(0, (devices.pinnable() if limit is None else limit) - prefix_memory)  # for the pages of rows
            choice = batch_choice(model, device_memory=device_memory, host_memory_limit=room, **asked)
            policy, self.cache_choice = choice.policy, choice.reason
        options = dict(host_memory_limit=limit, prefix_dir=folder, share=self.prefill_share, most_waiting=max_queue)
        if processes_of(model.mesh) > 1:
            processes.check_alike("an engine's options or cache", (policy, sizes, options, model.mesh))
            self._thread = _in_group(model, tokenizer, policy, sizes, options)
        else:
            self._thread = EngineThread(lambda: Core(model, tokenizer, policy, sizes, **options), most_waiting=max_queue)
        self.report, token_bytes = self._thread.constants.report, self._thread.constants.token_bytes
        self.full_kv_bytes = token_bytes * self.context_length
        self.can_explain = self.report.host_kv_bytes > 0 and processes_of(model.mesh) == 1
        weakref.finalize(self, self._thread.close)  # a notebook that starts another engine has no memory for two

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, prompt: Prompt | Request, *, n: int = 1, cache_salt: str = "", **options: Any) -> Handle:
        """Puts a prompt into the queue and returns at once; the handle yields the answer's pieces.

        Args:
            prompt: text, token ids, or a `Request` with its own options.
            n: number of answers, whose pieces come mixed, each with its `sample`.
            cache_salt: only prompts of the same salt use each other's caches.
            options: options of `AnswerOptions`, as in `generate`.

        Raises:
            InputError: the prompt is empty or too long, an option is out of range, or it asks for more than `max_new_tokens`.
            RuntimeError: the engine is closed, or has failed.
        """
        if not (isinstance(cache_salt, str) and is_unicode(cache_salt)):
            raise InputError(f"cache_salt must be text, got {quoted(cache_salt)}")
        answer = answer_options(dict(max_new_tokens=min(self.max_new_tokens, 256)) | options)
        prompts = requests(prompt)
        if len(prompts) > 1:
            raise InputError(f"submit takes one prompt, got {len(prompts)}: call it for each")
        jobs = jobs_of(self._model, self._tokenizer, prompts, answer, n=n, context_length=self.context_length)
        asked = jobs[0].options.max_new_tokens
        if asked > self.max_new_tokens:
            raise InputError(
                f"max_new_tokens is {asked} and the engine's rows have room for {self.max_new_tokens}: "
                "ask for fewer, or start an engine with more"
            )
        handle = self._thread.submit([dataclasses.replace(job, salt=cache_salt) for job in jobs])
        handle.engine = self
        return handle

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """The numbers of rows that a decode step may compute, ascending; the last is `batch_size`."""
        return self._thread.sizes

    def follow(self) -> None:
        """Runs what process 0's engine runs, until that closes; in the other processes of a group.

        Raises:
            InputError: this is process 0, or a process alone.
            GroupError: another process has ended, or this one computes other tokens than process 0.
        """
        if not isinstance(self._thread, FollowingCore):
            raise InputError("this engine follows no other: call follow in the processes of a group but process 0")
        self._thread.follow()

    def compile_for(self, size: int) -> None:
        """Has all later steps compute at least `size` rows, so that answers compile the programs of that size; 1 ends it.

        Also compiles what few answers run: the cache packs its newest pages again, and rows move to a batch of another size.
        It waits until no request runs.

        Args:
            size: one of `step_sizes`.

        Raises:
            InputError: steps may not have this size.
            RuntimeError: the engine is closed, or has failed.
        """
        if size not in self.step_sizes:
            raise InputError(f"size must be one of {', '.join(map(str, self.step_sizes))}, got {quoted(size)}")
        self._thread.compile_for(size)

    @property
    def load(self) -> Load:
        """How many requests run and wait, and how much of the cache they have."""
        return self._thread.load

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine; None: it has not failed."""
        return self._thread.failure

    def close(self) -> None:
        """Ends the thread after the present piece of work; requests that are not over raise RuntimeError for their readers."""
        self._thread.close()


def _in_group(
    model: CausalLM, tokenizer: Any, policy: CachePolicy, sizes: CoreSizes, options: dict[str, Any]
) -> EngineThread | FollowingCore:
    """Returns what drives this process's part of an engine over several; all of them call it together."""
    channel = open_channel()

    def make_core() -> Core:
        return Core(model, tokenizer, policy, sizes, **options, agreed=channel.agree)

    try:
        if not channel.is_first:
            return FollowingCore(make_core(), channel, model, tokenizer)
        thread = EngineThread(lambda: LeadingCore(make_core(), channel), most_waiting=options["most_waiting"])
    except BaseException:
        channel.close()
        raise
    channel.watch(lambda: thread.end_with(GroupError(LOST_LINE)))
    return thread
