"""--explain: the positions of the tokens in pages, the attention weights, and the picture and table that are written."""

import json

import matplotlib.image
import numpy as np
import pytest

import icejax
from bench.needle import task
from icejax.cache.registry import Clustered, Full
from icejax.engine.plan import make_plan
from icejax.engine.prefill import prefill
from icejax.evaluation import attention_map
from icejax.evaluation.attention_map import Explanation
from tests.helpers.layer import stored


def text_and_fact() -> tuple[str, range, task.Question]:
    context = task.context(np.random.default_rng(7), length=1500, facts=task.Facts(keys=1), split="heldout")
    (question,) = context.questions
    start = context.text.index(context.facts[0]) + len(question.text)
    return context.text.decode() + question.text, range(start, start + task.DIGITS), question


@pytest.mark.slow
def test_each_middle_token_has_one_page_with_its_own_key(bundled):
    model, tokenizer = bundled
    prompt = tokenizer(text_and_fact()[0])["input_ids"]
    policy = Clustered(budget=64)
    plan = make_plan(model, policy, batch_size=1, prompt_tokens=len(prompt), new_tokens=10)
    positions_of_layers = attention_map._positions(model, prompt, plan)
    state, _, pool = prefill(model, [prompt], plan)
    keys = stored(pool, state.cache.table)[0, :, :, :, 0]  # P L K p H
    expected = set(range(policy.window_layout.sinks, len(prompt) - policy.window_layout.fill))
    for layer, positions in positions_of_layers.items():
        counts = np.asarray(state.cache.layers[layer].index.levels[0].count)[0]
        for head in range(len(positions)):
            filled = np.arange(policy.page_size)[None, :] < counts[head, : positions.shape[1], None]
            assert sorted(positions[head][filled]) == sorted(expected)
            # The pool and the digests have the same pages: the sum of a full page's keys follows from its digest.
            page = int(np.flatnonzero(filled.all(1))[0])
            digests = state.cache.layers[layer].index.levels[0]
            *outliers, mean = (np.asarray(x.read())[0, head, page] for x in (*digests.outliers, digests.mean))
            total = keys[page, plan.pooled.index(layer), head].sum(0)
            np.testing.assert_allclose(total, sum(outliers) + (policy.page_size - 2) * mean, atol=1e-3)


@pytest.mark.slow
def test_the_answers_digits_weigh_most_in_some_layer(bundled, tmp_path):
    model, tokenizer = bundled
    text, digits, question = text_and_fact()
    explanation = Explanation(model, tokenizer(text)["input_ids"], Clustered(budget=64), new_tokens=6)
    pieces = icejax.stream_generate(
        model, tokenizer, text, cache=Clustered(budget=64), max_new_tokens=6, watch=explanation.watch
    )
    assert "".join(p.text for p in pieces) == question.answer and explanation.steps == 5
    heaviest = {layer: int(np.argmax(weights[: len(text) - 40])) for layer, weights in explanation.weights.items()}
    assert any(position in digits for position in heaviest.values())
    assert all(0 <= weights.sum() <= 5 * 4 + 1e-3 for weights in explanation.weights.values())  # four query heads, five steps
    (tmp_path / ".seen.json.part").symlink_to(tmp_path / "theirs")  # planted, and not followed
    explanation.save(tmp_path / "seen.png", tokenizer)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("seen.png", "seen.json")] == [0o600, 0o600]
    image = matplotlib.image.imread(tmp_path / "seen.png")
    assert image.shape[0] > 200 and image.std() > 0.1
    table = json.loads((tmp_path / "seen.json").read_text())
    assert table["steps"] == 5 and table["prompt_tokens"] == len(text) and "".join(table["tokens"]) == text
    for layer, weights in explanation.weights.items():
        layer_weights = table["layers"][str(layer)]
        assert sorted(map(int, layer_weights)) == np.flatnonzero(weights).tolist()
    assert sorted(x.name for x in tmp_path.iterdir()) == ["seen.json", "seen.png"]


def test_16_bit_layers_without_pages_are_passed_by(bundled):
    model = icejax.load(icejax.api.generate.ASSETS, dtype="bfloat16")[0]
    explanation = Explanation(model, list(range(1, 120)), Clustered(budget=64, dense_layers=1), new_tokens=3)
    assert sorted(explanation.weights) == [1, 2, 3]


@pytest.mark.parametrize("blocked", ["seen.png", "seen.json"])
def test_a_place_that_cannot_be_written_is_told_before_and_after(bundled, tmp_path, blocked):
    explanation = Explanation(bundled[0], [1] * 120, Clustered(budget=64), new_tokens=3)
    (tmp_path / blocked).mkdir()
    with pytest.raises(icejax.InputError, match=rf"^--explain: .*{blocked} is a folder: name a file$"):
        attention_map.check_picture(tmp_path / "seen.png")
    with pytest.raises(icejax.InputError, match=r"^--explain: .*seen\.png cannot be written: "):
        explanation.save(tmp_path / "seen.png", bundled[1])
    assert [x.name for x in tmp_path.iterdir() if x.is_file() and x.name.startswith(".")] == []
    for length in (250, 300):
        with pytest.raises(icejax.InputError, match="cannot be written: File name too long"):
            attention_map.check_picture(tmp_path / f"{'n' * length}.png")


def test_bad_input(bundled, tmp_path):
    with pytest.raises(icejax.InputError, match="needs pages there, as of --cache clustered"):
        Explanation(bundled[0], [1] * 300, Full(), new_tokens=3)
    with pytest.raises(icejax.InputError, match=r"needs a file that ends in \.png"):
        attention_map.check_picture(tmp_path / "seen.txt")
    with pytest.raises(icejax.InputError, match="there is no folder"):
        attention_map.check_picture(tmp_path / "nowhere" / "seen.png")
