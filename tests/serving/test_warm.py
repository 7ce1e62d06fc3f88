"""After the warm-up nothing is compiled, whatever is asked within its lengths."""

import pytest

import icejax
from icejax import Request, Sampling
from icejax.runtime.compile_clock import clock
from icejax.serving.warm import warm_up
from icejax.text.grammar.rules import Grammar

BRIEF = dict(forced_tokens=[0] * 4)
ALL = Sampling(temperature=0.7, repetition_penalty=1.2, presence_penalty=0.5, logit_bias={3: 1.0})
REQUESTS = {
    "greedy": [Request(prompt=[1] * 300, **BRIEF)],
    "drawn": [Request(prompt=[2] * 300, sampling=Sampling(temperature=1.0), **BRIEF)],
    "repetition penalty": [Request(prompt=[3] * 300, sampling=Sampling(repetition_penalty=1.2), **BRIEF)] * 2,
    "several penalties": [Request(prompt=[4] * 300, sampling=ALL, **BRIEF)],
    "echo": [Request(prompt=[5] * size, prompt_logprobs=1, logprobs=1, **BRIEF) for size in (300, 700)],
    "explain": [Request(prompt=[5] * size, explain=True, **BRIEF) for size in (20, 300, 700)],
    "behind a prefix": [Request(prompt=[6] * 256 + [text] * 530, **BRIEF) for text in (1, 2, 3)],
    "behind a long prefix": [Request(prompt=[7] * 768 + [text] * 20, **BRIEF) for text in (1, 2, 3)],
    "compaction": [Request(prompt=[8] * 300, forced_tokens=[0] * 70)],
}
# At once: rows join and leave, so that steps have all sizes and rows move.
CROWD = [
    Request(prompt=[9 + i] * 300, forced_tokens=[0] * (40 - 7 * i), sampling=sampling, logprobs=logprobs)
    for i, (sampling, logprobs) in enumerate([(Sampling(), None), (ALL, 2), (Sampling(temperature=1.0), None), (ALL, None)])
]


@pytest.mark.slow
def test_nothing_is_compiled_after_the_warm_up(bundled):
    sizes = dict(batch_size=2, context_length=900, max_new_tokens=100)
    with icejax.Engine(*bundled, cache=icejax.Clustered(compact_every=32), **sizes) as engine:
        assert engine.step_sizes == (1, 2)
        warm_up(engine, tokens=800)
        compiled, cached = {}, {}
        for name, requests in REQUESTS.items():
            before = clock().programs
            cached[name] = [engine.submit(request).result().cached_tokens for request in requests][-1]
            compiled[name] = clock().programs - before
        before, free = clock().programs, Request(prompt="x", grammar=Grammar.regex("a{30}"))
        for requests in (CROWD, [CROWD[0], free, free], [CROWD[2]] * 3):
            for handle in [engine.submit(request) for request in requests]:
                handle.result()
        compiled["at once"] = clock().programs - before
    assert compiled == dict.fromkeys([*REQUESTS, "at once"], 0)
    assert (cached["behind a prefix"], cached["behind a long prefix"]) == (256, 768)


@pytest.mark.slow
def test_a_compaction_of_an_empty_batch_changes_no_answer(bundled):
    prompt, answers, sizes = [9] * 40, [], dict(batch_size=2, context_length=100, max_new_tokens=40)
    with icejax.Engine(*bundled, cache=icejax.Clustered(compact_every=32), **sizes) as engine:
        for _ in range(2):
            answers.append(engine.submit(prompt, max_new_tokens=40).result().token_ids)
            engine.compile_for(2)
            engine.compile_for(1)
    assert answers[0] == answers[1]
    with pytest.raises(icejax.InputError, match="^size must be one of 1, 2, got 3$"):
        engine.compile_for(3)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.compile_for(1)
