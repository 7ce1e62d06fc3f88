"""What a parser finds in an answer: text, and calls that begin, grow and end."""

from __future__ import annotations

from typing import NamedTuple


class Text(NamedTuple):
    """Text of the answer outside calls; never empty."""

    text: str


class CallBegin(NamedTuple):
    """A call of the function `name` begins; `index` counts the calls of an answer from 0."""

    index: int
    name: str


class CallArguments(NamedTuple):
    """A piece of the arguments of the call that has begun last: JSON text as the model wrote it; never empty."""

    index: int
    text: str


class CallEnd(NamedTuple):
    """The arguments of a call are complete, or the answer has ended within them."""

    index: int


Event = Text | CallBegin | CallArguments | CallEnd
