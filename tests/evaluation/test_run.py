"""What `evaluation.run` refuses before or while the harness runs."""

from types import SimpleNamespace

import pytest

from icejax.checks.errors import InputError
from tests.helpers import words

pytest.importorskip("lm_eval")
from icejax.evaluation import run  # noqa: E402


@pytest.fixture(autouse=True)
def _known_tasks(monkeypatch):
    """The harness knows two tasks and a group; to list its own takes seconds."""
    tasks = ["letters", "letters_2"]
    manager = SimpleNamespace(all_tasks=[*tasks, "letters_group"], all_subtasks=tasks)
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


@pytest.mark.parametrize(
    "error, message",
    [
        (
            ValueError("Duplicate task 'a': found in both 'b' and 'c'"),
            "Duplicate task 'a': found in both 'b' and 'c': leave one of them out of --tasks",
        ),
        (
            ValueError(
                "Attempted to run task: a which is marked as unsafe. Set confirm_run_unsafe_code=True to run this task."
            ),
            "a task of lm-eval runs the model's programs unprotected: with --data DIR, humaneval, humaneval_plus and mbpp_plus "
            "run them in a sandbox",
        ),
        (
            ModuleNotFoundError("No module named 'langdetect'"),
            "a task of lm-eval needs a package that is not there (No module named 'langdetect'): install it with pip",
        ),
    ],
)
def test_tasks_that_the_harness_refuses_are_one_line(monkeypatch, error, message):
    def evaluate(*_, **__):
        raise error

    monkeypatch.setattr(run.evaluator, "simple_evaluate", evaluate)
    with pytest.raises(InputError) as told:
        run.evaluate(words.model(), ["letters"])
    assert str(told.value) == message


@pytest.fixture
def asked(monkeypatch) -> dict:
    """What the harness is asked for; it runs nothing."""
    options = {}
    monkeypatch.setattr(run.evaluator, "simple_evaluate", lambda _, **given: options.update(given))
    monkeypatch.setattr(run.Scores, "of", lambda results: results)
    return options


def test_a_pattern_stands_for_single_tasks_each_once(asked):
    run.evaluate(words.model(), ["letters*", "letters", "letters_group"])
    assert asked["tasks"] == ["letters", "letters_2", "letters_group"]
    with pytest.raises(InputError, match="^no task is named none\\*: "):
        run.evaluate(words.model(), ["none*"])


def test_answers_are_drawn_where_both_options_say_so(asked):
    for text, options in (
        (None, None),
        ("max_gen_toks=64,temperature=0", dict(max_gen_toks=64, temperature=0)),
        ("do_sample=True,temperature=0.5", dict(do_sample=True, temperature=0.5)),
        ("do_sample=True", dict(do_sample=True, temperature=1.0)),
    ):
        run.evaluate(words.model(), ["letters"], gen_kwargs=text)
        assert asked["gen_kwargs"] == options
    for text in ("temperature=0.5", "temperature=0.5,do_sample=False"):
        with pytest.raises(
            InputError, match="^--gen-kwargs: a temperature has no effect without do_sample=True, so give both$"
        ):
            run.evaluate(words.model(), ["letters"], gen_kwargs=text)


def test_standard_errors_fork_no_process_and_print_no_answer(monkeypatch, capsys):
    from lm_eval.api import metrics

    def evaluate(*_, bootstrap_iters, **__):
        return metrics.bootstrap_stderr(metrics.median, numbers, bootstrap_iters)

    numbers = [1.0, 2.0, 4.0, 8.0]
    monkeypatch.delenv("DISABLE_MULTIPROC", raising=False)
    monkeypatch.setattr("multiprocessing.Pool", None)  # a call would fail
    monkeypatch.setattr(run.evaluator, "simple_evaluate", evaluate)
    monkeypatch.setattr(run.Scores, "of", lambda results: results)
    draws = metrics._bootstrap_internal(metrics.median, 1000)((0, numbers))  # those of a process of lm-eval
    assert run.evaluate(words.model(), ["letters"]) == metrics.sample_stddev(draws) > 1
    assert capsys.readouterr().out == ""


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
