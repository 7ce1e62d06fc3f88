"""A printed answer: text on stdout, thoughts on a terminal's stderr, and one line where there are only thoughts."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from icejax.commands.terminal.phases import Phases
from icejax.commands.terminal.printer import Printer


def answer(text, reasoning, finish_reason=None):
    return SimpleNamespace(text=text, reasoning=reasoning, finish_reason=finish_reason, new_tokens=1234)


PIECES = [answer("", ""), answer("", "Hm \x1b[2J,"), answer("", " so."), answer("It", None), answer(" is.", None)]


def printed(capsys, pieces, whole, *, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, color_system=None, width=40)
    printer = Printer(Phases(console))
    for piece in pieces:
        printer.piece(piece)
    printer.end(whole)
    return capsys.readouterr().out, console.file.getvalue()


@pytest.mark.parametrize("terminal, thoughts", [(True, "Hm \\x1b[2J, so.\n\n"), (False, "")])
def test_thoughts_are_shown_on_a_terminal_alone(capsys, terminal, thoughts):
    whole = answer("It is.", "Hm, so.", "length")
    assert printed(capsys, PIECES, whole, terminal=terminal) == ("It is.\n", thoughts)


def test_an_answer_of_thoughts_alone_is_told(capsys):
    line = "the answer's 1,234 tokens are all thoughts: raise --max-new-tokens\n"
    assert printed(capsys, PIECES[:2], answer("", "Hm", "length"), terminal=False) == ("\n", line)
    assert printed(capsys, PIECES[:2], answer("", "Hm", "stop"), terminal=False) == ("\n", "")
