"""The instrument runs, and says what it is built to say."""

import json

import pytest

from bench import methods, pages, sharing


@pytest.mark.slow
def test_quick_run_shows_what_the_tail_and_the_choice_of_tokens_are_worth(capsys):
    assert pages.main(["--quick"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    oracle = {r["budget"]: r["error"] for r in rows if r["score"] == "oracle"}
    of = [r for r in rows if r["pages"] == "tree-2048-greedy"]
    assert oracle[256] < oracle[64] and len(of) == 2 * len(methods.METHODS)

    def error(budget, **what):
        method = vars(methods.Method(**what))
        (row,) = (r for r in of if r["budget"] == budget and all(r[key] == value for key, value in method.items()))
        assert row["exact_tokens"] <= budget and 0 < row["recall"] < 1
        return row["error"]

    plain = dict(tail=False, walk=False)
    # So few prompts leave the rounding's part to chance: on one machine 0.0435 against 0.0401 with digests of int8.
    for budget in (64, 256):
        assert error(budget) < error(budget, **plain)
        assert error(budget, candidates=4) < error(budget, candidates=2) < error(budget)
        assert error(budget, candidates=None) < error(budget, candidates=4)
        assert error(budget, candidates=None, digest_dtype="int8") < 1.05 * error(budget, candidates=None) + 0.005
        assert error(budget, candidates=None, page_dtype="int8") < 1.05 * error(budget, candidates=None) + 0.005
    assert error(64) < error(256, **plain)
    assert error(64, candidates=None) < oracle[64]


@pytest.mark.slow
def test_a_layer_that_looks_facts_up_cannot_take_the_pages_of_another(capsys):
    assert sharing.main(["--length", "2048", "--prompts", "1", "--budgets", "64"]) == 0
    rows = {(r["layer"], r["pages"]): r for r in map(json.loads, capsys.readouterr().out.splitlines())}
    assert len(rows) == 4 + 3 + 2 * 6 and rows[1, "own"]["agreement"] == 1.0
    for name in ("of layer 0", "of layer 0, own partition", "guess"):
        assert rows[1, name]["error"] > 2 * rows[1, "own"]["error"]
    assert 0 < rows[3, "guess"]["agreement"] < 1
