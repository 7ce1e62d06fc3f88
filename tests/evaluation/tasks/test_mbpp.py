"""MBPP+: types of inputs, results that EvalPlus compares in ways of their own, and published completions with verdicts."""

import gzip
import json

import pytest

from icejax.checks.errors import InputError
from icejax.sandbox import programs
from tests.helpers import words

pytest.importorskip("lm_eval")
from icejax.evaluation.setting import Setting  # noqa: E402
from icejax.evaluation.tasks import mbpp  # noqa: E402

pytestmark = pytest.mark.usefixtures("sandbox")
PROBLEM = dict(
    task_id="Mbpp/2",
    prompt='"""\nWrite a function to find shared elements.\nassert similar_elements((1, 2), (2, 3)) == (2,)\n"""\n',
    entry_point="similar_elements",
    canonical_solution="\ndef similar_elements(a, b):\n    return tuple(x for x in a if x in b)\n",
    base_input=[[[1, 2], [2, 3]]],
    plus_input=[[[], []]],
    atol=0,
)
SUM = PROBLEM | dict(
    task_id="Mbpp/1000",
    entry_point="total",
    canonical_solution="\ndef total(x):\n    return sum(x) / 4\n",
    base_input=[[[1.5, 2.0]]],
    plus_input=[],
)
# Completions that EvalPlus 0.3 and the published verdicts, which are older, judge otherwise: since 0.3 sets are compared as sets.
NEWER = {"Mbpp/2", "Mbpp/579"}
SLOW = {"Mbpp/123", "Mbpp/599"}  # whether their time is over depends on the machine


def write(folder, *lines: dict):
    (folder / "evalplus").mkdir(exist_ok=True)
    file = folder / mbpp.FILE
    file.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return file


def ends(file, *answers: str) -> list[str]:
    [problem] = mbpp.problems(file)
    return [programs.run(mbpp.program(problem, answer)) for answer in answers]


def test_results_that_are_sets_are_compared_as_sets(tmp_path):
    body = "def similar_elements(a, b):\n    assert isinstance(a, tuple)\n    return {}\n".format
    file = write(tmp_path, PROBLEM)
    assert ends(file, body("set(a) & set(b)"), body("[x for x in b if x in a]"), body("a")) == ["passed", "passed", "failed"]
    # A problem of another number gets lists, and its result is compared as it is.
    other = json.loads(json.dumps(PROBLEM).replace("similar_elements", "shared")) | dict(task_id="Mbpp/9")
    body = "def shared(a, b):\n    assert isinstance(a, list)\n    return {}\n".format
    file = write(tmp_path, other)
    assert ends(file, body("set(a) & set(b)"), body("tuple(x for x in a if x in b)")) == ["failed", "passed"]


def test_floats_are_compared_with_a_tolerance_but_not_with_other_types(tmp_path):
    body = "def total(x):\n    return {}\n".format
    answers = map(body, ("sum(x) / 4 + 1e-8", "sum(x) / 4 + 1e-5", "complex(sum(x) / 4 + 1e-8)"))
    assert ends(write(tmp_path, SUM), *answers) == ["passed", "failed", "failed"]


@pytest.mark.parametrize(
    "name, inputs, right, wrong",
    [
        ("check_str", "'ab'", "None", "1"),
        ("are_equivalent", "4", "7", "1 / 0"),
        ("sum_div", "8", "0", "2"),
        ("surface_Area", "3, 4", "35", "34"),
        ("digit_distance_nums", "23, 156", "7", "8"),
    ],
)
def test_problems_with_several_right_answers(tmp_path, name, inputs, right, wrong):
    solution = f"def {name}(*x):\n    return None\n"
    line = PROBLEM | dict(task_id="Mbpp/1", entry_point=name, canonical_solution=solution, plus_input={})
    file = write(tmp_path, line | dict(base_input=[list(eval(f"({inputs},)"))]))
    assert ends(file, *(f"def {name}(*x):\n    return {result}\n" for result in (right, wrong))) == ["passed", "failed"]


@pytest.mark.parametrize(
    "number, call, typed",
    [
        (63, [[[1, 2]]], [[(1, 2)]]),
        (75, [[[1], [2]], 3], [[(1,), (2,)], 3]),
        (115, [[[1], []]], [[{1}, {}]]),
        (124, ["1", "2j"], [1.0, 2j]),
        (259, [[[1], [2]]], [((1,), (2,))]),
        (278, [[[1], 2]], [((1,), 2)]),
        (722, [{"a": [1, 2]}, 3], [{"a": (1, 2)}, 3]),
        (791, [[[1], 2]], [((1,), 2)]),
        (1, [[1]], [[1]]),
    ],
)
def test_inputs_get_the_types_that_json_lacks(tmp_path, number, call, typed):
    [problem] = mbpp.problems(write(tmp_path, PROBLEM | dict(task_id=f"Mbpp/{number}", base_input=[call], plus_input=[])))
    assert eval(problem["inputs"]) == [typed]


def test_prompts_are_those_of_qwens_evaluation(tmp_path):
    write(tmp_path, PROBLEM)
    setting = Setting(words.model(), tmp_path)
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_defaults=False).load([mbpp.task(name, setting) for name in mbpp.NAMES])["tasks"]
    text = PROBLEM["prompt"].strip()
    [(base, options)], [(instruct, chat_options)] = (words.requests(tasks[name]) for name in mbpp.NAMES)
    assert base == text + "\n" and options["until"] == ["\nif __name__", "\ndef main(", "\nprint(", '\n"""', "\nassert"]
    assert instruct.startswith(f"Can you complete the following Python function?\n```python\n{text}\n```")
    assert instruct.endswith("```python\n") and chat_options["until"] == ["\n```"]
    [row], solution = tasks["mbpp_plus"].dataset["test"], PROBLEM["canonical_solution"]
    answers = [solution, solution.replace("    return", "    a = a\n\treturn")]  # a tab is four spaces in Qwen's evaluation
    scores = {name: [tasks[name].process_results(row, [answer])["pass@1"] for answer in answers] for name in mbpp.NAMES}
    assert scores == dict(mbpp_plus=[1, 0], mbpp_plus_instruct=[1, 1])


@pytest.mark.parametrize("line", [PROBLEM | dict(task_id="HumanEval/0"), PROBLEM | dict(plus_input=3), dict(prompt="a"), [1]])
def test_other_files_are_refused(tmp_path, line):
    with pytest.raises(InputError, match="is no file of problems"):
        mbpp.problems(write(tmp_path, line))
    with pytest.raises(InputError, match="--data has no MbppPlus.jsonl.gz"):
        mbpp.task("mbpp_plus", Setting(words.model(), tmp_path / "none"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "statuses, count, newer",
    [(("base_status",), 265, NEWER | {"Mbpp/232"}), (("base_status", "plus_status"), 225, NEWER)],
    ids=["base", "plus"],
)
def test_published_completions_pass_as_published(data, statuses, count, newer):
    """Of the completions of Qwen2.5-Coder-1.5B, 265 of 378 are published as passed by MBPP's tests, 225 by EvalPlus's too."""
    folder = data / "evalplus/qwen2.5-coder-1.5b-base"
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing: mbpp of qwencoder-eval/base in QwenLM/Qwen2.5-Coder")
    lines = map(json.loads, gzip.open(folder / "mbpp-generated.jsonl.gz", "rt"))
    answers = {line["task_id"]: line["completion"] for line in lines}
    verdicts = json.load(gzip.open(folder / "mbpp-generated_eval_results.json.gz"))["eval"]
    problems = {problem["task_id"]: problem for problem in mbpp.problems(data / mbpp.FILE, plus="plus_status" in statuses)}
    published = {name for name in problems if all(verdicts[name][0][status] == "pass" for status in statuses)}
    assert (len(problems), len(published)) == (378, count)
    asked = set(problems) - SLOW
    passed = {name for name in asked if programs.run(mbpp.program(problems[name], answers[name]), seconds=20) == "passed"}
    assert passed == published - SLOW | newer
