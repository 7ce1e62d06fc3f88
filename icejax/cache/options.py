"""Cache options as text: builds a policy from a name and options, and describes the options of each policy.

The command line and `icejax.make_policy` call it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from icejax.cache.protocol import CachePolicy
from icejax.cache.registry import POLICIES, names, policy_named
from icejax.checks.errors import InputError, quoted, suggestion


def option_texts(name: str) -> dict[str, str]:
    """Returns the options of the policy `name`: each option's text from the docstrings, with its default."""
    policy = POLICIES[name]
    docs = "\n".join((inspect.cleandoc(base.__doc__ or "")).partition("Attributes:\n")[2] for base in policy.__mro__[::-1])
    entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", docs, re.MULTILINE)
    texts = {option: " ".join(text.split()) for option, text in entries}
    return {
        field.name: f"{texts.get(field.name, '').rstrip('.')} (default: {str(field.default).lower()})"
        for field in _options(policy)
    }


def make_policy(name: str, options: dict[str, Any]) -> CachePolicy:
    """Returns a cache policy by its name, as ``make_policy("snapkv", {"budget": 256})``.

    Args:
        name: a policy or a preset, as `--cache` takes it (docs/methods.md).
        options: option values by name. A string is parsed like a command-line value: "none", "true", "8".

    Raises:
        InputError: the policy or option does not exist, or an option's value is out of range.
    """
    entry = policy_named(name) if isinstance(name, str) else None
    if entry is None:
        raise InputError(f"unknown cache {quoted(name)}: expected one of {', '.join(names())}{suggestion(str(name), names())}")
    if not isinstance(options, Mapping):
        raise InputError(f"cache options must be a mapping of names to values, got {quoted(options)}")
    policy, values = entry[0], dict(entry[1])
    kinds, valid = typing.get_type_hints(policy), [field.name for field in _options(policy)]
    for key, value in options.items():
        if key not in valid:
            expected = f"expected one of {', '.join(valid)}" if valid else "it has none"
            raise InputError(f"cache {name!r} has no option {quoted(key)}: {expected}{suggestion(str(key), valid)}")
        values[key] = _parse(key, value, kinds[key]) if isinstance(value, str) else value
    return policy(**values)


def cache_options(texts: Sequence[str], **keywords: int | float | None) -> dict[str, str | int | float]:
    """Returns the options in the KEY=VALUE texts, and the keyword options that are not None; a keyword wins over a text."""
    options: dict[str, str | int | float] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator:
            raise InputError(f"--cache-option must be KEY=VALUE, got {text!r}")
        options[key] = value
    return options | {key: value for key, value in keywords.items() if value is not None}


def _options(policy: type[CachePolicy]) -> list[dataclasses.Field[Any]]:
    """Returns the fields that a user may set."""
    return [field for field in dataclasses.fields(policy) if not field.metadata.get("internal")]


def _parse(key: str, value: str, kind: Any) -> Any:
    if typing.get_origin(kind) is typing.Literal:
        return value  # the policy checks its own choices
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
