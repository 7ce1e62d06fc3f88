"""The prompt tokens that evicting policies keep, by layer and head, against kvpress in its own environment (make test-slow)."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from icejax.cache.registry import H2O, TOVA, AdaKV, ExpectedAttention, KeyDiff, PyramidKV, SnapKV, Streaming
from icejax.engine.prefill import prefill
from tests.helpers import families
from tests.helpers.run import plan_for

KVPRESS = Path(".venv-kvpress/bin/python").absolute()
PROMPT, BUDGET, WINDOW = 150, 60, 16
OURS = {
    "streaming": Streaming(budget=BUDGET, reassign=False),
    "snapkv": SnapKV(budget=BUDGET, window=WINDOW),
    "tova": TOVA(budget=BUDGET),
    "pyramidkv": PyramidKV(budget=BUDGET + WINDOW, window=WINDOW, beta=3),
    "adakv": AdaKV(budget=BUDGET, window=WINDOW, floor=0.0),  # kvpress has another rule for floors
    "keydiff": KeyDiff(budget=BUDGET),
    "expected-attention": ExpectedAttention(budget=BUDGET, epsilon=0.01),
    "observed": H2O(budget=PROMPT),
}


@pytest.fixture(scope="module")
def ours_and_theirs(tmp_path_factory):
    """Our model, its prompt, and the positions that kvpress keeps, by method, layer and KV head."""
    folder, theirs = tmp_path_factory.mktemp("model"), families.build(families.row("llama-gqa"))
    tokens = families.tokens(PROMPT)
    model = families.load(theirs, folder)
    (folder / "tokens.json").write_text(json.dumps(tokens))
    argv = [KVPRESS, Path(__file__).parents[1] / "helpers" / "kvpress_kept.py", folder, folder / "tokens.json", str(BUDGET)]
    result = subprocess.run(list(map(str, argv)), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return model, tokens, json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_we_keep_what_kvpress_keeps(name, ours_and_theirs):
    model, tokens, theirs = ours_and_theirs
    plan = plan_for(model, OURS[name], [tokens], 1)
    state, _, _ = prefill(model, [tokens], plan)
    for layer, (slots, heads) in enumerate(zip(state.cache.layers, theirs[name], strict=True)):
        positions, scores = np.asarray(slots.positions[0]), np.asarray(slots.scores[0])
        for head, expected in enumerate(heads):
            filled = positions[head] >= 0
            actual = positions[head][filled]
            if name == "observed":  # kvpress divides sums by the number of queries that see a token, and keeps no newest tokens
                mean_scores = scores[head][filled] / (PROMPT - actual)
                actual = actual[np.argsort(-mean_scores, kind="stable")[: len(expected)]]
            if name == "pyramidkv":  # kvpress keeps WINDOW fewer tokens, from the same ranking
                assert set(expected) < set(actual.tolist()) and abs(len(actual) - WINDOW - len(expected)) <= 1
                continue
            assert sorted(actual.tolist()) == expected, f"layer {layer}, head {head}"
