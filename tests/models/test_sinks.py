"""Attention sinks, scores without a value (gpt-oss): logits equal transformers' with one policy of every base.

Sinks need the log-sum-exp of a policy's scores, which test_policies checks for every policy.
"""

import pytest
import torch

from tests.helpers import families
from tests.helpers.policies import OF_BASES
from tests.helpers.run import follows

PROMPT, DECODED, EXTENDED = 133, 20, 40


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    theirs = families.build(families.row("gpt_oss-plain"))
    return families.load(theirs, tmp_path_factory.mktemp("model")), theirs


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=str(row), marks=() if row.name == "full" else pytest.mark.slow) for row in OF_BASES]
)
@torch.no_grad()
def test_prefill_decode_and_extend_equal_transformers(models, row):
    ours, theirs = models
    tokens = families.tokens(PROMPT + 2 * DECODED + EXTENDED)
    expected = theirs(torch.tensor([tokens])).logits[0].numpy()
    follows(ours, row.exact(len(tokens)), tokens, expected, prompt=PROMPT, decoded=DECODED)
