"""The user's messages of a conversation: typed at a prompt with a history, or read from the lines of stdin.

`icejax.commands.chat` calls it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.output import Output
from prompt_toolkit.output.defaults import create_output

from icejax.checks.errors import InputError
from icejax.commands.terminal.process import listen
from icejax.commands.texts import most_bytes, too_long
from icejax.files import private

LOG = logging.getLogger(__name__)


def typed(*, source: Input | None = None, shown: Output | None = None) -> Iterator[str]:
    """Yields each message that is typed, until Ctrl-D: Enter sends, Alt-Enter begins a new line, Ctrl-C drops the text.

    Args:
        source: where keys come from; None: the terminal.
        shown: where the prompt is drawn; None: the terminal, even if stdout is not one.
    """
    keys, in_message = KeyBindings(), has_focus(DEFAULT_BUFFER)  # while searching the history, Enter picks an entry
    keys.add("enter", filter=in_message)(lambda event: event.current_buffer.validate_and_handle())
    keys.add("escape", "enter", filter=in_message)(lambda event: event.current_buffer.insert_text("\n"))
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
    """Returns the history of messages, kept in a file that only the user may read, if it can be written."""
    file = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) / "icejax" / "chat"
    try:
        private.make_folder(file.parent)
        file.parent.chmod(0o700)  # an older icejax left both to the umask
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        os.fchmod(descriptor, 0o600)
        os.close(descriptor)
    except OSError as error:
        LOG.warning("what is typed is forgotten at the end: %s cannot be written (%s)", file, error.strerror)
        return InMemoryHistory()
    return FileHistory(str(file))


def piped(context_length: Callable[[], int]) -> Iterator[str]:
    """Yields the lines of stdin; InputError if they are not text, or longer than the present context can take."""
    try:
        while line := sys.stdin.readline(most_bytes(context_length()) + 1):
            text = line.removesuffix("\n")
            if len(text) > most_bytes(context_length()):
                raise too_long("a line of stdin", "characters", context_length())
            yield text
    except UnicodeDecodeError as error:
        raise InputError(f"stdin is not {error.encoding} text: convert it first") from None
