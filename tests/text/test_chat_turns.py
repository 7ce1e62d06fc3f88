"""Chat turns in a session: its tokens always equal the whole conversation rendered by the chat template."""

import dataclasses
import json
import logging
import shutil
import subprocess
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import icejax
from icejax.api.generate import ASSETS
from icejax.cache.registry import Clustered, Full
from icejax.commands import generate as command
from icejax.engine.decode.counters import NOTHING
from icejax.engine.decode.row import Row
from icejax.engine.trim import Joint
from icejax.session import messages as session_messages
from icejax.session import session as module
from icejax.session import text_cache
from icejax.session.session import Session
from icejax.text.chat_turns import addition, with_one_end
from tests.helpers import chat_templates

ADDITIONS = {
    "as it is": ("<u>a<m>", " b ", "<u>a<m> b <e><u>", "<e><u>"),
    "trimmed": ("<u>a<m>", " b \n", "<u>a<m>b<e><u>", "<e><u>"),
    "a space before it": ("<u>a<m>", "b", "<u>a<m> b<e><u>", "<e><u>"),
    "trimmed behind a line": ("<u>a<m>", "b ", "<u>a<m>\nb<e>", "<e>"),
    "nothing said": ("<u>a<m>", "", "<u>a<m><e><u>", "<e><u>"),
    "an end that the answer has too": ("<m>", "b<e>", "<m>b<e><e>", "<e>"),
    "other beginning": ("<u>a<m>", "b", "<u>A<m>b<e>", None),
    "other answer": ("<m>", "<think>t</think>b", "<m>b<e>", None),
    "cut": ("<m>", "bcd", "<m>bc", None),
}


@pytest.mark.parametrize("case", ADDITIONS)
def test_what_is_new_of_a_text(case):
    before, answer, conversation, expected = ADDITIONS[case]
    assert addition(before, answer, conversation) == expected


@pytest.mark.parametrize("family", chat_templates.FAMILIES)
def test_names_in_a_conversation_are_text(monkeypatch, family):
    """In the first message and in later ones; with parse_special they are the tokens, as in transformers."""
    tokenizer = chat_templates.tokenizer(family)
    end, name = tokenizer.eos_token_id, tokenizer.eos_token
    names = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    for parse_special in (False, True):
        scripted, messages = Scripted(monkeypatch, tokenizer), []
        session = Session(scripted.model, tokenizer, cache=Clustered())
        for question in (f"say {name}x", f"{name} now"):
            scripted.answers = [[65, end]]
            messages.append({"role": "user", "content": question})
            list(session.stream_chat(question, parse_special=parse_special))
            expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            ids, last = session.token_ids[:-2], len(messages)
            assert (ids == expected) == parse_special and tokenizer.decode(ids) == tokenizer.decode(expected)
            assert sum(token in names for token in ids) == sum(token in names for token in expected) - (
                0 if parse_special else (last + 1) // 2
            )
            messages.append({"role": "assistant", "content": tokenizer.decode([65])})
        assert len(scripted.prefilled) == 1


def test_an_end_mark_is_there_once():
    def join(held, new, seen):
        return with_one_end(held, new, seen=seen, ends=(8, 9))

    assert join([1, 9], [9, 2], 1) == join([1, 9], [9, 2], 2) == ([1, 9], [2])
    assert join([1, 8], [9, 2], 1) == ([1], [9, 2])  # the template's end mark replaces one that is not yet in the cache
    assert join([1, 8], [9, 2], 2) == ([1, 8], [9, 2])
    assert join([1, 2], [9, 2], 1) == ([1, 2], [9, 2])  # an answer without an end
    assert join([1, 2], [2, 9], 1) == ([1, 2], [2, 9])  # a letter is no end mark


LEFT_OUT = "the cache holds thoughts, a stop string or a turn that the chat leaves out: the conversation is prefilled again"


@dataclasses.dataclass
class State:
    """A stand-in for a run's state."""

    key: object = None
    sampling: object = None
    penalties: object = None
    cache = SimpleNamespace(lengths=SimpleNamespace(next_page=0, seen=jnp.zeros(1, jnp.int32)))

    def is_deleted(self):
        return False


class Scripted:
    """A stand-in for the model: its cache is a list of tokens, and its answers are set by the test."""

    def __init__(self, monkeypatch, tokenizer, ends=None, *, trims=False):
        self.cache, self.prefilled, self.answers, self.leaves = [], [], [], 1
        config = SimpleNamespace(
            context_length=2000,
            vocab_size=1000,
            num_hidden_layers=1,
            eos_token_ids=ends or (tokenizer.eos_token_id,),
            short_context=None,
        )
        self.model = SimpleNamespace(config=config, mesh=None)
        monkeypatch.setattr(text_cache, "prefill", self.prefill)
        monkeypatch.setattr(text_cache, "extend", self.extend)
        monkeypatch.setattr(text_cache, "trim", self.trim)
        monkeypatch.setattr(text_cache, "last_joint", lambda *_, same, seen: Joint(same, 0) if trims and same else None)
        monkeypatch.setattr(module, "decode_row", self.stream)
        for room, name in (
            (text_cache, "session_plan"),
            (text_cache, "DecodePrograms"),
            (text_cache, "joint_of"),
        ):
            monkeypatch.setattr(room, name, lambda *_, **__: None)
        monkeypatch.setattr(Session, "_seen", property(lambda _: len(self.cache)))
        monkeypatch.setattr(module, "pool_is_full", lambda *_: False)

    def prefill(self, model, prompts, *_, **__):
        self.cache = list(prompts[0])
        self.prefilled.append(len(self.cache))
        return State(), None, None

    def extend(self, model, tokens, *_, **__):
        self.cache.extend(tokens)
        return State(), None, None

    def trim(self, state, plan, joint):
        del self.cache[joint.tokens :]
        return state

    def stream(self, row, *_, **__):
        """Yields token by token; the last `leaves` tokens of an answer do not enter the cache."""
        ids = self.answers.pop(0)
        for i, token in enumerate(ids):
            if i < len(ids) - self.leaves:
                self.cache.append(token)
            parts = row.take(NOTHING._replace(token=token))
            yield SimpleNamespace(token_ids=(token,), **parts._asdict())
            if row.finish_reason is not None:
                return


TALK = [
    ("What is it?", "This is the answer.", "the end"),
    (" And the user?\n", " You are  a helpful assistant.\n", "cached end"),
    ("é <b>", "", "the end"),
    ("The answer to the question: {{ 1 }}", "the answer\n\n to", "no end"),
    ("Why?", "Because.", "other end"),
    ("Done?", "Yes", "the end"),
]


@pytest.mark.parametrize("family", chat_templates.FAMILIES)
def test_chat_tokens_equal_those_of_the_whole_conversation(monkeypatch, family):
    tokenizer, spec = chat_templates.tokenizer(family), chat_templates.FAMILIES[family]
    other_end = tokenizer.convert_tokens_to_ids("<unused>")
    scripted = Scripted(monkeypatch, tokenizer, ends=(tokenizer.eos_token_id, other_end))
    system = " Be brief. " if spec.system else None
    session = Session(scripted.model, tokenizer, cache=Clustered(), system=system)
    messages = [{"role": "system", "content": system}] if spec.system else []
    trims = "content'] | trim" in spec.template
    for question, answer, end in TALK:
        answer = answer.strip() if trims else answer  # else the session keeps spaces that the template strips
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        ids += {"no end": [], "other end": [other_end]}.get(end, [tokenizer.eos_token_id])
        scripted.answers, scripted.leaves = [ids or [other_end]], 0 if end == "cached end" else 1
        messages.append({"role": "user", "content": question})
        pieces = list(session.stream_chat(question))
        assert "".join(piece.text for piece in pieces) == answer
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert session.token_ids == expected + ids
        assert session.token_ids[: len(scripted.cache)] == scripted.cache
        assert len(session.token_ids) - len(scripted.cache) == scripted.leaves
        messages.append({"role": "assistant", "content": answer})
        assert session.messages == messages
    assert len(scripted.prefilled) == 1
    assert tokenizer.decode(session.token_ids).count("Be brief") == spec.system


def test_a_template_that_leaves_a_message_out_is_told(monkeypatch):
    """It adds only the end mark after the answer, which is in the cache already."""
    tokenizer = chat_templates.tokenizer("llama")
    monkeypatch.setattr(
        tokenizer,
        "chat_template",
        "{% for m in messages[:2] %}{{ m.content }}{% endfor %}{{ eos_token * (messages | length > 2) }}",
    )
    scripted = Scripted(monkeypatch, tokenizer)
    session = Session(scripted.model, tokenizer, cache=Clustered())
    scripted.answers, scripted.leaves = [[65, tokenizer.eos_token_id]], 0
    list(session.stream_chat("a"))
    before = list(session.token_ids), list(session.messages)
    with pytest.raises(icejax.InputError, match="^the chat template leaves the message out: say something else, or begin"):
        list(session.stream_chat("b"))
    assert (session.token_ids, session.messages) == before


def test_the_end_of_an_answer_is_no_text():
    """Even if the tokenizer does not call it special."""
    row = Row(SimpleNamespace(decode=lambda tokens, **_: "".join(map(chr, tokens))), (), (100,), [1], 10)
    assert [row.take(NOTHING._replace(token=token)).text for token in b"end"] == ["e", "n", ""] and row.finish_reason == "stop"


def test_a_trimmed_answer_keeps_its_own_tokens(monkeypatch):
    tokenizer = chat_templates.tokenizer("llama")
    scripted = Scripted(monkeypatch, tokenizer)
    session = Session(scripted.model, tokenizer, cache=Clustered())
    answer_ids = tokenizer(" It is.\n\n").input_ids + [tokenizer.eos_token_id]
    scripted.answers = [answer_ids, [65]]
    list(session.stream_chat("a"))
    held = list(session.token_ids)
    list(session.stream_chat("b"))
    added = tokenizer.decode(session.token_ids[len(held) : -1])
    assert held[-len(answer_ids) :] == answer_ids and session.token_ids[: len(held)] == held
    assert added == "<|start_header_id|>user<|end_header_id|>\n\nb<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    assert len(scripted.prefilled) == 1


def test_a_stop_string_does_not_stay_in_a_chat(monkeypatch, caplog):
    tokenizer = chat_templates.tokenizer("qwen2.5")
    scripted = Scripted(monkeypatch, tokenizer)
    session = Session(scripted.model, tokenizer, cache=Clustered())
    monkeypatch.setattr(session_messages, "SHORT", 0)
    scripted.answers = [tokenizer("One. STOP and more").input_ids, [65], [66]]
    assert "".join(piece.text for piece in session.stream_chat("a", stop=[" STOP"])) == "One."
    list(session.stream_chat("b"))
    messages = [dict(role="user", content="a"), dict(role="assistant", content="One."), dict(role="user", content="b")]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert session.token_ids == [*expected, 65] and len(scripted.prefilled) == 2
    assert [record.getMessage() for record in caplog.records] == [LEFT_OUT]
    list(session.stream_chat("c"))
    assert len(scripted.prefilled) == 2  # an answer without a stop string stays in the cache


def test_a_short_chat_prefilled_anew_is_no_warning(monkeypatch, caplog):
    """Each answer ends at a stop string; the third text has more than 64 tokens, and the fourth warns no more."""
    tokenizer = chat_templates.tokenizer("gemma")
    scripted = Scripted(monkeypatch, tokenizer)
    session, levels = Session(scripted.model, tokenizer, cache=Clustered()), []
    for question in ("a", "b", "0123456789" * 7, "c"):
        scripted.answers = [tokenizer("One. STOP and more").input_ids]
        caplog.clear()
        with caplog.at_level(logging.INFO, "icejax"):
            list(session.stream_chat(question, stop=[" STOP"]))
        levels.append([record.levelname for record in caplog.records if record.getMessage() == LEFT_OUT])
    assert levels == [[], ["INFO"], ["WARNING"], []] and len(scripted.prefilled) == 4


@pytest.mark.parametrize("trims", [False, True])
def test_rewriting_template_costs_what_it_rewrites(monkeypatch, caplog, trims):
    """Qwen3's template leaves out the thoughts of earlier answers; the session keeps them apart.

    A cache that can be trimmed keeps all before the thoughts; for another, the log tells once that the chat is prefilled again.
    """
    tokenizer = chat_templates.tokenizer("qwen3")
    scripted = Scripted(monkeypatch, tokenizer, trims=trims)
    monkeypatch.setattr(session_messages, "SHORT", 0)
    session = Session(scripted.model, tokenizer, cache=Clustered())
    messages = []
    for turn, (question, answer) in enumerate(
        [("a", "<think>\nhm\n</think>\n\nOne"), ("b", "<think>\n</think>\n\n2"), ("c", "3"), ("d", "4")]
    ):
        ids = tokenizer(answer).input_ids + [tokenizer.eos_token_id]
        scripted.answers = [ids]
        messages.append({"role": "user", "content": question})
        with caplog.at_level(logging.WARNING):
            list(session.stream_chat(question))
        assert session.token_ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) + ids
        messages.append({"role": "assistant", "content": answer})
        assert len(scripted.prefilled) == (1 if trims else (1, 2, 3, 3)[turn])
        assert scripted.cache == session.token_ids[:-1]
    assert [record.getMessage() for record in caplog.records] == ([] if trims else [LEFT_OUT])
    assert session.messages[1] == {"role": "assistant", "content": "One", "reasoning": "hm"}


DATED = chat_templates.LLAMA.replace("{% set loop", "{{ strftime_now('%d %b %Y %H:%M:%S') }}{% set loop")
BUNDLED = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}[assistant] "


def test_a_date_is_that_of_the_beginning(monkeypatch):
    tokenizer = chat_templates.tokenizer("llama")
    monkeypatch.setattr(tokenizer, "chat_template", DATED)
    scripted = Scripted(monkeypatch, tokenizer)
    session = Session(scripted.model, tokenizer, cache=Clustered())
    session.started = 86400.0 * 365
    scripted.answers = [[65], [65]]
    list(session.stream_chat("a"))
    list(session.stream_chat("b"))
    assert len(scripted.prefilled) == 1 and "Jan 1971" in tokenizer.decode(session.token_ids)


@pytest.fixture
def chatting(bundled, monkeypatch):
    """The bundled model, and its tokenizer with a chat template added."""
    monkeypatch.setattr(bundled[1], "chat_template", BUNDLED)
    return bundled


def test_a_saved_chat_goes_on_as_if_it_had_not_been(chatting, tmp_path):
    session = Session(*chatting, cache=Full(), context_length=600, system="s")
    for piece in session.stream_chat("import os", max_new_tokens=9):
        if piece.new_tokens == 4:
            break  # the answer is the text so far
    assert session.messages[-1]["content"] == chatting[1].decode(session.token_ids[-4:])
    session.chat("def main", max_new_tokens=5)
    session.save(tmp_path / "kept")
    loaded = Session.load(tmp_path / "kept", *chatting)
    assert (loaded.messages, loaded.started) == (session.messages, session.started)
    answers = [x.chat("x = 1", max_new_tokens=6) for x in (session, loaded)]
    assert answers[0].token_ids == answers[1].token_ids and session.token_ids == loaded.token_ids
    np.testing.assert_array_equal(session._cache.run.step.logits, loaded._cache.run.step.logits)
    text = "".join(f"[{m['role']}] {m['content']}<eos>\n" for m in session.messages[:-1]) + "[assistant] "
    assert session.token_ids[: -answers[0].new_tokens] == chatting[1](text).input_ids


@pytest.mark.slow
@pytest.mark.parametrize("cache", [Full(), Clustered(budget=2000, page_size=8, compact_every=32)], ids=str)
def test_a_turn_taken_back_leaves_no_trace(chatting, cache):
    """A budget for all tokens approximates nothing, so the next answer is that of a chat without the turn."""
    sessions = [Session(*chatting, cache=cache, context_length=1200) for _ in range(2)]
    for session in sessions:
        session.chat("import os\n" * 9, max_new_tokens=40)
    sessions[0].chat("def main():" * 9, max_new_tokens=60)
    sessions[0].undo()
    answers = [session.chat("x = 1\n" * 5, max_new_tokens=30) for session in sessions]
    assert (
        len(answers[0].token_ids) == 30
        and answers[0].token_ids == answers[1].token_ids
        and sessions[0].token_ids == sessions[1].token_ids
    )
    assert sessions[0]._cache.first == sessions[1]._cache.first  # the first text was not prefilled again


def test_a_turn_taken_back_stays_so_after_an_interrupt(chatting, monkeypatch):
    """Ctrl-C comes before the cache changes: it still holds the turn, and the next message must not be put behind it."""
    sessions = [Session(*chatting, cache=Full(), context_length=600) for _ in range(2)]
    for session in sessions:
        session.chat("import os", max_new_tokens=4)
    sessions[0].chat("def main():", max_new_tokens=4)
    sessions[0].undo()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(text_cache, "trim", interrupted)
        sessions[0].chat("x = 1", max_new_tokens=6)
    answers = [session.chat("x = 1", max_new_tokens=6) for session in sessions]
    assert answers[0].token_ids == answers[1].token_ids and sessions[0].token_ids == sessions[1].token_ids


def test_raw_texts_and_chats_do_not_mix(chatting):
    session = Session(*chatting, cache=Full(), context_length=300)
    session.ask("x", max_new_tokens=2)
    with pytest.raises(icejax.InputError, match="the session is not a chat: continue with ask, or begin another"):
        session.chat("y")
    session = Session(*chatting, cache=Full(), context_length=300)
    session.chat("x", max_new_tokens=2)
    held = list(session.token_ids), list(session.messages)
    with pytest.raises(icejax.InputError, match="the session holds a chat: continue with chat, or begin another"):
        session.ask("y")
    for message_text, message in (("", "a message is empty: expected some text"), ("x" * 260, "its context of 300 is full")):
        with pytest.raises(icejax.InputError, match=message):
            session.chat(message_text)
    with pytest.raises(icejax.InputError, match="seed must be at least 0"):
        session.chat("y", seed=-1)
    assert (session.token_ids, session.messages) == held
    with pytest.raises(icejax.InputError, match="the session holds a chat"):
        Session(*chatting, system="s").ask("y")


def shell(folder, template):
    """Writes a checkpoint with this chat template; returns command-line arguments that chat with it in a session."""
    shutil.copytree(ASSETS, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(template)
    options = ["--session", str(folder / "kept"), "--max-new-tokens", "3", "--compile-cache", "none", "--cache", "full"]
    return ["--model", str(folder / "model"), "--chat", *options]


def test_the_shell_chats_on_in_a_session(tmp_path, capsys):
    chats = shell(tmp_path, BUNDLED)
    assert command.main([*chats, "--system", "s", "--prompt", "a", "--context-length", "300"]) == 0
    assert command.main([*chats, "--prompt", "b", "--json"]) == 0
    out, err = capsys.readouterr()
    info = json.loads((tmp_path / "kept" / "session.json").read_text())
    assert [m["role"] for m in info["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    text = "".join(f"[{m['role']}] {m['content']}<eos>\n" for m in info["messages"][:-1]) + "[assistant] "
    last_answer = json.loads(out.splitlines()[-1])
    model, tokenizer = icejax.load(tmp_path / "model")
    token_ids = Session.load(tmp_path / "kept", model, tokenizer).token_ids
    assert token_ids[: -last_answer["new_tokens"]] == tokenizer(text).input_ids and err == ""
    assert command.main([*chats, "--prompt", "c", "--system", "t"]) == 2
    message = "a session's system message is set when it begins: leave --system out"
    assert capsys.readouterr() == ("", f"icejax.generate: error: {message}\n")


@pytest.mark.slow
def test_the_shell_warns_in_one_line_that_a_template_rewrites(tmp_path):
    chats = [sys.executable, "-m", "icejax.generate", *shell(tmp_path, "{{ messages | length }}" + BUNDLED), "--quiet"]
    for prompts in (["a", "b", "c"], ["d"]):
        prompt_options = [part for prompt in prompts for part in ("--prompt", prompt)]
        limits = ["--context-length", "300"] if len(prompts) == 3 else []
        result = subprocess.run([*chats, *prompt_options, *limits], capture_output=True, text=True)
        assert result.returncode == 0
        assert result.stderr.count("\n") == 1
        assert result.stderr.endswith("the chat template rewrites earlier turns: the conversation is prefilled again\n")
