"""Prints an answer as it comes: its text on stdout, and the model's thoughts, dim, on a terminal's stderr.

`icejax.commands.chat` and `show` call it.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from icejax.commands.terminal.phases import Phases
from icejax.commands.terminal.process import CONTROL, escaped, write
from icejax.engine.response import GenerationResponse


class Printer:
    """The printing of one answer, which replaces bars and lines of waiting. Only a terminal's stderr gets thoughts."""

    def __init__(self, phases: Phases) -> None:
        self._console, self._phases, self._in_thoughts = phases.console, phases, False

    def piece(self, piece: GenerationResponse) -> None:
        """Prints the newest piece of the answer."""
        if piece.reasoning and self._console.is_terminal:
            self._in_thoughts = True
            thoughts = CONTROL.sub(lambda match: ascii(match[0])[1:-1], piece.reasoning)
            self._phases.before_text(thoughts)
            self._console.print(Text(thoughts, style="dim"), end="", soft_wrap=True)
        if piece.text:
            self._end_thoughts()
            text = escaped(piece.text)
            self._phases.before_text(text)
            write(text)

    def end(self, answer: GenerationResponse) -> None:
        """Ends the line of the whole answer."""
        self._phases.stop()
        self._end_thoughts()
        write("\n")
        tell_only_thoughts(answer, self._console)

    def _end_thoughts(self) -> None:
        if self._in_thoughts:
            self._console.print("\n")
            self._in_thoughts = False


def tell_only_thoughts(answer: GenerationResponse, console: Console) -> None:
    """Tells on stderr that an answer reached its token limit within its thoughts."""
    if answer.finish_reason == "length" and answer.reasoning and not answer.text:
        line = f"the answer's {answer.new_tokens:,} tokens are all thoughts: raise --max-new-tokens"
        console.print(line, markup=False, soft_wrap=True)
