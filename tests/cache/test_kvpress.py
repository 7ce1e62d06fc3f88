"""What we keep of a prompt, layer by layer and head by head, against kvpress in an environment of its own (make test-slow)."""

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
    "adakv": AdaKV(budget=BUDGET, window=WINDOW, floor=0.0),  # the rules of floors differ
    "keydiff": KeyDiff(budget=BUDGET),
    "expected-attention": ExpectedAttention(budget=BUDGET, epsilon=0.01),
    "observed": H2O(budget=PROMPT),
}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A model as we have it, its prompt, and what kvpress keeps of it: positions by method, layer and KV head."""
    folder, theirs = tmp_path_factory.mktemp("model"), families.build(families.row("llama-gqa"))
    tokens = families.tokens(PROMPT)
    model = families.load(theirs, folder)
    (folder / "tokens.json").write_text(json.dumps(tokens))
    argv = [KVPRESS, Path(__file__).parents[1] / "helpers" / "kvpress_kept.py", folder, folder / "tokens.json", str(BUDGET)]
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return model, tokens, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_we_keep_what_kvpress_keeps(name, both):
    model, tokens, theirs = both
    plan = plan_for(model, OURS[name], [tokens], 1)
    state, _, _ = prefill(model, [tokens], plan)
    for layer, (slots, expected) in enumerate(zip(state.cache.layers, theirs[name], strict=True)):
        positions, scores = np.asarray(slots.positions[0]), np.asarray(slots.scores[0])
        for head, of in enumerate(expected):
            there = positions[head] >= 0
            found = positions[head][there]
            if name == "observed":  # kvpress divides the sums by how many queries see a token, and keeps no newest ones
                worth = scores[head][there] / (PROMPT - found)
                found = found[np.argsort(-worth, kind="stable")[: len(of)]]
            if name == "pyramidkv":  # kvpress has no room for the window beside the budgets: of one ranking it keeps fewer
                assert set(of) < set(found.tolist()) and abs(len(found) - WINDOW - len(of)) <= 1
                continue
            assert sorted(found.tolist()) == of, f"layer {layer}, head {head}"
