"""The command ``icejax chat``: a conversation in the terminal, with answers on stdout and all else on stderr."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from icejax.api.prompts import ContextFull, first_messages
from icejax.checks.errors import InputError, quoted, suggestion
from icejax.commands import options
from icejax.commands.loading import load, resume, resume_or_start, with_model_sampling
from icejax.commands.terminal.lines import piped, typed
from icejax.commands.terminal.phases import Phases
from icejax.commands.terminal.printer import Printer
from icejax.commands.terminal.process import OutputError, ending, instead_of_ending, uncut
from icejax.commands.terminal.stderr import stderr_console
from icejax.commands.texts import read_text
from icejax.engine.request import AnswerOptions
from icejax.engine.response import GenerationResponse, join
from icejax.engine.sampling import check_bias
from icejax.files.atomic_folder import Claim, claim
from icejax.runtime import heap
from icejax.runtime.out_of_memory import report_out_of_memory
from icejax.runtime.progress import PREFILL
from icejax.session.messages import has_answer
from icejax.session.session import Session
from icejax.session.storage import ABOUT
from icejax.session.usage import session_usage
from icejax.text.chat_template import render

HELP = """\
/file PATH   put a text file in front of the next message; without PATH none
/save DIR    keep the conversation in a folder
/load DIR    continue a saved conversation
/undo        take the last message and its answer back
/regen       answer the last message again, with other draws
/reset       begin a new conversation
/stats       show the size of the conversation, and the cost of the last answer
/help        this
/quit        leave (or Ctrl-D)
Enter sends, Alt-Enter begins a new line, Ctrl-C ends an answer or drops a line. A space before / makes it a message."""


def main(argv: list[str] | None = None, *, name: str = "icejax chat") -> int:
    """Runs the conversation and returns the exit status of `process.ending`."""
    return ending(name, lambda: _run(argv, name))


def _run(argv: list[str] | None, name: str) -> None:
    arguments = options.chat_parser(name).parse_args(argv)
    answer = options.answer(arguments)
    options.policy(arguments)
    options.template_arguments(arguments)
    options.memory_limits(arguments)  # bad options are reported before the model is loaded
    answer = with_model_sampling(arguments, answer, stderr_console())
    options.tell_greedy(arguments, [answer.sampling])
    manager = claim(arguments.session, mark=ABOUT) if arguments.session is not None else contextlib.nullcontext()
    with report_out_of_memory("use shorter messages, or a 16-bit --dtype", arguments.session), manager as session_claim:
        chat = Chat(arguments, answer, session_claim, name=name)
        for text in typed() if sys.stdin.isatty() else piped(lambda: chat.context_length):
            if not chat.take(text):
                break


WITH_ARGUMENT = ("/file", "/save", "/load", "/help")


class Ended(Exception):
    """Raised to stop a prefill after Ctrl-C."""


class Chat:
    """A conversation and its slash commands."""

    def __init__(self, arguments: argparse.Namespace, answer: AnswerOptions, held: Claim | None, *, name: str) -> None:
        """Loads the model, and the saved conversation if there is one.

        Args:
            arguments: options of the command line.
            answer: options of every answer.
            held: the folder that the conversation is saved in after every answer; None: it is not saved.
            name: the prefix of error messages.
        """
        self._console = stderr_console(highlight=False)
        self._arguments, self._answer, self._held, self._name = arguments, answer, held, name
        self._model, self._tokenizer = load(arguments, self._console)
        check_bias(answer.sampling, self._model.config.vocab_size)
        # Reports a faulty chat template before the first message.
        messages = [*first_messages(arguments.system), {"role": "user", "content": "-"}]
        render(self._tokenizer, messages, options.template_arguments(arguments))
        self._session = self._checked_chat(resume_or_start(arguments, self._model, self._tokenizer, self._console))
        self._keeping = held is not None  # False once the conversation is not the one in the folder
        self._files: list[str] = []
        self._last: GenerationResponse | None = None
        self._retries = 0  # how often the last message was answered again
        self._commands: dict[str, Callable[[str], None]] = {
            "/file": self._file,
            "/save": self._save,
            "/load": self._load,
            "/undo": self._undo,
            "/regen": self._regen,
            "/reset": self._reset,
            "/stats": self._stats,
            "/help": lambda _: self._tell(HELP),
        }

    @property
    def context_length(self) -> int:
        """The largest number of tokens of the conversation."""
        return self._session.context_length

    def take(self, text: str) -> bool:
        """Runs a command or answers a message; False for /quit. An InputError is printed in one line."""
        word, *rest = text.split(maxsplit=1) or [""]
        command = text.startswith("/")
        if command and word == "/quit":
            return False
        try:
            if command:
                self._do(word, *rest)
            elif word:
                if self._reply("\n\n".join([*self._files, text]), self._answer):
                    self._files, self._retries = [], 0
        except OutputError:
            raise
        except InputError as error:
            self._tell(f"{self._name}: error: {error}")
            if isinstance(error, ContextFull) and self._session.token_ids:
                self._tell(f"the conversation is as it was: {self._more_room()}")
        return True

    def _do(self, word: str, rest: str = "") -> None:
        if word not in self._commands:
            known = [*self._commands, "/quit"]
            raise InputError(f"there is no {word}: expected a message or one of {', '.join(known)}{suggestion(word, known)}")
        if "\0" in rest:
            raise InputError(f"{word} takes the name of a file, which has no zero byte")
        if rest.rstrip() and word not in WITH_ARGUMENT:
            raise InputError(f"{word} stands alone on its line, got {quoted(rest.rstrip())} after it")
        self._commands[word](rest.rstrip())

    def _reply(self, text: str | None, answer: AnswerOptions) -> bool:
        """Streams the answer to a message, None being the last one, and saves it; says whether there was one.

        Where somebody types, Ctrl-C ends the answer: its text so far is then the answer.
        """
        session, pressed = self._session, threading.Event()
        pieces, save_to = [], self._held if self._keeping else None
        with contextlib.ExitStack() as stack:
            stack.enter_context(uncut())
            if sys.stdin.isatty():
                stack.enter_context(instead_of_ending(pressed.set))
            phases = stack.enter_context(Phases(self._console, quiet=self._arguments.quiet))
            printer = Printer(phases)

            def show_phase(phase: str, done: int, total: int) -> None:
                # A later turn changes a cache, which must not stop half-way.
                if pressed.is_set() and phase == PREFILL and not session.token_ids:
                    raise Ended
                phases(phase, done, total)

            try:
                for piece in session.stream_chat(text, progress=show_phase, save_to=save_to, **vars(answer)):
                    printer.piece(piece)
                    pieces.append(piece)
                    if pressed.is_set():
                        break
            except Ended:
                phases.stop()
                self._tell("ended before there was an answer: the conversation is as it was")
                return False
            self._last = join(pieces)
            printer.end(self._last)
            if save_to is not None:
                session.save(save_to)
        self._tell_room()
        heap.give_back()  # while somebody reads the answer
        return True

    def _tell_room(self) -> None:
        """Says so where the context has less room than an answer may need."""
        session, most = self._session, self._answer.max_new_tokens
        if session.room < most:
            counts = f"room for {session.room:,} more of {session.context_length:,} tokens, and an answer may take {most:,}"
            self._tell(f"{counts}: {self._more_room()}")

    def _more_room(self) -> str:
        """Returns what makes room in the context."""
        again = "begin again with" if self._keeping else "/save DIR and begin again with --session DIR and"
        return f"/undo takes the last turn back; for more room {again} a larger --context-length"

    def _file(self, path: str) -> None:
        if not path:
            self._files = []
            return
        self._files.append(read_text(Path(os.path.expanduser(path)), context_length=self.context_length))
        self._tell(f"{len(self._files[-1]):,} characters go in front of the next message")

    def _save(self, folder: str) -> None:
        place = _folder("/save", folder)
        if self._is_held(place):
            self._session.save(self._held)
            self._keeping = True
        else:
            self._session.save(place)
        self._tell(f"kept in {place}")

    def _load(self, folder: str) -> None:
        place = _folder("/load", folder)
        self._session = self._checked_chat(resume(self._arguments, place, self._model, self._tokenizer))
        self._last = None
        self._keep(self._is_held(place))

    def _undo(self, _: str) -> None:
        self._session.undo()
        self._last = None
        self._tell("the last message and its answer are taken back")
        if not self._keeping:
            return
        if self._session.token_ids:
            self._session.save(self._held)
        else:
            self._tell(f"{self._held.path} keeps them until the next answer")

    def _regen(self, _: str) -> None:
        complete = self._last is not None and self._last.finish_reason is not None
        if complete and not self._answer.sampling.temperature:
            raise InputError("a greedy answer is the same again: start with --temperature 0.8, or /undo and ask otherwise")
        retries = self._retries + 1
        if self._reply(None, replace(self._answer, seed=(self._answer.seed + retries) % 2**32)):
            self._retries = retries

    def _reset(self, _: str) -> None:
        self._session, self._last, self._files = self._session.fresh_copy(), None, []
        self._keep(False)

    def _keep(self, keeping: bool) -> None:
        """Sets whether answers are saved, and says so if they no longer are: the folder keeps the earlier conversation."""
        if self._keeping and not keeping:
            self._tell(f"{self._held.path} stays as it is: /save {self._held.path} keeps this conversation there instead")
        self._keeping = keeping

    def _is_held(self, place: Path) -> bool:
        return self._held is not None and os.path.realpath(place) == os.path.realpath(self._held.path)

    def _checked_chat(self, session: Session) -> Session:
        """Returns the session and prints its size if it was saved; InputError if it is not a chat."""
        if session.token_ids and not session.messages:
            raise InputError("the session is not a chat: continue with icejax.generate, or choose another folder")
        if session.token_ids:
            self._tell(f"{len(session.messages)} messages, {len(session.token_ids):,} tokens")
        elif has_answer(session.messages):
            length = f"a context of {session.context_length:,} tokens"
            self._tell(f"{len(session.messages)} messages, which the next message prefills again in {length}")
        return session

    def _stats(self, _: str) -> None:
        table, session, last = Table.grid(padding=(0, 2)), self._session, self._last
        table.add_row("messages", f"{len(session.messages)}")
        table.add_row("tokens", f"{len(session.token_ids):,} of {session.context_length:,}")
        if (held := session_usage(session)) is not None:
            table.add_row("on the device", _of_reserved(held.device_used, held.device))
            table.add_row("in host memory", _of_reserved(held.host_used, held.host))
        if last is not None:
            table.add_row("cache", last.run.cache + (f", budget {last.run.budget}" if last.run.budget is not None else ""))
            table.add_row("first token", f"{last.ttft_s:.2f} s, {last.compile_s:.2f} s of them compiling")
            if last.decode_tps is not None:
                table.add_row("tokens per second", f"{last.decode_tps:.1f}")
            if last.expert_hit_rate is not None:
                fetched = f"{last.expert_bytes_per_token / 2**20:.1f} MiB per token from the host"
                table.add_row("experts", f"{last.expert_hit_rate:.0%} were on the device, {fetched}")
        self._console.print(table)

    def _tell(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def _of_reserved(used: int, reserved: int) -> str:
    return f"{used / 2**20:.1f} MiB used of {reserved / 2**20:.1f} MiB reserved"


def _folder(word: str, name: str) -> Path:
    if not name:
        raise InputError(f"{word} needs a folder: {word} DIR")
    return Path(os.path.expanduser(name))
