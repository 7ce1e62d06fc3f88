"""The fields of a config.json, each taken by name, by type and in its range."""

from __future__ import annotations

from typing import Any

from icejax.checks import numbers
from icejax.checks.errors import InputError, quoted

MOST_EOS = 1024
WORDS = {bool: "true or false", str: "a text", list: "a list", dict: "an object"}


class Fields:
    """An object of a config.json; `taken` are the names that somebody asked for. A field that is null is missing.

    Attributes:
        raw: the object as it was read.
        source: what messages call it.
        taken: names of the fields asked for so far.
    """

    def __init__(self, raw: dict[str, Any], source: str = "config.json") -> None:
        self.raw, self.source = raw, source
        self.taken: set[str] = set()

    def take(self, name: str, kind: type, *, default: Any = ...) -> Any:
        """Returns the field `name`; `default` where it is missing.

        Raises:
            InputError: it is missing without a default, or not of `kind`.
        """
        value = self._value(name, default)
        if value is not default and not isinstance(value, kind):
            raise InputError(f"{self.source}: {name!r} must be {WORDS[kind]}, got {quoted(value)}")
        return value

    def whole(self, name: str, *, least: int = 1, most: int = numbers.LARGEST, default: Any = ...) -> Any:
        """Returns the field `name`, a whole number from `least` to `most`; else as `take`."""
        value = self._value(name, default)
        return value if value is default else numbers.integer(f"{self.source}: {name!r}", value, least=least, most=most)

    def number(self, name: str, *, least: float, most: float, above: bool = False, default: Any = ...) -> Any:
        """Returns the field `name`, a number from `least` to `most`, or `above` the least; else as `take`."""
        value = self._value(name, default)
        if value is default:
            return value
        return numbers.number(f"{self.source}: {name!r}", value, least=least, most=most, above=above)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Returns a field of one token id or several as a tuple; an id may lie past the vocabulary, as in published configs."""
        value = self._value(name, default=[])
        ids = value if isinstance(value, list) else [value]
        if len(ids) > MOST_EOS:
            raise InputError(f"{self.source}: {name!r} must be a token id or at most {MOST_EOS} of them, got {len(ids)}")
        return tuple(numbers.integer(f"{self.source}: {name!r}", each, least=0) for each in ids)

    def _value(self, name: str, default: Any) -> Any:
        self.taken.add(name)
        value = self.raw.get(name)
        if value is None and default is ...:
            kind = self.raw.get("model_type", self.raw.get("quant_method"))
            needed = "is needed" if kind is None else f"a {quoted(kind).strip(chr(39))} model needs"
            raise InputError(f"{self.source} has no {name!r}, which {needed}")
        return default if value is None else value
