"""GSM8K from local files: the harness's scorers, by answers worked out by hand."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("lm_eval")
from lm_eval.tasks import TaskManager  # noqa: E402

from icejax.checks.errors import InputError  # noqa: E402
from icejax.evaluation.setting import Setting  # noqa: E402
from icejax.evaluation.tasks import local  # noqa: E402

# Answer, right number, and whether the strict and the flexible scorer accept it.
GOLDEN = (
    ("5 + 3 = 8.\n#### 8", "8", 1, 1),
    ("#### 1,234", "1234", 1, 1),
    ("#### -7", "-7", 1, 1),
    ("#### 18.", "18", 1, 1),
    ("#### $18", "18", 0, 1),
    ("She makes $18.", "18", 0, 1),
    ("#### 18, which is 20 less 2", "18", 1, 0),
    ("2, no: #### 18", "18", 1, 1),
    ("18.50", "18.5", 0, 0),
    ("eighteen", "18", 0, 0),
    ("", "18", 0, 0),
)


def test_the_strict_scorer_takes_the_first_marked_number_and_the_flexible_one_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "gsm8k").mkdir()
    lines = [dict(question=f"{i} ?", answer=f"It is so.\n#### {gold}") for i, (_, gold, *_) in enumerate(GOLDEN)]
    for name in ("test", "train-head"):
        (tmp_path / f"gsm8k/{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    described = local.local_task("gsm8k", Setting(SimpleNamespace(max_length=4096), tmp_path))
    [task] = TaskManager(include_defaults=False).load([described])["tasks"].values()
    task.build_all_requests(rank=0, world_size=1)
    for request, (answer, *_) in zip(task.instances, GOLDEN, strict=True):
        request.resps = [answer]
    task.apply_filters()
    for request, (answer, _, *expected) in zip(task.instances, GOLDEN, strict=True):
        taken = [request.filtered_resps[name] for name in ("strict-match", "flexible-extract")]
        assert [task.process_results(request.doc, [x])["exact_match"] for x in taken] == expected, answer


@pytest.mark.parametrize("line", ['{"question": "1 ?", "ans', '{"question": "1 ?"}', '{"question": "1 ?", "answer": 1}', ""])
def test_damaged_files_are_refused(tmp_path, line):
    setting = Setting(SimpleNamespace(max_length=4096), tmp_path)
    with pytest.raises(InputError, match="--data has no train-head.jsonl: expected"):
        local.local_task("gsm8k", setting)
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k/train-head.jsonl").write_text(json.dumps(dict(question="1 ?", answer="#### 1")) + "\n")
    (tmp_path / "gsm8k/test.jsonl").write_text(line)
    with pytest.raises(
        InputError, match="test.jsonl is no file of GSM8K's problems .*: expected JSON lines with question and answer$"
    ):
        local.local_task("gsm8k", setting)
