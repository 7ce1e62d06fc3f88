"""The instrument runs, and says what it is built to say."""

import json

import pytest

from bench import pages


@pytest.mark.slow
def test_quick_run_shows_what_the_tail_is_worth(capsys):
    assert pages.main(["--quick"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 2 * (1 + 2 * 3)
    found = {(r["pages"], r["score"], r["tail"], r["budget"]): r for r in rows}
    default = "tree-2048-greedy"
    with_tail, without = (found[default, "second-order", tail, 64] for tail in (True, False))
    assert with_tail["error"] < found[default, "second-order", False, 256]["error"] < without["error"]
    assert with_tail["mass"] == without["mass"] and 0 < with_tail["recall"] < 1
    assert found["exact top tokens", "oracle", False, 256]["error"] < found["exact top tokens", "oracle", False, 64]["error"]
