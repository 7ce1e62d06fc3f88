"""Cache policies by name, and their options as text."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from icejax.cache.protocol import CachePolicy
from icejax.cache.registry import POLICIES, named, names
from icejax.checks.errors import InputError, quoted, suggestion


def described(name: str) -> dict[str, str]:
    """Returns the options of the policy `name`, and of each what its docstring says and its default."""
    policy = POLICIES[name]
    docs = "\n".join((inspect.cleandoc(kind.__doc__ or "")).partition("Attributes:\n")[2] for kind in policy.__mro__[::-1])
    told = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", docs, re.MULTILINE)
    texts = {option: " ".join(text.split()) for option, text in told}
    return {
        field.name: f"{texts.get(field.name, '').rstrip('.')} (default: {str(field.default).lower()})"
        for field in dataclasses.fields(policy)
    }


def make_policy(name: str, options: dict[str, Any]) -> CachePolicy:
    """Returns a cache policy by its name, as ``make_policy("snapkv", {"budget": 256})``.

    Args:
        name: of a policy or a preset, as `--cache` takes it (docs/methods.md).
        options: its own, by their names: values, or texts as a command line has them, such as "none", "true" and "8".

    Raises:
        InputError: there is no such policy or option, or an option's value is out of range.
    """
    entry = named(name) if isinstance(name, str) else None
    if entry is None:
        raise InputError(f"unknown cache {quoted(name)}: expected one of {', '.join(names())}{suggestion(str(name), names())}")
    if not isinstance(options, Mapping):
        raise InputError(f"options of a cache must be an object of names and values, got {quoted(options)}")
    policy, values = entry[0], dict(entry[1])
    kinds, valid = typing.get_type_hints(policy), [field.name for field in dataclasses.fields(policy)]
    for key, value in options.items():
        if key not in valid:
            expected = f"expected one of {', '.join(valid)}" if valid else "it has none"
            raise InputError(f"cache {name!r} has no option {quoted(key)}: {expected}{suggestion(str(key), valid)}")
        values[key] = _parse(key, value, kinds[key]) if isinstance(value, str) else value
    return policy(**values)


def cache_options(texts: Sequence[str], **named: int | float | None) -> dict[str, str | int | float]:
    """Returns the options of KEY=VALUE texts, and those named ones that are given."""
    options: dict[str, str | int | float] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign:
            raise InputError(f"--cache-option must be KEY=VALUE, got {text!r}")
        options[key] = value
    return options | {key: value for key, value in named.items() if value is not None}


def _parse(key: str, value: str, kind: Any) -> Any:
    if typing.get_origin(kind) is typing.Literal:
        return value  # the policy knows which there are
    choices = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if type(None) in choices and value == "none":
        return None
    for choice in choices:
        if choice is bool and value in ("true", "false"):
            return value == "true"
        if choice in (int, float, str):
            try:
                return choice(value)
            except ValueError:
                continue
    expected = " or ".join(c.__name__ for c in choices if c is not type(None))
    raise InputError(f"cache option {key} must be {expected}, got {quoted(value)}")
