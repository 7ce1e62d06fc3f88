"""`icejax chat`: answers equal a Session's, slash commands, saved conversations, errors, Ctrl-C and Ctrl-D."""

import io
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest

import icejax
from icejax.api.generate import ASSETS
from icejax.cache.registry import Full
from icejax.commands import chat
from icejax.commands.terminal import lines, printer, process
from icejax.files.atomic_folder import claim
from icejax.session import session, storage
from icejax.session.session import Session
from tests.helpers import families
from tests.text.test_chat_turns import BUNDLED

OPTIONS = ["--cache", "full", "--context-length", "600", "--compile-cache", "none", "--max-new-tokens", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The bundled model with a chat template."""
    folder = tmp_path_factory.mktemp("model") / "chatting"
    shutil.copytree(ASSETS, folder)
    (folder / "chat_template.jinja").write_text(BUNDLED)
    return folder


@pytest.fixture(scope="module")
def chatting(folder):
    return icejax.load(folder)


@pytest.fixture
def talk(folder, chatting, capsys, monkeypatch):
    """Returns a function that pipes lines into the chat, and returns exit status, stdout lines and stderr lines."""
    monkeypatch.setattr(chat, "load", lambda *_: chatting)

    def talk(*typed, options=OPTIONS):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in typed)))
        status = chat.main(["--model", str(folder), *options])
        out, err = capsys.readouterr()
        return status, out.splitlines(), err.splitlines()

    return talk


def answers(chatting, *messages, system=None):
    session = Session(*chatting, cache=Full(), context_length=600, system=system)
    return [session.chat(message, max_new_tokens=4).text for message in messages]


def test_lines_are_answered_one_behind_the_other(talk, chatting, tmp_path):
    (tmp_path / "a file").write_text("import os\nimport ")
    status, out, err = talk(
        "def f(x):", "", "  ", "/file " + str(tmp_path / "a file"), "what?", "/stats", " /quit", "/quit", "unread"
    )
    expected = answers(chatting, "def f(x):", "import os\nimport \n\nwhat?", " /quit")
    assert (status, "\n".join(out)) == (0, "\n".join(expected))
    assert err[0] == "17 characters go in front of the next message"
    stats = dict(line.strip().split("  ", 1) for line in err[1:])
    assert stats["messages"].strip() == "4" and stats["tokens"].strip().endswith(" of 600")
    assert re.fullmatch(r"\d\.\d MiB used of \d\.\d MiB reserved", stats["on the device"].strip())
    assert stats["in host memory"].strip() == "0.0 MiB used of 0.0 MiB reserved"
    assert stats["cache"].strip() == "full" and stats["first token"].endswith(" s of them compiling")


@pytest.mark.slow
def test_a_chat_that_outgrows_the_device_moves_to_pages(talk):
    """The weights take 11.3 MB, and a full cache of 768 tokens fits beside them."""
    options = ["--device-memory", "0.0186", "--context-length", "3000", *OPTIONS[4:]]
    status, out, err = talk("a" * 300, "/stats", "b" * 500, "/stats", "/quit", options=options)
    assert (status, len(out)) == (0, 2)
    assert err[0] == "cache full for the first 768 tokens, as many as fit the device; then clustered, budget 256"
    assert [line.split()[1:] for line in err if line.strip().startswith("cache ")][1:] == [
        ["full"],
        ["clustered,", "budget", "256"],
    ]
    moved = "the conversation outgrows the 768 tokens that fit the device: it continues with the clustered cache"
    assert [line for line in err if moved in line] == [f"icejax chat: warning: {moved}"]
    assert talk("a", "/quit", options=[*options, "--quiet"])[2] == []
    status, _, err = talk("a", options=[*options, "--device-memory", "0"])
    assert status == 2 and err == ["icejax chat: error: --device-memory must be a number above 0 and at most 1e+09, got 0.0"]


def test_reset_begins_anew_and_files_can_be_left_out(talk, chatting):
    options = [*OPTIONS, "--system", "s"]
    status, out, err = talk("a", f"/file {__file__}", "/file", "/reset", "/stats", "b", options=options)
    expected = answers(chatting, "a", system="s") + answers(chatting, "b", system="s")
    assert (status, "\n".join(out)) == (0, "\n".join(expected))
    assert [line.split() for line in err[1:]] == [["messages", "1"], ["tokens", "0", "of", "600"]]


def test_a_warning_comes_behind_the_answer_it_falls_into(talk, monkeypatch):
    events, stream_chat = [], Session.stream_chat

    def warning_stream(self, *arguments, **options):
        for piece in stream_chat(self, *arguments, **options):
            yield piece
            process.LOG.warning("the disk is full")

    monkeypatch.setattr(Session, "stream_chat", warning_stream)
    monkeypatch.setattr(printer, "write", lambda text, write=process.write: (events.append(text), write(text)))
    monkeypatch.setattr(process, "_complain", events.append)
    assert talk("a")[0] == 0
    assert len(events) > 4 and events[-2:] == ["\n", "icejax chat: warning: the disk is full"]


def test_a_conversation_is_kept_and_gone_on_with(talk, chatting, tmp_path):
    saved = tmp_path / "kept"
    status, out, err = talk("a", f"/save {saved}", "b", f"/load {saved}", "c")
    expected = answers(chatting, "a", "b")
    assert (status, "\n".join(out)) == (0, "\n".join([*expected, answers(chatting, "a", "c")[1]]))
    assert err == [f"kept in {saved}", "2 messages, 26 tokens"]


@pytest.mark.slow
def test_a_folder_holds_the_conversation_after_every_answer(talk, chatting, tmp_path, monkeypatch):
    saved, other = tmp_path / "kept", tmp_path / "other"
    session_option = ["--session", str(saved)]
    original_save = Session.save

    def save(self, path):
        with pytest.raises(icejax.InputError, match="in use by another writer"), claim(saved, mark=storage.ABOUT):
            pass
        original_save(self, path)

    monkeypatch.setattr(Session, "save", save)
    assert talk("a", options=[*OPTIONS, *session_option])[0] == 0
    resumed_options = [option for option in OPTIONS if option not in ("--context-length", "600")] + session_option
    stays_line = f"{saved} stays as it is: /save {saved} keeps this conversation there instead"
    status, out, err = talk("b", f"/save {other}", "/reset", "c", options=resumed_options)
    assert (status, "\n".join(out[:1])) == (0, answers(chatting, "a", "b")[1].split("\n")[0])
    assert err == ["2 messages, 26 tokens", f"kept in {other}", stays_line]
    contents = [message["content"] for message in Session.load(saved, *chatting).messages[::2]]
    assert contents == ["a", "b"] == [message["content"] for message in Session.load(other, *chatting).messages[::2]]
    status, _, err = talk("/reset", "d", f"/save {saved}", "e", f"/load {saved}", options=resumed_options)
    assert status == 0 and err[1:] == [stays_line, f"kept in {saved}", err[-1]] and err[-1].startswith("4 messages")
    assert [message["content"] for message in Session.load(saved, *chatting).messages[::2]] == ["d", "e"]
    assert sorted(os.listdir(tmp_path)) == ["kept", "other"]
    status, out, err = talk("a", options=[*resumed_options, "--system", "s"])
    assert (status, out) == (2, []) and err == [
        "icejax chat: error: a session's system message is set when it begins: leave --system out"
    ]


WRONG = {
    "unknown": ("/rest", "there is no /rest: expected a message or one of /file, /save, /load, /undo, /regen, /reset, /stats, /help, /quit (did you mean /reset?)"),
    "number": ("/undo 3", "/undo stands alone on its line, got '3' after it"),
    "no folder": ("/save", "/save needs a folder: /save DIR"),
    "nothing to load": ("/load", "/load needs a folder: /load DIR"),
    "nothing to keep": ("/save {tmp}/x", "the session is empty: ask something before saving it"),
    "no session": ("/load {tmp}", "{tmp} is no session: expected a folder that Session.save or --session wrote"),
    "no file": ("/file {tmp}/x", "{tmp}/x cannot be read: No such file or directory"),
    "no text": ("/file {tmp}/bytes", "{tmp}/bytes is not UTF-8 text (byte 0): convert it first"),
    "zero byte": ("/file a\0b", "/file takes the name of a file, which has no zero byte"),
    "long": ("x" * 700, "prompt 1 has 721 tokens and the context holds 600, the answer included: shorten it, or raise --context-length if the model can take it"),
}  # fmt: skip


def test_bad_line_is_told_in_one_line_and_the_chat_goes_on(talk, chatting, tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff")
    bad_lines = [case.format(tmp=tmp_path) for case, _ in WRONG.values()]
    status, out, err = talk(*bad_lines, "a")
    assert (status, "\n".join(out)) == (0, answers(chatting, "a")[0])
    expected = [f"icejax chat: error: {message.format(tmp=tmp_path)}" for _, message in WRONG.values()]
    assert err == expected


MORE = (
    "/undo takes the last turn back; for more room /save DIR and begin again with --session DIR and a larger --context-length"
)


@pytest.mark.slow
def test_a_full_context_is_told_before_and_nothing_is_lost(talk, chatting, tmp_path):
    """The refused message is answered after /undo, and in a larger context behind all that was said."""
    saved, first = tmp_path / "kept", "x" * 572
    status, out, err = talk("a", "/undo", first, "b", f"/save {saved}", "/undo", "b")
    assert (status, "\n".join(out)) == (
        0,
        "\n".join(answers(chatting, "a") + answers(chatting, first) + answers(chatting, "b")),
    )
    full = "the session holds 597 tokens and the text has 24: its context of 600 is full"
    ways = "shorten the text, take a turn back (undo), or load the saved chat with a larger context_length"
    taken_back = "the last message and its answer are taken back"
    assert err == [
        taken_back,
        f"room for 3 more of 600 tokens, and an answer may take 4: {MORE}",
        f"icejax chat: error: {full}; {ways}",
        f"the conversation is as it was: {MORE}",
        f"kept in {saved}",
        taken_back,
    ]
    longer = [*OPTIONS, "--session", str(saved), "--context-length", "700"]
    status, out, err = talk("b", "/stats", options=longer)
    assert err[0] == "2 messages, which the next message prefills again in a context of 700 tokens"
    session = Session(*chatting, cache=Full(), context_length=700)
    session.chat(first, max_new_tokens=4)
    assert (status, "\n".join(out)) == (0, session.chat("b", max_new_tokens=4).text)
    assert ["tokens", "625", "of", "700"] in [line.split() for line in err]
    assert Session.load(saved, *chatting).context_length == 700


def test_a_chat_to_be_prefilled_anew_counts_what_it_will_hold(chatting):
    """After a turn is taken back: the cache holds that turn, and the next message's prefill does not."""
    session = Session(*chatting, cache=Full(), context_length=600)
    for text in ("a", "x" * 400):
        session.chat(text, max_new_tokens=4)
    session.undo()
    first = session.messages[1]["content"]
    held = len(chatting[1](f"[user] a<eos>\n[assistant] {first}")["input_ids"])
    assert session.room == 600 - held > 500 and len(session.token_ids) > 400
    messages = list(session.messages)
    new = held + len(chatting[1]("<eos>\n[user] <eos>\n[assistant] ")["input_ids"]) + 560
    with pytest.raises(icejax.ContextFull, match=f"^the session and the text have {new} tokens: its context of 600 is full"):
        session.chat("x" * 560)
    assert session.messages == messages and session.chat("x", max_new_tokens=2).new_tokens > 0


def test_freed_memory_goes_back_after_each_answer(talk, monkeypatch):
    calls = []
    monkeypatch.setattr(chat.heap, "give_back", lambda: calls.append(1))
    talk("a", "/stats", "b")
    assert len(calls) == 2


def test_an_answer_that_the_context_cuts_is_told_before(talk):
    status, out, err = talk("x" * 571, options=[*OPTIONS[:-1], "9"])
    assert (status, len(out)) == (0, 1) and err == [
        "icejax chat: warning: the context of 600 tokens has room for an answer of 8, not 9",
        f"room for 0 more of 600 tokens, and an answer may take 9: {MORE}",
    ]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0"),
        (["--budget", "x"], "argument --budget: invalid int value: 'x'"),
        (["--sesion", "x"], "unrecognized arguments: --sesion x (did you mean --session?)"),
        (["--x\n\x1b[31m"], r"unrecognized arguments: --x\n\x1b[31m"),
        (["--host-memory-limit", "0"], "--host-memory-limit must be a number above 0 and at most 1e+09, got 0.0"),
    ],
)
def test_wrong_options_are_told_before_the_model_is_loaded(capsys, monkeypatch, options, message):
    monkeypatch.setattr(chat, "load", lambda *_: pytest.fail("the model was loaded"))
    assert chat.main(options) == 2
    assert capsys.readouterr() == ("", f"icejax chat: error: {message}\n")


def test_without_a_template_nothing_is_asked(bundled, capsys, monkeypatch):
    monkeypatch.setattr(chat, "load", lambda *_: bundled)
    monkeypatch.setattr(chat, "piped", lambda _: pytest.fail("it asked"))
    assert chat.main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("icejax chat: error: the tokenizer has no chat template: ") and err.count("\n") == 1


def test_a_text_without_a_template_is_no_chat(talk, chatting, tmp_path):
    session = Session(*chatting, cache=Full(), context_length=600)
    session.ask("x", max_new_tokens=1)
    session.save(tmp_path / "raw")
    status, out, err = talk(f"/load {tmp_path / 'raw'}")
    message = "the session is not a chat: continue with icejax.generate, or choose another folder"
    assert (status, out, err) == (0, [], [f"icejax chat: error: {message}"])


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_a_full_stdout_ends_the_conversation(talk, monkeypatch):
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))
    status, _, err = talk("a", "b")
    assert status == 2 and err == [
        "icejax chat: error: stdout cannot be written (No space left on device): choose another place for the answer"
    ]


def test_stdin_that_is_no_text_is_one_line(talk, capsys, monkeypatch, folder):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert chat.main(["--model", str(folder), *OPTIONS]) == 2
    assert capsys.readouterr() == ("", "icejax chat: error: stdin is not utf-8 text: convert it first\n")


def test_ctrl_c_in_a_prefill_leaves_the_message_out(talk, chatting, monkeypatch):
    """The test calls the Ctrl-C handler after the first layer of "stop": with a new cache, then with a filled one."""
    session = Session(*chatting, cache=Full(), context_length=600)
    expected = [session.chat(text, max_new_tokens=limit).text for text, limit in (("a", 4), ("stop", 1), ("b", 4))]
    handlers, original_stream_chat = [], Session.stream_chat

    def stream_chat(self, text, *, progress, **options):
        def interrupting_progress(phase, done, total):
            if (phase, done) == ("prefill", 1) and "stop" in text:
                handlers[-1]()
            progress(phase, done, total)

        return original_stream_chat(self, text, progress=interrupting_progress, **options)

    class Typed(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(Session, "stream_chat", stream_chat)
    monkeypatch.setattr(chat, "instead_of_ending", lambda action: _record_handler(handlers, action))
    monkeypatch.setattr(io, "StringIO", Typed)
    monkeypatch.setattr(chat, "typed", lambda: lines.piped(lambda: 600))
    status, out, err = talk("stop", "a", "stop", "b")
    assert (status, "\n".join(out)) == (0, "\n".join(expected))
    assert err == ["ended before there was an answer: the conversation is as it was"]


def _record_handler(handlers, action):
    handlers.append(action)
    return chat.contextlib.nullcontext()


@pytest.mark.slow
def test_ctrl_c_ends_the_answer_and_ctrl_d_the_conversation(folder, tmp_path):
    endless = tmp_path / "endless"
    shutil.copytree(folder, endless)
    families.remove_eos(endless)
    arguments = ["--model", str(endless), "--cache", "full", "--max-new-tokens", "20000", "--session", str(tmp_path / "kept")]
    code = (
        f"from icejax.commands.terminal.process import launch; launch('icejax.commands.chat', {arguments}, name='icejax chat')"
    )
    terminal, child_end = pty.openpty()
    old_handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # in a background job children would ignore it
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state"), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", "import os, fcntl, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); " + code],
        stdin=child_end, stdout=child_end, stderr=child_end, env=environment,
    )  # fmt: skip
    signal.signal(signal.SIGINT, old_handler)
    os.close(child_end)
    shown = b""

    def wait_until(condition) -> None:
        nonlocal shown
        deadline = time.monotonic() + 120
        while not condition(shown):
            assert time.monotonic() < deadline and process.poll() is None, shown
            if select.select([terminal], [], [], 0.2)[0]:
                shown += os.read(terminal, 4096)

    try:
        wait_until(lambda output: b"\x1b[?2004h" in output)  # bracketed paste is on: the prompt is shown
        os.write(terminal, b"dropped\x03")
        wait_until(lambda output: output.count(b"\x1b[?2004h") == 2)
        os.write(terminal, b"first\r")
        wait_until(lambda output: b"prefill layers" in output)
        os.write(terminal, b"\x03")
        wait_until(lambda output: b"\x1b[?2004h" in output.partition(b"the conversation is as it was")[2])
        shown = b""
        os.write(terminal, b"import\r")
        wait_until(
            lambda output: len(output.partition(b"\x1b[1A\x1b[2K")[2]) > 100
        )  # the progress bar is cleared, the answer streams
        os.write(terminal, b"\x03")
        shown = b""
        wait_until(lambda output: b"\x1b[?2004h" in output)
        os.write(terminal, b"\x04")
        status = process.wait(timeout=120)
    finally:
        process.kill()
        os.close(terminal)
    assert status == 0
    messages = Session.load(tmp_path / "kept", *icejax.load(endless)).messages
    assert [message["role"] for message in messages] == ["user", "assistant"] and messages[0]["content"] == "import"
    assert 50 < len(messages[1]["content"]) < 15000


def test_undo_takes_the_last_turn_back(talk, chatting, tmp_path):
    saved = tmp_path / "kept"
    status, out, err = talk("a", "b", "/undo", "c", "/undo", "/undo", "/undo", "d", options=[*OPTIONS, "--session", str(saved)])
    expected = answers(chatting, "a", "b") + [answers(chatting, "a", "c")[1], *answers(chatting, "d")]
    assert (status, "\n".join(out)) == (0, "\n".join(expected))
    back = "the last message and its answer are taken back"
    anew = "the cache holds thoughts, a stop string or a turn that the chat leaves out: the conversation is prefilled again"
    assert [line for line in err if anew not in line] == [
        back,
        back,
        back,
        f"{saved} keeps them until the next answer",
        "icejax chat: error: there is no answer to take back: ask something first",
    ]
    assert [message["content"] for message in Session.load(saved, *chatting).messages[::2]] == ["d"]


def test_a_folder_is_without_a_turn_that_is_taken_back(talk, chatting, tmp_path):
    saved = tmp_path / "kept"
    assert talk("a", "b", "/undo", options=[*OPTIONS, "--session", str(saved)])[0] == 0
    session = Session.load(saved, *chatting)
    assert [message["content"] for message in session.messages[::2]] == ["a"]
    first, second = answers(chatting, "a", "c")
    assert session.chat("c", max_new_tokens=4).text == second
    text = f"[user] a<eos>\n[assistant] {first}<eos>\n[user] c<eos>\n[assistant] "
    assert session.token_ids[:-4] == chatting[1](text).input_ids


@pytest.mark.slow
def test_regen_draws_another_answer_to_the_last_message(talk, chatting, tmp_path):
    (tmp_path / "file").write_text("unread")
    drawn = [*OPTIONS, "--temperature", "1.5", "--seed", "3"]
    status, out, err = talk("a", f"/file {tmp_path / 'file'}", "/regen", "/regen", "/stats", options=drawn)
    sampling = icejax.Sampling(temperature=1.5)
    expected = [
        Session(*chatting, cache=Full(), context_length=600).chat("a", max_new_tokens=4, sampling=sampling, seed=seed).text
        for seed in (3, 4, 5)
    ]
    assert (status, "\n".join(out)) == (0, "\n".join(expected)) and len(set(expected)) == 3
    assert err[0] == "6 characters go in front of the next message" and err[1].split() == ["messages", "2"]


def test_regen_of_a_greedy_answer_is_refused(talk, chatting):
    status, out, err = talk("/regen", "a", "/regen", "b")
    assert (status, "\n".join(out)) == (0, "\n".join(answers(chatting, "a", "b")))
    assert err == [
        "icejax chat: error: there is no answer to take back: ask something first",
        "icejax chat: error: a greedy answer is the same again: start with --temperature 0.8, or /undo and ask otherwise",
    ]


@pytest.mark.slow
def test_a_refused_regen_keeps_the_message_and_its_answer(talk, chatting, tmp_path, monkeypatch):
    saved, next_turn, refusals = tmp_path / "kept", session.next_turn, [None, None, "the template refuses", None, None]

    def refusing(*arguments, **options):
        refusal = refusals.pop(0)
        if refusal is not None:
            raise icejax.InputError(refusal)
        return next_turn(*arguments, **options)

    monkeypatch.setattr(session, "next_turn", refusing)
    options = [*OPTIONS, "--temperature", "1.5", "--seed", "3", "--session", str(saved)]
    status, out, err = talk("a", "b", "/regen", f"/save {tmp_path / 'whole'}", "/regen", "c", options=options)
    assert status == 0 and "icejax chat: error: the template refuses" in err
    whole, kept = (Session.load(folder, *chatting).messages for folder in (tmp_path / "whole", saved))
    assert [message["content"] for message in whole[::2]] == ["a", "b"]
    assert [message["content"] for message in kept[::2]] == ["a", "b", "c"]
    assert "\n".join(out) == "\n".join(message["content"] for message in [*whole[1::2], *kept[3::2]])
