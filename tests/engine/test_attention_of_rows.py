"""`Request(explain=True)`: a row of an engine tells what it attends to, as `--explain` computes it from a prefill of its own."""

import numpy as np
import pytest

import icejax
from icejax.cache.registry import Clustered, Full
from icejax.evaluation.attention_map import Explanation

CACHE, NEW = Clustered(budget=64), 10


def expected(model, tokenizer, prompt: list[int]):
    """Returns the picture of `--explain`."""
    explanation = Explanation(model, prompt, CACHE, new_tokens=NEW)
    icejax.generate(model, tokenizer, [prompt], cache=CACHE, max_new_tokens=NEW, watch=explanation.watch)
    return explanation.picture()


@pytest.mark.slow  # four layers of two prefills, and both ways of a prefill
def test_rows_that_join_at_any_time_have_the_picture_of_explain(bundled):
    model, tokenizer = bundled
    prompts = [list(np.random.default_rng(seed).integers(32, 120, size)) for seed, size in enumerate((600, 511))]
    pictures = [expected(model, tokenizer, prompt) for prompt in prompts]
    with icejax.Engine(model, tokenizer, cache=CACHE, batch_size=3, context_length=800, max_new_tokens=90) as engine:
        other = engine.submit(prompts[0], max_new_tokens=90)
        next(iter(other))  # it decodes: the others join at some phase
        asked = [icejax.Request(prompt=prompt, explain=True) for prompt in prompts]
        handles = [engine.submit(request, max_new_tokens=NEW) for request in (*asked, asked[0])]
        for handle, picture in zip(handles, [*pictures, pictures[0]], strict=True):
            pieces = [*handle]
            assert [piece.attention is not None for piece in pieces] == [True, False, False, False] * 2 + [True, True]
            assert pieces[0].attention.steps <= 1 and pieces[0].cached_tokens == 0
            actual = pieces[-1].attention
            assert actual[:3] == picture[:3] == ((0, 1, 2, 3), pieces[-1].prompt_tokens, NEW - 1)
            np.testing.assert_allclose(actual.weights, picture.weights, atol=1e-3)
            assert actual.weights.max() > 0.1
        assert all(piece.attention is None for piece in other)


def test_a_cache_without_pages_in_host_memory_has_nothing_to_explain(bundled):
    with icejax.Engine(*bundled, cache=Full(), batch_size=1, context_length=300, max_new_tokens=9) as engine:
        with pytest.raises(icejax.InputError, match="^explain shows what is fetched from the host: it needs pages there"):
            engine.submit(icejax.Request(prompt="import os", explain=True)).result()
        assert engine.submit("import os", max_new_tokens=2).result().attention is None
        config = bundled[0].config
        assert engine.report.host_kv_bytes == 0 < engine.report.device_kv_bytes
        assert engine.full_kv_bytes == 300 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * 4
