"""What the command line says of itself, and of names that are nearly right."""

import dataclasses

import pytest

from icejax.cache import Clustered
from tests.test_command import run


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--promt", "x"], "unrecognized arguments: --promt x (did you mean --prompt?)"),
        (["--cache", "clusterd"], "(did you mean clustered?)"),
        (["--cache-option", "bugdet=3"], "prefetch (did you mean budget?)"),
    ],
)
def test_a_name_that_is_nearly_right_is_named(capsys, arguments, message):
    status, out, err = run(capsys, "--prompt", "x", *arguments)
    assert (status, out) == (2, "") and err.endswith(f"{message}\n") and err.count("\n") == 1


def test_every_option_of_every_cache_has_a_line(capsys):
    status, out, err = run(capsys, "--help-cache")
    assert (status, err) == (0, "") and "full:\n" in out
    for field in dataclasses.fields(Clustered):
        (line,) = [line for line in out.splitlines() if line.startswith(f"  {field.name}: ")]
        assert line.endswith(f"(default: {str(field.default).lower()})") and len(line) > len(field.name) + 30
