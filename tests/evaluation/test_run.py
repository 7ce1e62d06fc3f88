"""What `evaluation.run` refuses before or while the harness runs."""

from types import SimpleNamespace

import pytest

from icejax.checks.errors import InputError
from tests.helpers import words

pytest.importorskip("lm_eval")
from icejax.evaluation import run  # noqa: E402


@pytest.fixture(autouse=True)
def _known_tasks(monkeypatch):
    """The harness knows the task `letters`; to list its own takes seconds."""
    manager = SimpleNamespace(match_tasks=lambda names: [name for name in names if name == "letters"])
    monkeypatch.setattr(run, "TaskManager", lambda include_path: manager)


@pytest.mark.parametrize("error", [ConnectionError("Couldn't reach 'a/b' on the Hub\nmore"), FileNotFoundError("no a.json")])
def test_data_that_cannot_be_had_are_one_line(monkeypatch, error):
    def evaluate(*_, **__):
        raise error

    monkeypatch.setattr(run.evaluator, "simple_evaluate", evaluate)
    with pytest.raises(InputError) as told:
        run.evaluate(words.model(), ["letters"])
    reason = str(error).partition("\n")[0]
    assert str(told.value) == f"the data of a task cannot be had: {reason}; --data reads local files"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Sample larger than population or is negative"),
        AssertionError("Error: number of fewshot samples requested exceeds the 8 that are available."),
        AssertionError("Error: no documents available for sampling."),
    ],
)
def test_more_examples_than_a_task_has_are_one_line(monkeypatch, error):
    def evaluate(*_, **__):
        raise error

    monkeypatch.setattr(run.evaluator, "simple_evaluate", evaluate)
    with pytest.raises(InputError, match="^a task has fewer examples than --num-fewshot asks for: give a smaller number$"):
        run.evaluate(words.model(), ["letters"], num_fewshot=100)
    error.args = ("another fault",)
    with pytest.raises(type(error), match="^another fault$"):
        run.evaluate(words.model(), ["letters"], num_fewshot=100)


def test_the_samplers_of_lm_eval_say_so_too():
    from lm_eval.api import samplers

    for sampler, count in ((samplers.ContextSampler, 2), (samplers.FirstNSampler, 3), (samplers.ContextSampler, 1)):
        docs = [dict(a=1), dict(a=2)] if count > 1 else []
        with pytest.raises((AssertionError, ValueError)) as told:
            sampler(docs, rnd=0).sample(count, dict(a=3))
        assert str(told.value).startswith(run.TOO_FEW)


def test_a_task_that_nobody_has_is_named(tmp_path):
    for name, data, message in (
        ("no_such", None, "no task is named no_such: lm-eval ls tasks shows all names, and --include-path adds your own"),
        ("ruler_vt_40", None, "the task ruler_vt_40 is one of local files: give their folder by --data DIR"),
        ("ruler_no", tmp_path, "no task is named ruler_no: lm-eval ls tasks shows all names, and --include-path adds your own"),
    ):
        with pytest.raises(InputError, match=f"^{message}$"):
            run.evaluate(words.model(), ["letters", name], data=data)


def test_git_says_nothing_outside_of_a_repository(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert run.evaluator.get_git_commit_hash() is None
    assert capfd.readouterr() == ("", "")
