"""`bench.followup` times later texts of a session, and counts the programs that they compile."""

import json

from bench import followup


def test_later_texts_compile_nothing(capsys):
    line = "--behind 40 --new 5,20 --policies full,clustered --repeats 2 --context-lengths 400"
    assert followup.main(line.split()) == 0
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert [(row["policy"], row["new"]) for row in rows] == [("full", 5), ("clustered", 5), ("full", 20), ("clustered", 20)]
    for row in rows:
        assert row["compiled"] == 0 and 0 < row["followup_s"]
        assert abs(row["ratio"] - row["followup_s"] / (row["prefill_s"] + row["attention_s"])) < 0.1 * row["ratio"]
