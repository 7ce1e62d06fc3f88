"""A session in a folder: `session.json` describes it, `arrays` holds its arrays' bytes one after another.

`Session` and the commands call this. The description holds the name, dtype, shape and checksum of each array, so that arrays
can be verified without a model, and its own checksum. Nothing is allocated before the arrays' names, dtypes and shapes match
what this model, cache and length need. Arrays under `kept.` are skipped: later versions may store optional states there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import stat
import typing
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from icejax.cache.pool import allocation
from icejax.cache.pool.extents import table_for
from icejax.cache.pool.host_pool import Pool
from icejax.cache.protocol import CachePolicy, KVCache
from icejax.checks.errors import InputError
from icejax.checks.json_file import MOST_BYTES
from icejax.checks.numbers import POSITIONS
from icejax.engine.plan import Plan
from icejax.engine.snapshot.array_names import named_arrays
from icejax.engine.snapshot.fingerprint import check_same, damaged, fingerprint, policy_of
from icejax.engine.snapshot.row_arrays import (
    Kinds,
    array_out,
    arrays_in,
    cache_kinds,
    empty_cache,
    pages_in,
    pages_out,
    pool_kinds,
    saved_extents,
)
from icejax.engine.snapshot.stored_arrays import ArrayFile, ArrayWriter, StoredArray, described_arrays
from icejax.engine.trim import Joint, fits, is_joint
from icejax.files.atomic_folder import current_folder
from icejax.models.decoder import CausalLM
from icejax.session.messages import is_chat, is_template_variables

VERSION = 16
ABOUT, ARRAYS = "session.json", "arrays"
TOKENS = "token_ids"


@dataclass(frozen=True, kw_only=True)
class SessionInfo:
    """The description of a session, without its arrays and fingerprint.

    Attributes:
        context_length: maximum number of tokens of the session.
        first: number of tokens of the first text.
        tokens: number of tokens so far.
        pages: number of pool pages that are saved: all pages before the next page to fill.
        started: unix time when the session began, in seconds.
        messages: the chat so far, each message with a role and a content, and perhaps reasoning.
        outdated: whether the cache holds what the messages leave out, so that it cannot be continued.
        joints: tokens and page of each place at which the cache can end.
        template_variables: tools and arguments of the chat template, from `chat_messages.template_variables`.
        room: tokens that the cache has room for before the session moves to another cache; None: as many as the context.
    """

    context_length: int
    first: int
    tokens: int
    pages: int
    started: float
    messages: list[dict[str, str]]
    outdated: bool = False
    joints: list[list[int]] = dataclasses.field(default_factory=list)
    template_variables: dict[str, Any] = dataclasses.field(default_factory=dict)
    room: int | None = None

    @property
    def moves(self) -> bool:
        """Whether the session moves to another cache when it has more tokens."""
        return self.room is not None


def write(
    part: Path, identity: dict[str, Any], about: SessionInfo, token_ids: Sequence[int], cache: KVCache, pool: Pool | None, *,
    plan: Plan,
) -> None:  # fmt: skip
    """Writes a session into the empty folder `part`; `identity` is its fingerprint, `plan` that of its cache."""
    with open(part / ARRAYS, "wb") as file:
        writer = ArrayWriter(file)
        writer.write(TOKENS, np.asarray(token_ids, np.int32))
        for (name, leaf), saved in zip(
            named_arrays(replace(cache, table=None)), jax.tree.leaves(empty_cache(plan)), strict=True
        ):
            writer.write(f"cache.{name}", array_out(leaf, saved, plan))
        if pool is not None:
            for (name, count), extent in zip(saved_extents(about.pages), np.asarray(cache.table)[0], strict=False):
                for piece, pages in pages_out(pool, extent, name, count, plan=plan):
                    writer.write(piece, pages)
    fields = dict(version=VERSION, identity=identity, **dataclasses.asdict(about), arrays=writer.described)
    (part / ABOUT).write_text(json.dumps(fields | {"checksum": _checksum(fields)}))


@dataclass(frozen=True)
class StoredSession:
    """A saved session whose description has been read and whose arrays have not.

    Attributes:
        identity: its fingerprint, from `fingerprint`.
        arrays: descriptions of the arrays by name, in the order in which they are stored.
    """

    path: Path
    about: SessionInfo
    identity: dict[str, Any]
    arrays: dict[str, StoredArray]

    @property
    def policy(self) -> CachePolicy:
        """The session's cache policy; InputError if this version cannot make it."""
        return policy_of(self.path, self.identity)

    def context_for(self, context_length: int | None) -> int:
        """Returns the context length to continue with, None being the saved one; InputError for another one of plain text."""
        length = self.about.context_length
        if context_length not in (None, length) and not self.about.messages:
            raise InputError(f"{self.path} holds plain text, whose context length of {length} stays: leave context_length out")
        return length if context_length is None else context_length

    def read(self, plan: Plan, *, vocab_size: int, host_memory_limit: int | None) -> tuple[list[int], KVCache, Pool | None]:
        """Returns the tokens, the device part of the cache, and the pool.

        Args:
            plan: the plan of the session.
            host_memory_limit: bytes of host memory that the pool may take; None: all free memory.

        Raises:
            InputError: the file is damaged or missing or of another version, or the host has too little memory.
        """
        about, empty = self.about, empty_cache(plan)
        cached = cache_kinds(empty)
        if _array_names(self.arrays) != _array_names(cached):
            raise InputError(
                f"{self.path} was saved by another version of icejax, whose cache {self.identity['cache.name']!r} keeps other "
                "arrays: use that version, or begin a new session in another folder"
            )
        if about.pages > (plan.pool.pages if plan.pooled else 0):
            damaged(self.path, f"it has {about.pages} pages and there is no room for them")
        with self.open() as file:
            file.expect(_kinds(plan, cached, tokens=about.tokens, pages=about.pages))
            token_ids = file.read(TOKENS)
            if token_ids.min() < 0 or token_ids.max() >= vocab_size:
                damaged(self.path, "it has tokens that the model does not know")
            leaves = [file.read(name) for name in cached]
            pool = table = None
            if plan.pooled:
                count, table = table_for(plan.extents(about.first)[None])
                pool = allocation.allocate(*plan.pool_sizes(count), limit=host_memory_limit, mesh=plan.mesh)
                for (name, _), extent in zip(saved_extents(about.pages), table[0], strict=False):
                    pool = pages_in(pool, extent, name, file.read, plan=plan)
        cache = arrays_in(jax.tree.unflatten(jax.tree.structure(empty), leaves), plan, plan.cuts)
        cache = replace(cache, table=jnp.asarray(table) if plan.pooled else None)
        if int(cache.lengths.next_page) != about.pages or not 0 < int(cache.lengths.seen[0]) <= about.tokens:
            damaged(self.path, "its cache's lengths do not match its description")
        if not all(fits(plan, cache, Joint(*joint)) for joint in about.joints):
            damaged(self.path, "its joints do not match its pages")
        return token_ids.tolist(), cache, pool

    def verify(self) -> None:
        """Raises InputError if any byte of the arrays changed since it was saved; needs no model, and little memory."""
        with self.open() as file:
            file.verify()

    @contextlib.contextmanager
    def open(self) -> Iterator[ArrayFile]:
        """Yields the file of the arrays; InputError if it is missing or its size changed since it was saved."""
        with _reading(self.path), open(_checked(self.path, current_folder(self.path) / ARRAYS), "rb") as file:
            yield ArrayFile(self.path, file, self.arrays)


def _array_names(names: Iterable[str]) -> set[str]:
    """Returns the names of a cache's arrays without numbers of layers and levels: `cache.layers.window.sinks`."""
    return {re.sub(r"\.\d+", "", name) for name in names if name.startswith("cache.")}


def _kinds(plan: Plan, cached: Kinds, *, tokens: int, pages: int) -> Kinds:
    """Returns dtype and shape, by name, of the arrays of a session with this plan and these lengths."""
    return {TOKENS: ("int32", (tokens,))} | cached | pool_kinds(plan, pages)


def open_session(path: Path, model: CausalLM, tokenizer: Any, cache: CachePolicy | None) -> StoredSession:
    """Returns the session at `path` if this model and tokenizer can continue it.

    Args:
        cache: the cache policy that the session must have; None: any.

    Raises:
        InputError: there is no session, it is damaged or of another version, or it was saved with another model, tokenizer or
            cache; the message names the difference.
    """
    stored = read_session(path)
    policy = stored.policy if cache is None else cache
    check_same(path, stored.identity, fingerprint(model, policy, tokenizer), policy, chat=bool(stored.about.messages))
    return stored


def read_session(path: Path) -> StoredSession:
    """Returns the session at `path` without a check of its fingerprint.

    Raises:
        InputError: there is no session, it is of another version, or its description is damaged.
    """
    try:
        with _reading(path):
            text = _checked(path, current_folder(path) / ABOUT, max_bytes=MOST_BYTES).read_text(encoding="utf-8")
        fields = json.loads(text)
        if not isinstance(fields, dict):
            damaged(path, f"{ABOUT} holds no object")
        version = fields.get("version", 1 if "identity" in fields else None)
        if type(version) is int and version < VERSION:
            raise InputError(f"{path} was saved by an older icejax: begin a new session in another folder, or remove it")
        if type(version) is int and version > VERSION:
            raise InputError(f"{path} was saved by a newer icejax: use that, or another folder")
        if version != VERSION or fields.pop("checksum", None) != _checksum(fields):
            damaged(path, f"{ABOUT} is not as it was saved")
        return StoredSession(path, _about(path, fields), fields["identity"], described_arrays(path, fields.get("arrays")))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        damaged(path, f"{ABOUT} is no JSON")


def size(plan: Plan, *, tokens: int, pages: int) -> int:
    """Returns the bytes of the arrays of a session with this plan, this many tokens and pages."""
    kinds = _kinds(plan, cache_kinds(empty_cache(plan)), tokens=tokens, pages=pages)
    return sum(StoredArray(dtype, shape, 0).size for dtype, shape in kinds.values())


def _about(path: Path, fields: dict[str, Any]) -> SessionInfo:
    """Returns the description in `fields`; InputError if a value is out of range."""
    for name, kind in typing.get_type_hints(SessionInfo).items():
        value = fields.get(name)
        if kind in (int, float) and (type(value) is not kind or not -1 < value < math.inf):
            damaged(path, f"{name} is {value!r:.40}")
    names = (field.name for field in dataclasses.fields(SessionInfo))
    later = {"joints", "outdated", "template_variables", "room"}  # sessions may be older than these fields
    about = SessionInfo(**{name: fields.get(name) for name in names if name in fields or name not in later})
    if not 0 < about.first <= about.tokens <= about.context_length <= POSITIONS:
        damaged(path, f"{about.first} first tokens, {about.tokens} in all and room for {about.context_length} do not fit")
    if about.room is not None and not (type(about.room) is int and about.first <= about.room < about.context_length):
        damaged(path, f"room is {about.room!r:.40}")
    if not is_chat(about.messages):
        damaged(path, "messages are no list of turns")
    if not isinstance(about.joints, list) or not all(map(is_joint, about.joints)):
        damaged(path, "joints are no list of tokens and pages")
    if not isinstance(about.outdated, bool):
        damaged(path, f"outdated is {about.outdated!r:.40}")
    if not is_template_variables(about.template_variables):
        damaged(path, "template_variables are no tools and arguments")
    if not isinstance(fields.get("identity"), dict):
        damaged(path, "it does not say what it was saved with")
    return about


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns a system error into an InputError of one line about the session at `path`."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        if (current_folder(path) / ABOUT).exists():
            damaged(path, f"{ARRAYS} is missing")
        raise InputError(f"{path} is no session: expected a folder that Session.save or --session wrote") from None
    except OSError as error:
        raise InputError(f"{path} is a session that cannot be read ({error.strerror}): use a copy of it") from None


def _checked(path: Path, file: Path, *, max_bytes: float = math.inf) -> Path:
    """Returns `file` of the session at `path`; InputError if it is larger than `max_bytes`, or no regular file (a pipe)."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
        damaged(path, f"{file.name} is {'too large' if stat.S_ISREG(status.st_mode) else 'no file'}")
    return file


def _checksum(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())
