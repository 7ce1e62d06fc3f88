"""The text and the calls of one answer, as its pieces come."""

from __future__ import annotations

from dataclasses import dataclass

from icejax.engine.response import GenerationResponse
from icejax.serving.tools.asked import Asked
from icejax.serving.tools.events import CallArguments, CallBegin, Event, Text


@dataclass
class Call:
    """A call that the model has made.

    Attributes:
        id: its new id.
        arguments: JSON text, as far as it has come.
    """

    id: str
    name: str
    arguments: str = ""


class CallsOf:
    """An answer without its calls, and these.

    Attributes:
        text: the answer's text outside calls so far.
        calls: the calls so far.
    """

    def __init__(self, asked: Asked | None) -> None:
        """Begins before an answer; `asked`: the tools that the model may call; None: all is text."""
        self._form = None if asked is None else asked.form
        self._parser = None if asked is None else asked.form.parser(asked.tools)
        self.text, self.calls = "", list[Call]()

    def read(self, piece: GenerationResponse) -> list[tuple[Call | None, Event]]:
        """Returns the events of a piece, those of calls with their calls."""
        events: list[Event] = [Text(piece.text)] if piece.text else []
        if self._parser is not None:
            events = self._parser.read(piece)
        for event in events:
            if isinstance(event, Text):
                self.text += event.text
            elif isinstance(event, CallBegin):
                self.calls.append(Call(self._form.new_id(), event.name))
            elif isinstance(event, CallArguments):
                self.calls[event.index].arguments += event.text
        return [(None if isinstance(event, Text) else self.calls[event.index], event) for event in events]

    def reason(self, piece: GenerationResponse) -> str | None:
        """Returns OpenAI's reason why the answer ended with `piece`; None: it continues."""
        return "tool_calls" if self.calls and piece.finish_reason == "stop" else piece.finish_reason
