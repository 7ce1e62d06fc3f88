"""The record of answers: an interrupted run continues, and answers of another model are refused."""

import errno
import fcntl
import json
import stat

import pytest

from icejax.checks.errors import InputError
from icejax.evaluation.answers import Answers
from icejax.files.whole_lines import WholeLines
from icejax.runtime import processes

IDENTITY = dict(model="a", cache="full")
TOOK = dict(new_tokens=3, tpot_s=0.5)


def test_answers_are_read_again_and_a_torn_line_is_dropped(tmp_path):
    file = tmp_path / "answers.jsonl"
    first = Answers(file, IDENTITY)
    one, two, three = (first.key(["generate_until", text, {}]) for text in ("one", "two", "three"))
    first.add(one, "1", dict(new_tokens=7))
    first.add(two, [-2.5, True], TOOK)
    with file.open("ab") as torn:
        torn.write(b'{"request": "' + three.encode())
    first.close()
    again = Answers(file, IDENTITY)
    assert (again[one], again[two], three in again) == ("1", [-2.5, True], False)
    again.add(three, "3", TOOK)
    assert (again.measured(one), again.measured(two)) == (dict(new_tokens=7), TOOK)
    again.close()
    assert Answers(file, IDENTITY)[three] == "3"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("text", [b'{"cache": "full", "mo', b""])
def test_a_file_that_ends_in_its_first_line_begins_anew(tmp_path, text):
    file = tmp_path / "answers.jsonl"
    file.write_bytes(text)
    Answers(file, IDENTITY).add("k", 1, TOOK)
    assert Answers(file, IDENTITY)["k"] == 1


def test_other_answers_are_refused_and_stay(tmp_path):
    file = tmp_path / "answers.jsonl"
    Answers(file, IDENTITY).add("k", 1, TOOK)
    before = file.read_bytes()
    with pytest.raises(InputError, match="another model, cache, context length or version"):
        Answers(file, IDENTITY | dict(cache="clustered"))
    assert file.read_bytes() == before
    for line in (b"[1]\n", b'{"request": "k", "answer": 1}\n'):
        file.write_bytes(before + line)
        with pytest.raises(InputError, match="no file of answers"):
            Answers(file, IDENTITY)
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    with pytest.raises(InputError, match="another model"):
        Answers(other, IDENTITY)
    assert other.read_text() == "mine"
    with pytest.raises(InputError, match="cannot be used: Is a directory"):
        Answers(tmp_path, IDENTITY)


def test_one_run_at_a_time_writes_a_file(tmp_path):
    first = Answers(file := tmp_path / "answers.jsonl", IDENTITY)
    first.add("k", 1, TOOK)
    with pytest.raises(
        InputError, match=f"^{file} is being written by another process: wait for it, or give another --output$"
    ):
        Answers(file, IDENTITY)
    first.close()
    assert (first["k"], Answers(file, IDENTITY)["k"]) == (1, 1)


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, caplog):
    def lacking(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", lacking)
    Answers(file := tmp_path / "answers.jsonl", IDENTITY).add("k", 1, TOOK)
    assert file.read_bytes().endswith(b"\n")
    assert caplog.messages == [f"{file} is on a file system without locks: let no other process write it"]


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    answers = Answers(file := tmp_path / "answers.jsonl", IDENTITY)

    def full(self, line):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(WholeLines, "add", full)
    with pytest.raises(InputError, match=f"^{file} cannot be used: No space left on device$"):
        answers.add("k", 1, TOOK)


def test_a_group_has_the_answers_of_its_first_process(monkeypatch):
    sent, first, other = [], Answers(), Answers()
    monkeypatch.setattr(processes, "from_first", lambda value: sent.append(value) or json.loads(json.dumps(sent[0])))
    first.add("k", [-2.5, True], TOOK)
    other.add("own", 1, TOOK)
    for answers in (first, other):
        answers.share()
    assert (other["k"], other.measured("k"), "own" in other) == ([-2.5, True], TOOK, False)
