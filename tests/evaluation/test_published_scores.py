"""The harness's own model of transformers and icejax answer alike on a published model."""

import pytest

from bench import published
from icejax import load
from icejax.cache.registry import Full
from icejax.checks.errors import InputError
from tests import tolerances

lm_eval = pytest.importorskip("lm_eval")
instance = pytest.importorskip("lm_eval.api.instance")
torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
harness = pytest.importorskip("icejax.evaluation.harness")
setting = pytest.importorskip("icejax.evaluation.setting")
local = pytest.importorskip("icejax.evaluation.tasks.local")

QUESTIONS = [
    f"Question: A box holds {a} apples and {b} pears. How many pieces of fruit are in {c} boxes?\nAnswer:"
    for a, b, c in ((3, 4, 2), (10, 7, 5), (1, 1, 9), (12, 0, 3), (6, 5, 4), (8, 2, 8))
]


def both(max_length):
    """Returns SmolLM2 in icejax and in the harness's own model of transformers."""
    try:
        folder = published.folder("smollm2-135m")
    except InputError as error:
        pytest.skip(f"smollm2-135m cannot be had: {error}")
    from lm_eval.models.huggingface import HFLM

    ours = harness.HarnessModel(*load(folder), cache=Full(), batch_size=3, max_length=max_length)
    return ours, HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1, max_length=max_length)


@pytest.mark.slow
def test_texts_and_log_likelihoods_equal_the_harness_own_model():
    ours, theirs = both(max_length=512)
    asked = [(text, dict(until=["Question:"], max_gen_toks=24)) for text in QUESTIONS]
    answers = [
        model.generate_until([instance.Instance("generate_until", {}, x, i) for i, x in enumerate(asked)], disable_tqdm=True)
        for model in (ours, theirs)
    ]
    assert answers[0] == answers[1] and len(set(answers[0])) > 1
    pairs = [(text, f" There are {number} pieces.") for text in QUESTIONS for number in (14, 85)] + [("", QUESTIONS[0])]
    (mine, hf) = (
        model.loglikelihood([instance.Instance("loglikelihood", {}, x, i) for i, x in enumerate(pairs)], disable_tqdm=True)
        for model in (ours, theirs)
    )
    text = " ".join(QUESTIONS)
    tokens = ours.tok_encode(text)[:160]
    requests = [instance.Instance("token_logprobs", {}, ("text", tokens, 64), 0)]
    [forced], inputs = ours.token_logprobs(requests, disable_tqdm=True), torch.tensor([tokens])
    with torch.no_grad():
        logits = theirs.model(inputs).logits[0, -65:-1].log_softmax(-1)
    assert forced == pytest.approx(logits[range(64), inputs[0, -64:]].tolist(), abs=tolerances.LOGITS)
    for (value, greedy), (expected, expected_greedy), (_, text) in zip(mine, hf, pairs, strict=True):
        assert value == pytest.approx(expected, abs=tolerances.LOGITS * len(text)) and greedy == expected_greedy


@pytest.mark.published
def test_fifty_answers_of_gsm8k_equal_the_harness_own_model(data):
    models = ours, _ = both(max_length=2048)
    task = local.local_task("gsm8k", setting.Setting(ours, data))
    options = dict(limit=50, num_fewshot=5, gen_kwargs="max_gen_toks=128")
    mine, hf = (lm_eval.simple_evaluate(model, tasks=[dict(task)], log_samples=True, **options) for model in models)
    texts = [[sample["resps"] for sample in results["samples"]["gsm8k"]] for results in (mine, hf)]
    assert texts[0] == texts[1] and len(texts[0]) >= 50
    assert mine["results"]["gsm8k"] == hf["results"]["gsm8k"]
