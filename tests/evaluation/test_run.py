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


def test_a_task_that_nobody_has_is_named(tmp_path):
    for name, data, message in (
        ("no_such", None, "no task is named no_such: lm-eval ls tasks shows all names, and --include-path adds your own"),
        ("ruler_vt_40", None, "the task ruler_vt_40 is one of local files: give their folder by --data DIR"),
        ("ruler_no", tmp_path, "no task is named ruler_no: lm-eval ls tasks shows all names, and --include-path adds your own"),
    ):
        with pytest.raises(InputError, match=f"^{message}$"):
            run.evaluate(words.model(), ["letters", name], data=data)
