"""The instrument runs, and says what it is built to say."""

import json

import pytest

from bench import pages


@pytest.mark.slow
def test_quick_run_shows_what_the_tail_and_the_choice_of_tokens_are_worth(capsys):
    assert pages.main(["--quick"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    oracle = {r["budget"]: r["error"] for r in rows if r["score"] == "oracle"}
    of = [r for r in rows if r["pages"] == "tree-2048-greedy"]
    assert oracle[256] < oracle[64] and len(of) == 2 * len(pages.METHODS)

    def error(budget, **what):
        method = vars(pages.Method(**what))
        (row,) = (r for r in of if r["budget"] == budget and all(r[key] == value for key, value in method.items()))
        assert row["exact_tokens"] <= budget and 0 < row["recall"] < 1
        return row["error"]

    plain = dict(tail=False, walk=False)
    for budget in (64, 256):
        assert error(budget) < error(budget, **plain)
        assert error(budget, candidates=4) < error(budget, candidates=2) < error(budget)
        assert error(budget, candidates=4, digest_dtype="int8") < 1.05 * error(budget, candidates=4)
    assert error(64) < error(256, **plain)
    assert error(64, candidates=4) < oracle[64]
