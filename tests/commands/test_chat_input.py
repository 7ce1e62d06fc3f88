"""The prompt of `icejax chat`: keys, pasted text, and the history."""

import logging

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from icejax.commands.terminal import lines


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def keyed(keys: str) -> list[str]:
    """Returns the messages that `keys` enter."""
    with create_pipe_input() as source:
        source.send_text(keys)
        return list(lines.typed(source=source, shown=DummyOutput()))


def test_keys(state):
    enter, newline, drop, leave, up = "\r", "\x1b\r", "\x03", "\x04", "\x1b[A"
    assert keyed(f"a{enter}b{newline}c{enter}dropped{drop}d{enter}{leave}") == ["a", "b\nc", "d"]
    assert keyed(f"\x1b[200~e\r\nf\n\x1b[201~g{enter}{leave}") == ["e\nf\ng"]  # pasted
    assert keyed(f"{up}!{enter}{leave}") == ["e\nf\ng!"]  # from the history
    assert keyed(f"\x12c{enter}{enter}{leave}") == ["b\nc"]  # found by searching the history


def test_a_history_is_the_users_alone(state):
    """Where an earlier version left it open, too."""
    file = state / "icejax" / "chat"
    for _ in range(2):
        assert keyed("a\r\x04") == ["a"]
        assert [path.stat().st_mode & 0o777 for path in (file.parent, file)] == [0o700, 0o600]
        file.parent.chmod(0o755)
        file.chmod(0o644)


def test_a_history_that_cannot_be_kept_is_told(state, caplog):
    state.touch()
    with caplog.at_level(logging.WARNING):
        assert keyed("a\r\x04") == ["a"]
    assert [record.getMessage() for record in caplog.records] == [
        f"what is typed is forgotten at the end: {state}/icejax/chat cannot be written (Not a directory)"
    ]
