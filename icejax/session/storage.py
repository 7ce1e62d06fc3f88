"""A session in a folder: `session.json` says what it is, `arrays` holds its arrays' bytes one behind the other.

The description has the name, dtype, shape and checksum of each array, by which they can be verified without a model, and its
own checksum. Nothing is allocated before the arrays have been found to be those that this model, cache and length need. Arrays
under `kept.` are passed over: there is room for more states of a layer there, which a reader can do without.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import stat
import typing
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from icejax.session.array_names import named_arrays
from icejax.session.fingerprint import check_same, damaged, fingerprint, policy_of
from icejax.session.stored_arrays import ArrayFile, StoredArray, described_arrays, write_arrays

VERSION = 16
ABOUT, ARRAYS = "session.json", "arrays"
TOKENS = "token_ids"


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
    arrays = write_arrays(part / ARRAYS, _arrays(token_ids, cache, pool, about.pages))
    fields = dict(version=VERSION, identity=identity, **dataclasses.asdict(about), arrays=arrays)
    (part / ABOUT).write_text(json.dumps(fields | {"checksum": _checksum(fields)}))


def _arrays(token_ids: Sequence[int], cache: KVCache, pool: jax.Array | None, pages: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of a session in the order in which they are stored."""
    yield TOKENS, np.asarray(token_ids, np.int32)
    for name, leaf in named_arrays(replace(cache, table=None)):
        yield f"cache.{name}", np.asarray(leaf)
    if pool is not None:
        for (name, count), extent in zip(_extents(pages), np.asarray(cache.table)[0], strict=False):
            yield name, np.asarray(host_pool.read_extent(pool, jnp.int32(extent)))[:, :count]


@dataclass(frozen=True)
class StoredSession:
    """A session in a folder, of which the description has been read and the arrays have not.

    Attributes:
        identity: what it was saved with, as `fingerprint` has it.
        arrays: by name, in the order in which they are stored.
    """

    path: Path
    about: SessionInfo
    identity: dict[str, Any]
    arrays: dict[str, StoredArray]

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
        cached, extents = named_arrays(empty), list(_extents(about.pages))
        with self.open() as file:
            file.expect(_kinds(plan, cached, tokens=about.tokens, pages=about.pages))
            token_ids = file.read(TOKENS)
            if token_ids.min() < 0 or token_ids.max() >= vocab_size:
                damaged(self.path, "it has tokens that the model does not know")
            leaves = [file.read(f"cache.{name}") for name, _ in cached]
            pool = table = None
            if plan.pooled:
                count, table = table_for(plan.extents(about.first)[None])
                shape = plan.pool_shape(count)
                pool = host_pool.allocate(shape, plan.pool_dtype, limit=host_memory_limit)
                for (name, count), extent in zip(extents, table[0], strict=False):
                    bits = np.zeros(shape[1:], pool.dtype)
                    bits[:, :count] = file.read(name)
                    pool = host_pool.write_extent(pool, bits, jnp.int32(extent))
        # On CPU an array over numpy's memory could not be written in place.
        leaves = [jax.device_put(x, devices.device(), may_alias=False) for x in leaves]
        cache = jax.tree.unflatten(jax.tree.structure(empty), leaves)
        cache = replace(cache, table=jnp.asarray(table) if plan.pooled else None)
        if int(cache.lengths.next_page) != about.pages or not 0 < int(cache.lengths.seen[0]) <= about.tokens:
            damaged(self.path, "its cache holds other tokens than it says")
        return token_ids.tolist(), cache, pool

    def verify(self) -> None:
        """Raises InputError if a byte of the arrays is not as it was saved; needs no model, and little memory."""
        with self.open() as file:
            file.verify()

    @contextlib.contextmanager
    def open(self) -> Iterator[ArrayFile]:
        """Yields the file of the arrays; InputError if it is missing or of another size than it was saved with."""
        with _reading(self.path), open(_checked(self.path, current_folder(self.path) / ARRAYS), "rb") as file:
            yield ArrayFile(self.path, file, self.arrays)


def _kinds(plan: Plan, cached: Sequence[tuple[str, Any]], *, tokens: int, pages: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns dtype and shape of the arrays that a session of `plan` has, by name."""
    kinds = {TOKENS: ("int32", (tokens,))} | {f"cache.{name}": (str(x.dtype), x.shape) for name, x in cached}
    if plan.pooled:
        shape, bits = plan.pool_shape(1), str(bits_dtype(plan.pool_dtype))
        kinds |= {name: (bits, (shape[1], count, *shape[3:])) for name, count in _extents(pages)}
    return kinds


def open_session(path: Path, model: CausalLM, tokenizer: Any, cache: CachePolicy | None) -> StoredSession:
    """Returns the session at `path`, which can be gone on from here.

    Raises:
        InputError: there is none, it is damaged or of another version, or it was saved with another model, tokenizer or
            cache than `cache` (None: whatever it is); the message names the difference.
    """
    kept = read_session(path)
    model = model.for_capacity(kept.about.context_length)  # as it was saved, whose RoPE may depend on the length
    policy = kept.policy if cache is None else cache
    check_same(path, kept.identity, fingerprint(model, policy, tokenizer), policy, chat=bool(kept.about.messages))
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
        return StoredSession(path, _about(path, fields), fields["identity"], described_arrays(path, fields.get("arrays")))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        damaged(path, f"{ABOUT} is no JSON")


def size(plan: Plan, *, tokens: int, pages: int) -> int:
    """Returns the bytes of the arrays of a session of `plan`."""
    kinds = _kinds(plan, named_arrays(_empty(plan)), tokens=tokens, pages=pages)
    return sum(StoredArray(dtype, shape, 0).size for dtype, shape in kinds.values())


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
    if not isinstance(fields.get("identity"), dict):
        damaged(path, "it does not say what it was saved with")
    return about


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"role", "content"} and all(isinstance(x, str) for x in value.values())


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


def _extents(pages: int) -> Iterator[tuple[str, int]]:
    """Yields name and pages of the extents that a row's first `pages` are saved in."""
    for i in range(extents_for(pages)):
        yield f"pool.{i}", min(host_pool.EXTENT, pages - i * host_pool.EXTENT)
