"""Reading JSON files from strangers: every fault is one error line, and no file hangs the reader or exhausts memory."""

import os

import pytest

from icejax.checks import json_file
from icejax.checks.errors import InputError

FAULTS = {
    "nested": (b'{"a": ' + b"[" * 200_000, "not valid JSON here (nested too deeply)"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON (Exceeds the limit"),
    "twice": (b'{"a": {"b": 1, "c": 2, "b": 3}}', "not valid JSON ('b' is given twice)"),
    "nul": (b'\0{"a": 1}', "not valid JSON (Expecting value"),
    "latin 1": (b'{"a": "caf\xe9"}', "is no UTF-8 text (byte 10): expected a JSON object"),
    "cut": (b'{"a": ', "not valid JSON (Expecting value"),
    "list": (b"[1]", "expected a JSON object, found a list"),
    "text": (b'"a"', "expected a JSON object, found a str"),
    "null": (b"null", "expected a JSON object, found a NoneType"),
    "empty": (b"", "not valid JSON (Expecting value"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_one_line(tmp_path, case):
    content, message = FAULTS[case]
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(InputError) as error:
        json_file.read(file)
    assert str(error.value).startswith(str(file)) and message in str(error.value) and "\n" not in str(error.value)


def test_a_byte_order_mark_and_numbers_that_are_none_are_read(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": [NaN, -Infinity, 1e999]}')
    first, *others = json_file.read(tmp_path / "a.json")["a"]
    assert first != first and others == [-float("inf"), float("inf")]


def test_what_is_no_file_or_too_large_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # reading a pipe that nobody writes to would never end
    for name in (".", "pipe"):
        with pytest.raises(InputError, match="is no file: expected one with a JSON object"):
            json_file.read(tmp_path / name)
    with open(tmp_path / "large", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(InputError, match="has 1099511627776 bytes: expected a JSON object of at most 104857600"):
        json_file.read(tmp_path / "large")
    with pytest.raises(FileNotFoundError):
        json_file.read(tmp_path / "missing")


def test_a_message_is_one_short_line_whatever_it_quotes():
    message = str(InputError("a\nb\x1b[31m\u2028\udce9 é 日" + "x" * 10**6))
    assert message.startswith("a\\nb\\x1b[31m\\u2028\\udce9 é 日xxx") and len(message) < 4100
