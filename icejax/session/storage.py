"""A session in a folder: `session.json` says what it is, `arrays` holds its arrays' bytes one behind the other.

How these are laid out follows from the model, the cache's options and a few sizes, so no array describes itself. The
description has the bytes and the checksum of each, by which they can be verified without a model, and its own checksum.
Nothing is allocated before the file has been found to be of the right size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import stat
import typing
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from icejax.cache.pool import host_pool
from icejax.cache.pool.extents import extents_for, table_for
from icejax.cache.pool.page_format import bits_dtype
from icejax.cache.protocol import CachePolicy, KVCache, Lengths
from icejax.checks.errors import InputError
from icejax.checks.json_file import MOST_BYTES
from icejax.checks.numbers import POSITIONS
from icejax.engine.plan import Plan
from icejax.files.atomic_folder import current_folder
from icejax.models.decoder import CausalLM
from icejax.runtime import devices
from icejax.session.fingerprint import check_same, damaged, fingerprint, policy_of

VERSION = 15
ABOUT, ARRAYS = "session.json", "arrays"
BLOCK = 2**25  # bytes that are verified at once


@dataclass(frozen=True, kw_only=True)
class SessionInfo:
    """What a session is besides its arrays.

    Attributes:
        context_length: tokens that there is room for.
        first: tokens of the first text.
        tokens: tokens so far.
        pages: pages of the pool in use.
        started: when the session began, in seconds since 1970.
        messages: the chat so far, a role and a content each.
    """

    context_length: int
    first: int
    tokens: int
    pages: int
    started: float
    messages: list[dict[str, str]]


def write(
    part: Path, identity: dict[str, Any], about: SessionInfo, token_ids: Sequence[int], cache: KVCache, pool: jax.Array | None
) -> None:
    """Writes a session into the empty folder `part`."""
    arrays = {}
    with open(part / ARRAYS, "wb") as file:
        for name, array in _arrays(token_ids, cache, pool, about.pages):
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            arrays[name] = [len(data), zlib.crc32(data)]
            file.write(data)
    fields = dict(version=VERSION, identity=identity, **dataclasses.asdict(about), arrays=arrays)
    (part / ABOUT).write_text(json.dumps(fields | {"checksum": _checksum(fields)}))


def _arrays(token_ids: Sequence[int], cache: KVCache, pool: jax.Array | None, pages: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of a session in the order in which they are stored."""
    yield "token_ids", np.asarray(token_ids, np.int32)
    for name, leaf in _leaves(replace(cache, table=None)):
        yield name, np.asarray(leaf)
    if pool is not None:
        for (name, count), extent in zip(_extents(pages), np.asarray(cache.table)[0], strict=False):
            yield name, np.asarray(host_pool.read_extent(pool, jnp.int32(extent)))[:, :count]


@dataclass(frozen=True)
class StoredSession:
    """A session in a folder, of which the description has been read and the arrays have not.

    Attributes:
        identity: what it was saved with, as `identity.identity` has it.
        arrays: bytes and checksum of every array, in the order in which they are stored.
    """

    path: Path
    about: SessionInfo
    identity: dict[str, Any]
    arrays: dict[str, list[int]]

    @property
    def policy(self) -> CachePolicy:
        """The cache's; InputError if there is none such here."""
        return policy_of(self.path, self.identity)

    def read(
        self, plan: Plan, *, vocab_size: int, host_memory_limit: int | None
    ) -> tuple[list[int], KVCache, jax.Array | None]:
        """Returns the tokens, the device part of the cache, and the pool.

        Args:
            plan: that of the session.
            host_memory_limit: bytes that the pool may take; None: what is free.

        Raises:
            InputError: the file is damaged or missing, or there is not enough host memory.
        """
        about, empty = self.about, _empty(plan)
        if about.pages > (plan.pool.pages if plan.pooled else 0):
            damaged(self.path, f"it has {about.pages} pages and there is no room for them")
        expected = size(plan, tokens=about.tokens, pages=about.pages)
        with self.open() as file:
            if self._size != expected:
                damaged(self.path, f"{ARRAYS} has {self._size} bytes, expected {expected}")
            extents = list(_extents(about.pages))
            if list(self.arrays) != ["token_ids", *(name for name, _ in _leaves(empty)), *(name for name, _ in extents)]:
                damaged(self.path, "its arrays are others than those of this cache")

            def take(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
                data = np.empty(math.prod(shape) * np.dtype(dtype).itemsize, np.uint8)
                file.readinto(data)
                self._check(name, len(data), zlib.crc32(data))
                return data.view(dtype).reshape(shape)

            token_ids = take("token_ids", (about.tokens,), np.int32)
            if token_ids.min() < 0 or token_ids.max() >= vocab_size:
                damaged(self.path, "it has tokens that the model does not know")
            leaves = {name: take(name, leaf.shape, leaf.dtype) for name, leaf in _leaves(empty)}
            pool = table = None
            if plan.pooled:
                count, table = table_for(plan.extents(about.first)[None])
                shape = plan.pool_shape(count)
                pool = host_pool.allocate(shape, plan.pool_dtype, limit=host_memory_limit)
                for (name, count), extent in zip(extents, table[0], strict=False):
                    bits = np.zeros(shape[1:], pool.dtype)
                    bits[:, :count] = take(name, (shape[1], count, *shape[3:]), pool.dtype)
                    pool = host_pool.write_extent(pool, bits, jnp.int32(extent))
        every = [leaves.get(name, np.zeros(leaf.shape, leaf.dtype)) for name, leaf in _leaves(empty, of_size=False)]
        # On CPU an array over numpy's memory could not be written in place.
        every = [jax.device_put(x, devices.device(), may_alias=False) for x in every]
        cache = jax.tree.unflatten(jax.tree.structure(empty), every)
        cache = replace(cache, table=jnp.asarray(table) if plan.pooled else None)
        if int(cache.lengths.next_page) != about.pages or not 0 < int(cache.lengths.seen[0]) <= about.tokens:
            damaged(self.path, "its cache holds other tokens than it says")
        return token_ids.tolist(), cache, pool

    def verify(self) -> None:
        """Raises InputError if a byte of the arrays is not as it was saved; needs no model, and little memory."""
        with self.open() as file:
            for name, (length, _) in self.arrays.items():
                checksum = done = 0
                while done < length and (piece := file.read(min(BLOCK, length - done))):
                    checksum, done = zlib.crc32(piece, checksum), done + len(piece)
                self._check(name, done, checksum)

    @contextlib.contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Yields the file of the arrays; InputError if it is missing or of another size than it was saved with."""
        with _reading(self.path), open(_checked(self.path, current_folder(self.path) / ARRAYS), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != self._size:
                damaged(self.path, f"{ARRAYS} has {size} bytes, expected {self._size}")
            yield file

    @property
    def _size(self) -> int:
        return sum(length for length, _ in self.arrays.values())

    def _check(self, name: str, length: int, checksum: int) -> None:
        if [length, checksum] != self.arrays[name]:
            damaged(self.path, f"the bytes of {name} are not those that were saved")


def open_session(path: Path, model: CausalLM, cache: CachePolicy | None) -> StoredSession:
    """Returns the session at `path`, which can be gone on from here.

    Raises:
        InputError: there is none, it is damaged or of another version, or it was saved with another model or cache than
            `cache` (None: whatever it is); the message names the difference.
    """
    kept = read_session(path)
    model = model.for_capacity(kept.about.context_length)  # as it was saved, whose RoPE may depend on the length
    check_same(path, kept.identity, fingerprint(model, kept.policy if cache is None else cache))
    return kept


def read_session(path: Path) -> StoredSession:
    """Returns the session at `path`, whatever it was saved with; InputError if there is none, or its description is damaged."""
    try:
        with _reading(path):
            text = _checked(path, current_folder(path) / ABOUT, most=MOST_BYTES).read_text(encoding="utf-8")
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
        return StoredSession(path, _about(path, fields), fields["identity"], fields["arrays"])
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        damaged(path, f"{ABOUT} is no JSON")


def size(plan: Plan, *, tokens: int, pages: int) -> int:
    """Returns the bytes of the arrays of a session of `plan`."""
    shape = plan.pool_shape(1) if plan.pooled else (0, 0, host_pool.EXTENT)
    page = math.prod(shape[1:]) // host_pool.EXTENT * bits_dtype(plan.pool_dtype).itemsize
    return 4 * tokens + sum(leaf.size * leaf.dtype.itemsize for _, leaf in _leaves(_empty(plan))) + pages * page


def _about(path: Path, fields: dict[str, Any]) -> SessionInfo:
    """Returns what is said of the session in `fields`, if all of it can be true."""
    for name, kind in typing.get_type_hints(SessionInfo).items():
        value = fields.get(name)
        if kind in (int, float) and (type(value) is not kind or not -1 < value < math.inf):
            damaged(path, f"{name} is {value!r:.40}")
    about = SessionInfo(**{field.name: fields.get(field.name) for field in dataclasses.fields(SessionInfo)})
    if not 0 < about.first <= about.tokens <= about.context_length <= POSITIONS:
        damaged(path, f"{about.first} first tokens, {about.tokens} in all and room for {about.context_length} do not fit")
    if not isinstance(about.messages, list) or not all(map(_is_message, about.messages)):
        damaged(path, "messages are no list of roles and contents")
    arrays, saved = fields.get("arrays"), fields.get("identity")
    if not isinstance(saved, dict) or not isinstance(arrays, dict) or not all(map(_is_array, arrays.values())):
        damaged(path, "it does not say what it was saved with")
    return about


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"role", "content"} and all(isinstance(x, str) for x in value.values())


def _is_array(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(x) is int and 0 <= x < 2**63 for x in value)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Tells an error of the system in one line about the session at `path`."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        if (current_folder(path) / ABOUT).exists():
            damaged(path, f"{ARRAYS} is missing")
        raise InputError(f"{path} is no session: expected a folder that Session.save or --session wrote") from None
    except OSError as error:
        raise InputError(f"{path} is a session that cannot be read ({error.strerror}): use a copy of it") from None


def _checked(path: Path, file: Path, *, most: float = math.inf) -> Path:
    """Returns a file of the session at `path`; InputError for what is none, as a pipe that one would wait for, or too large."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > most:
        damaged(path, f"{file.name} is {'too large' if stat.S_ISREG(status.st_mode) else 'no file'}")
    return file


def _checksum(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def _empty(plan: Plan) -> KVCache:
    """Returns shapes and dtypes of the device part of the cache."""

    def empty() -> KVCache:
        return KVCache(
            tuple(policy.init(plan.spec_of(i)) for i, policy in enumerate(plan.policies)), Lengths.none(plan.spec.batch_size)
        )

    return jax.eval_shape(empty)


def _leaves(tree: Any, *, of_size: bool = True) -> list[tuple[str, Any]]:
    """Returns the leaves of a pytree with the names of their paths, by default only those that are not empty."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path).strip("."), leaf) for path, leaf in named if leaf.size or not of_size]


def _extents(pages: int) -> Iterator[tuple[str, int]]:
    """Yields name and pages of the extents that a row's first `pages` are saved in."""
    for i in range(extents_for(pages)):
        yield f"pool.{i}", min(host_pool.EXTENT, pages - i * host_pool.EXTENT)
