"""Names of modules and regular expressions, by which a `quantization_config` says which matrices are codes.

`icejax.checkpoint.quantized.formats` calls it. The sandbox runs the expressions, because one may take for ever.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from icejax.checks.errors import InputError, quoted
from icejax.models.hf.fields import Fields
from icejax.sandbox.client import SANDBOX

SOURCE = "config.json: quantization_config"
MOST_SECONDS = 60  # CPU time of all regular expressions of a folder


class ModuleMatcher:
    """Matches modules with compressed-tensors' names and regular expressions; the expressions share MOST_SECONDS."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def fits_any(self, names: Sequence[str], patterns: Iterable[str]) -> bool:
        """Says whether a pattern is one of the module's names, or `re:` with a regular expression that fits one."""
        return any(self._fits(pattern[3:], names) if pattern.startswith("re:") else pattern in names for pattern in patterns)

    def _fits(self, expression: str, names: Sequence[str]) -> bool:
        answer = SANDBOX.ask(dict(expression=expression, names=list(names)), most=0)  # it may loop for ever
        self._seconds += answer.get("seconds", 0.0)
        if self._seconds > MOST_SECONDS:
            answer = {"fault": f"and those before it took more than {MOST_SECONDS} s"}
        if "fault" in answer:
            raise InputError(f"{SOURCE}: the expression {quoted(expression)} {answer['fault']}: expected a simpler one")
        return answer["fits"]


def module_names(fields: Fields, name: str) -> tuple[str, ...]:
    """Returns a list of module names; InputError for other types, or an invalid regular expression."""
    names = fields.take(name, list, default=[])
    for pattern in names:
        try:
            re.compile(pattern[3:] if pattern.startswith("re:") else "")
        except (AttributeError, re.error, OverflowError, RecursionError):
            raise InputError(f"{fields.source}: {name!r} must list names or sound expressions, got {quoted(pattern)}") from None
    return tuple(names)
