"""Where the messages of a conversation come from: a prompt with a history, or the lines of stdin."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator

from prompt_toolkit import PromptSession
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.output import Output
from prompt_toolkit.output.defaults import create_output

from icejax.checks.errors import InputError
from icejax.commands.process import listen

LOG = logging.getLogger(__name__)


def typed(*, source: Input | None = None, shown: Output | None = None) -> Iterator[str]:
    """Yields what is typed, until Ctrl-D: Enter sends, Alt-Enter begins a new line, Ctrl-C drops what was typed.

    Args:
        source, shown: where keys come from and the prompt goes to; None: the terminal, also where stdout is none.
    """
    keys, here = KeyBindings(), has_focus(DEFAULT_BUFFER)  # in a search of the history Enter has its own meaning
    keys.add("enter", filter=here)(lambda event: event.current_buffer.validate_and_handle())
    keys.add("escape", "enter", filter=here)(lambda event: event.current_buffer.insert_text("\n"))
    prompt = PromptSession(
        "> ",
        placeholder="a message, or /help",
        prompt_continuation="  ",
        multiline=True,
        key_bindings=keys,
        history=_history(),
        input=source,
        output=shown or create_output(always_prefer_tty=True),
    )
    while True:
        try:
            text = prompt.prompt()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        finally:
            listen()
        yield text


def _history() -> History:
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    file = os.path.join(home, "icejax", "chat")
    try:
        os.makedirs(os.path.dirname(file), exist_ok=True)
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))  # nobody else is to read what was asked
    except OSError as error:
        LOG.warning("what is typed is forgotten at the end: %s cannot be written (%s)", file, error.strerror)
        return InMemoryHistory()
    return FileHistory(file)


def piped() -> Iterator[str]:
    """Yields the lines of stdin; InputError if they are no text."""
    try:
        for line in sys.stdin:
            yield line.removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"stdin is not {error.encoding} text: convert it first") from None
