"""Typed and range-checked access to the fields of a config.json; families and quantization formats read configs with it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from icejax.checks import numbers
from icejax.checks.errors import InputError, quoted

MOST_EOS = 1024
WORDS = {bool: "true or false", str: "a text", list: "a list", dict: "an object"}


class Fields:
    """An object of a config.json, which records the fields that were read. A field that is null counts as missing.

    Attributes:
        raw: the JSON object.
        source: name of the object in error messages.
        taken: names of the fields read so far.
    """

    def __init__(self, raw: dict[str, Any], source: str = "config.json") -> None:
        self.raw, self.source = raw, source
        self.taken: set[str] = set()

    def take(self, name: str, kind: type, *, default: Any = ...) -> Any:
        """Returns the field `name`; `default` where it is missing.

        Raises:
            InputError: the field is missing and has no default, or is not of type `kind`.
        """
        value = self._value(name, default)
        if value is not default and not isinstance(value, kind):
            raise InputError(f"{self.source}: {name!r} must be {WORDS[kind]}, got {quoted(value)}")
        return value

    def whole(self, name: str, *, least: int = 1, most: int = numbers.LARGEST, default: Any = ...) -> Any:
        """Returns the field `name`, a whole number from `least` to `most`; otherwise as `take`."""
        value = self._value(name, default)
        return value if value is default else numbers.integer(f"{self.source}: {name!r}", value, least=least, most=most)

    def number(self, name: str, *, least: float, most: float, above: bool = False, default: Any = ...) -> Any:
        """Returns the field `name`, a number from `least` (if `above`: excluded) to `most`; otherwise as `take`."""
        value = self._value(name, default)
        if value is default:
            return value
        return numbers.number(f"{self.source}: {name!r}", value, least=least, most=most, above=above)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Returns a field of one or several token ids as a tuple.

        As in published configs, ids may exceed the vocabulary, and -1 stands for no token.
        """
        value = self._value(name, default=[])
        ids = value if isinstance(value, list) else [value]
        if len(ids) > MOST_EOS:
            raise InputError(f"{self.source}: {name!r} must be a token id or at most {MOST_EOS} of them, got {len(ids)}")
        checked = (numbers.integer(f"{self.source}: {name!r}", token, least=-1) for token in ids)
        return tuple(token for token in checked if token >= 0)

    def others(self) -> set[str]:
        """Returns the names of the fields that have a value and were not read."""
        return {name for name, value in self.raw.items() if value is not None} - self.taken

    def refuse_others(self, *, neutral: Mapping[str, tuple], irrelevant: Set[str]) -> None:
        """Raises InputError for the first field that was not read and may change numbers.

        Args:
            neutral: the values of fields that change none.
            irrelevant: fields that change none.
        """
        others = self.others() - irrelevant
        for name, value in self.raw.items():
            if name not in others or value in neutral.get(name, ()):
                continue
            if name in neutral:
                raise InputError(f"{self.source}: {name}={quoted(value)} is not supported (only {neutral[name][0]!r})")
            raise InputError(
                f"{self.source}: field {quoted(name)} ({quoted(value)}) is not known here and may change the model's numbers"
            )

    def _value(self, name: str, default: Any) -> Any:
        self.taken.add(name)
        value = self.raw.get(name)
        if value is None and default is ...:
            kind = self.raw.get("model_type", self.raw.get("quant_method"))
            needed = "is needed" if kind is None else f"a {quoted(kind).strip(chr(39))} model needs"
            raise InputError(f"{self.source} has no {name!r}, which {needed}")
        return default if value is None else value
