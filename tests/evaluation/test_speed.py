"""`icejax.evaluation.speed`: the time of a test covers its own tokens, and no others."""

import dataclasses

import pytest

from icejax.cache.registry import Clustered, Full
from icejax.checks.errors import InputError
from icejax.engine.decode.step import DecodePrograms
from icejax.evaluation import speed
from icejax.evaluation.speed import Speed, SpeedTest, measure

CACHES = [pytest.param(Full(), id="full"), pytest.param(Clustered(budget=64), id="clustered", marks=pytest.mark.slow)]


class TokenClock:
    """A clock that ticks once for each token that the model computes, and the states that tests leave."""

    def __init__(self, monkeypatch):
        self.now, self.prompts, self.states = 0.0, [], []
        prefill, extend, step, sizes = speed.prefill, speed.extend, DecodePrograms.step, speed._cache_bytes

        def prefilled(model, prompts, *rest, **options):
            self.prompts.append(prompts[0])
            return self.tick(len(prompts[0]), prefill(model, prompts, *rest, **options))

        def seen(plan, state, pool):
            self.states.append(state)
            return sizes(plan, state, pool)

        monkeypatch.setattr(speed, "prefill", prefilled)
        monkeypatch.setattr(speed, "extend", lambda model, tokens, *rest: self.tick(len(tokens), extend(model, tokens, *rest)))
        monkeypatch.setattr(DecodePrograms, "step", lambda *arguments: self.tick(1, step(*arguments)))
        monkeypatch.setattr(speed, "_cache_bytes", seen)
        monkeypatch.setattr(speed.time, "perf_counter", lambda: self.now)

    def tick(self, tokens, result):
        self.now += tokens
        return result


@pytest.mark.parametrize("cache", CACHES)
def test_only_the_tokens_of_a_test_are_timed(bundled, monkeypatch, cache):
    clock, told = TokenClock(monkeypatch), []
    tests = [SpeedTest(40, False), SpeedTest(24, True), SpeedTest(40, False, depth=70), SpeedTest(24, True, depth=70)]
    options = dict(repetitions=2, progress=lambda done, total: told.append((done, total)))
    speeds = list(measure(bundled[0], cache, tests, **options))
    assert [(row.test, row.seconds, row.rates) for row in speeds] == [(t, (t.tokens,) * 2, (1.0,) * 3) for t in tests]
    assert [int(state.cache.lengths.seen[0]) for state in clock.states] == [40] * 3 + [25] * 3 + [110] * 3 + [94] * 3
    assert [len(prompt) for prompt in clock.prompts] == [40] * 3 + [1] * 3 + [70] * 6
    assert told == [(done, 12) for done in range(13)]


def test_an_answer_does_not_end_at_an_eos(bundled, monkeypatch):
    clock, made = TokenClock(monkeypatch), speed.make_plan
    every = tuple(range(bundled[0].config.vocab_size))
    monkeypatch.setattr(speed, "make_plan", lambda *a, **b: dataclasses.replace(made(*a, **b), eos_token_ids=every))
    list(measure(bundled[0], Full(), [SpeedTest(24, True)], repetitions=1))
    assert not any(state.done.any() for state in clock.states)


def test_rates_are_of_the_repetitions():
    row = Speed(SpeedTest(128, True, depth=4096), (0.5, 0.25, 1.0), 0, 0, 0)
    assert (row.test.name, row.rates) == ("tg128 @ d4096", (256.0, 128.0, 512.0))


def test_more_tokens_than_rope_computes_are_refused(bundled):
    with pytest.raises(
        InputError, match="^pp2 @ d16777214 needs a context of more than 16777216 tokens: measure at a smaller depth$"
    ):
        list(measure(bundled[0], Full(), [SpeedTest(2, False, depth=2**24 - 2)], repetitions=1))
