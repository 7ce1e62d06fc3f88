"""Typed and range-checked access to the fields of a config.json; families and quantization formats read configs with it."""

from __future__ import annotations

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
        """Returns a field of one or several token ids as a tuple; ids may exceed the vocabulary, as in published configs."""
        value = self._value(name, default=[])
        ids = value if isinstance(value, list) else [value]
        if len(ids) > MOST_EOS:
            raise InputError(f"{self.source}: {name!r} must be a token id or at most {MOST_EOS} of them, got {len(ids)}")
        return tuple(numbers.integer(f"{self.source}: {name!r}", token, least=0) for token in ids)

    def _value(self, name: str, default: Any) -> Any:
        self.taken.add(name)
        value = self.raw.get(name)
        if value is None and default is ...:
            kind = self.raw.get("model_type", self.raw.get("quant_method"))
            needed = "is needed" if kind is None else f"a {quoted(kind).strip(chr(39))} model needs"
            raise InputError(f"{self.source} has no {name!r}, which {needed}")
        return default if value is None else value
