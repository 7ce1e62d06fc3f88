"""HumanEval and HumanEval+: programs of completions, EvalPlus's comparison of results, and files of problems."""

import gzip
import json

import pytest

from icejax.checks.errors import InputError
from icejax.sandbox import programs
from tests.helpers import words

pytest.importorskip("lm_eval")
from icejax.evaluation.setting import Setting  # noqa: E402
from icejax.evaluation.tasks import code  # noqa: E402

pytestmark = pytest.mark.usefixtures("sandbox")
PROBLEM = dict(
    task_id="Test/0",
    prompt='def mean(x):\n    """Returns the mean."""\n',
    entry_point="mean",
    canonical_solution="    return sum(x) / len(x)\n",
    test="def check(candidate):\n    assert candidate([1, 3]) == 2\n",
)
PLUS = PROBLEM | dict(base_input=[[[1, 3]]], plus_input=[[[0.1, 0.2, 0.3]], [[5]]], atol=0)


def write(folder, *lines: dict):
    file = folder / "problems.jsonl.gz"
    file.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return file


def end(problem: dict, completion: str) -> str:
    return programs.run(code.program(problem, completion))


def test_a_completion_passes_by_the_tests_that_its_file_has(tmp_path):
    plain, plus = code.problems(write(tmp_path, PROBLEM, PLUS))
    for completion, ends in (
        ("    return sum(x) / len(x)\n", ("passed", "passed")),
        ("    return sum(x) / len(x) + 1e-8\n", ("failed", "passed")),  # EvalPlus compares floats to 1e-6
        ("    return sum(x) / len(x) + 1e-5\n", ("failed", "failed")),
        ("    return sum(x) / 2\n", ("passed", "failed")),  # only EvalPlus asks for other lengths
        ("    x.append(0)\n    return sum(x) / (len(x) - 1)\n", ("passed", "passed")),  # each side has inputs of its own
    ):
        assert (end(plain, completion), end(plus, completion)) == ends, completion


@pytest.mark.parametrize(
    "result, ends",
    [("[0.5, 1]", "passed"), ("(0.5, 1)", "failed"), ("[0.5]", "failed"), ("[0.5, 1.00001]", "failed"), ("None", "failed")],
)
def test_lists_are_compared_exactly_unless_all_their_numbers_are_floats(tmp_path, result, ends):
    problem = PLUS | dict(canonical_solution="    return [0.5, 1]\n", plus_input=[])
    [problem] = code.problems(write(tmp_path, problem))
    assert end(problem, f"    return {result}\n") == ends


def test_any_zero_of_a_polynomial_is_right(tmp_path):
    problem = PLUS | dict(
        prompt="def find_zero(xs):\n", entry_point="find_zero", atol=1e-4, base_input=[[[-1, 0, 1]]], plus_input=[]
    )
    [problem] = code.problems(write(tmp_path, problem | dict(canonical_solution="    return 1.0\n")))
    assert [end(problem, f"    return {x}\n") for x in (1.0, -1.0, 0.99999, 0.9)] == ["passed", "passed", "passed", "failed"]


@pytest.mark.parametrize("line", [dict(prompt="def f():\n"), PLUS | dict(atol="a"), PLUS | dict(plus_input=3), [1]])
def test_other_files_are_refused(tmp_path, line):
    with pytest.raises(InputError, match="is no file of problems"):
        code.problems(write(tmp_path, line))
    with pytest.raises(InputError, match="has no none.gz"):
        code.problems(tmp_path / "none.gz")
    (tmp_path / "text.gz").write_text("{}")
    with pytest.raises(InputError, match="is no file of problems"):
        code.problems(tmp_path / "text.gz")


# What the model is asked, and where its answer ends: HumanEval's paper, and Qwen2.5-Coder's own evaluation.
PAPER = (PROBLEM["prompt"], ["\nclass", "\ndef", "\n#", "\nif", "\nprint"])
QWEN = (
    f"Can you complete the following Python function?\n```python\n{PROBLEM['prompt']}\n``` ```python\n",  # a space without a chat
    ["\n```"],
)


@pytest.mark.parametrize(
    "name, answer, asked",
    [
        ("humaneval_plus", "    return sum(x) / len(x)\n", PAPER),
        ("humaneval_plus_instruct", "import math\ndef mean(x):\n    return sum(x) / len(x)", QWEN),
    ],
)
def test_a_task_runs_what_the_model_was_asked_for(tmp_path, name, answer, asked):
    (tmp_path / "evalplus").mkdir()
    write(tmp_path, PLUS).rename(tmp_path / code.FILES[name])
    task = code.task(name, Setting(words.model(), tmp_path))
    [problem], [(prompt, options)] = task.test_docs(), words.requests(task)
    assert (prompt, options) == (asked[0], dict(until=asked[1], max_gen_toks=1024, do_sample=False))
    # A tab is four spaces in Qwen's evaluation; Python does not say how many it is.
    tabbed = answer.replace("    return", "    x = x\n\treturn")
    scores = [task.process_results(problem, [text])["pass@1"] for text in (answer, answer + " + 1", tabbed)]
    assert scores == [1, 0, int(name.endswith("instruct"))]


def test_without_a_safe_sandbox_no_task_is_made(tmp_path, monkeypatch):
    (tmp_path / "evalplus").mkdir()
    write(tmp_path, PLUS).rename(tmp_path / code.FILES["humaneval_plus"])
    refused = "^this machine has no way to run a model's programs safely: "

    def unsafe(program):
        raise programs.Unsafe("no Landlock")

    monkeypatch.setattr(programs, "run", unsafe)
    with pytest.raises(InputError, match=f"{refused}no Landlock$"):
        code.task("humaneval_plus", Setting(words.model(), tmp_path))
    monkeypatch.setattr(programs, "run", lambda program: "failed")
    with pytest.raises(InputError, match=f"{refused}a program that only imports of the standard library failed$"):
        code.task("humaneval_plus", Setting(words.model(), tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name, count", [("humaneval", 72), ("humaneval_plus", 60)])
def test_published_completions_pass_as_published(data, name, count):
    """Of the completions of Qwen2.5-Coder-1.5B, 72 of 164 are published as passed by HumanEval's tests, 60 by EvalPlus's too."""
    folder = data / "evalplus/qwen2.5-coder-1.5b-base"
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing: humaneval of qwencoder-eval/base in QwenLM/Qwen2.5-Coder")
    lines = map(json.loads, gzip.open(folder / "humaneval-generated.jsonl.gz", "rt"))
    answers = {line["task_id"]: line["completion"] for line in lines}
    verdicts = json.load(gzip.open(folder / "humaneval-generated_eval_results.json.gz"))["eval"]
    asked = ("base_status",) if name == "humaneval" else ("base_status", "plus_status")
    published = {name for name, [verdict] in verdicts.items() if all(verdict[status] == "pass" for status in asked)}
    problems = {problem["task_id"]: problem for problem in code.problems(data / code.FILES[name])}
    assert (len(problems), len(published)) == (164, count)
    ends = {name: code.passes(code.program(problem, "\n" + answers[name])) for name, problem in problems.items()}
    assert {name for name, end in ends.items() if end["pass@1"]} == published
