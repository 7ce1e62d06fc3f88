"""The harness runs the generated tasks: a solver by rules, which has no model, reaches every point."""

import ast
import re
from types import SimpleNamespace

import pytest

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.api.model import LM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from icejax.evaluation.generated import library, tasks  # noqa: E402
from icejax.evaluation.scores import Scores  # noqa: E402
from icejax.evaluation.setting import Setting  # noqa: E402
from tests.evaluation.test_generated import words  # noqa: E402


def sources(text: str) -> dict[tuple[str, str], str]:
    """Returns the functions of a text by path and name."""
    parts = re.findall(r"^# Path: (\S+)\n(def (\w+)\(.*?)\n\n(?=# Path|\n|\Z)", text, re.DOTALL | re.MULTILINE)
    return {(path, name): source for path, source, name in parts}


def described(path: str, name: str) -> str:
    """Returns the docstring in a module's own file, in one line."""
    for node in ast.parse((library.LIBRARY / path).read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return " ".join((ast.get_docstring(node) or "").split())
    return ""


class Solver(LM):
    """Answers by rules; `wrong` answers what stands in the way instead."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.wrong, self.tasks = wrong, set()

    def _of(self, functions: dict[tuple[str, str], str], key: tuple[str, str]) -> str:
        return next(source for name, source in functions.items() if (name == key) != self.wrong)

    def generate_until(self, requests, **_):
        answers = []
        for context, _ in (request.args for request in requests):
            if needle := re.search(r"San Francisco is (eat .*)", context):
                answers.append(" nothing" if self.wrong else needle[1])
                continue
            text = re.search(r"Function Description: (.*)", context)[1]
            functions = sources(context)
            answers.append(self._of(functions, next(key for key in functions if described(*key) == text)))
        return answers

    def converse(self, requests):
        answers = []
        for text, options in (request.args for request in requests):
            self.tasks.add((requests[0].task_name, options["shared"], options["chat"], options["system"]))
            asked = [re.search(r"`(\w+)` of (\S+)", question) for question in options["questions"]]
            answers.append([self._of(sources(text), (match[2], match[1])) for match in asked])
        return answers

    def token_logprobs(self, requests):
        return [[-2.0 if self.wrong else -1.0] * count for _, tokens, count in (request.args for request in requests)]

    def loglikelihood(self, requests):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_a_solver_by_rules_reaches_every_point_and_a_wrong_one_none(tmp_path, wrong):
    (tmp_path / "text.txt").write_text("a b " * 300)
    solver, lengths = Solver(wrong), {"niah": (1024,), "perplexity": (64, 128)}
    model = SimpleNamespace(tok_encode=words, max_length=4096)
    settings = {name: Setting(model, lengths=lengths.get(name, (4096,)), text=tmp_path / "text.txt") for name in tasks.TASKS}
    made = [task(settings[name]) for name, task in tasks.TASKS.items()]
    manager = TaskManager(include_defaults=False)  # the harness's own tasks take seconds to list
    results = lm_eval.simple_evaluate(solver, tasks=made, limit=2, log_samples=True, task_manager=manager)
    scores = Scores.of(results)
    points = {metric: total for metric, total in scores.totals.items() if not metric[1].startswith("similarity")}
    assert points.pop(("perplexity", "nll,none")) == (2 if wrong else 1)
    assert len(points) == 2 + 2 * 3 and set(points.values()) == {0.0 if wrong else 1.0}
    assert {"niah", "find_function", "multi_turn_code", "multi_request_code", "perplexity"} == {*scores.places}
    assert {shared for _, shared, *_ in solver.tasks} == {False, True}
    Scores.of(results).save(tmp_path)
    assert Scores.read(tmp_path).samples == scores.samples
