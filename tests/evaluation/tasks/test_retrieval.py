"""LongChat's lines and key-value retrieval: prompts, scores and files that are none."""

import gzip
import json

import pytest

from icejax.checks.errors import InputError
from tests.helpers import words

pytest.importorskip("lm_eval")
from icejax.evaluation.setting import Setting  # noqa: E402
from icejax.evaluation.tasks import retrieval  # noqa: E402

LINE = dict(prompt="line a: REGISTER_CONTENT is <12>\nWhat is a? ", expected_number=12, correct_line="line a")
PAIR = dict(ordered_kv_records=[["k1", "v1"], ["k2", "V2x"], ["k3", "v3"]], key="k2", value="V2x")


def write(folder, name: str, *lines) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))


def scores(task, *answers: str) -> list[float]:
    return [task.process_results(task.dataset["test"][0], [answer])["score"] for answer in answers]


def test_the_last_number_of_an_answer_counts(tmp_path):
    for count in retrieval.COUNTS:
        write(tmp_path, f"longchat/{count}_lines.jsonl.gz", LINE | dict(prompt=LINE["prompt"] + str(count)))
    setting = Setting(words.model(), tmp_path)
    task = retrieval.task("longchat_lines_300", setting)
    assert words.requests(task) == [
        (LINE["prompt"] + "300", dict(until=[], max_gen_toks=100, do_sample=False)),
    ]
    assert scores(task, "in line 7 it is <12>.", "12, not 13", "no number", "012", "") == [1, 0, 0, 1, 0]
    together = retrieval.task("longchat_lines", setting)
    assert together.child_names == [f"longchat_lines_{count}" for count in retrieval.COUNTS]
    metrics = {name: {"score,none": i / 4, "sample_len": i + 1} for i, name in enumerate(together.child_names)}
    assert together.aggregate(metrics)["score,none"] == pytest.approx(0.5)  # each task has the same weight


def test_a_value_may_stand_anywhere_in_any_case(tmp_path):
    write(tmp_path, retrieval.FILE, PAIR)
    task = retrieval.task("kv_retrieval", Setting(words.model(), tmp_path))
    [(prompt, options)] = words.requests(task)
    assert prompt == (
        "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
        '{"k1": "v1",\n "k2": "V2x",\n "k3": "v3"}\n\nKey: "k2"\nCorresponding value:'
    )
    assert json.loads(prompt[prompt.index("{") : prompt.index("}") + 1]) == dict(PAIR["ordered_kv_records"])
    assert options["max_gen_toks"] == 100
    assert scores(task, ' "v2X" as asked', "v2", "") == [1, 0, 0]


@pytest.mark.parametrize(
    "name, file, line",
    [
        ("longchat_lines_200", "longchat/200_lines.jsonl.gz", dict(prompt="a")),
        ("longchat_lines_200", "longchat/200_lines.jsonl.gz", LINE | dict(expected_number="x")),
        ("longchat_lines_200", "longchat/200_lines.jsonl.gz", LINE | dict(prompt=3)),
        ("kv_retrieval", retrieval.FILE, PAIR | dict(key="k4")),
        ("kv_retrieval", retrieval.FILE, PAIR | dict(ordered_kv_records=[1])),
        ("kv_retrieval", retrieval.FILE, ["a"]),
    ],
)
def test_other_files_are_refused(tmp_path, name, file, line):
    setting = Setting(words.model(), tmp_path)
    with pytest.raises(InputError, match="--data has no"):
        retrieval.task(name, setting)
    write(tmp_path, file, line)
    with pytest.raises(InputError, match="is no file of (lines|key-value pairs)"):
        retrieval.task(name, setting)


@pytest.mark.parametrize("name", ["longchat_lines", "kv_retrieval"])
def test_published_files_have_their_answers_in_their_prompts(data, name):
    tasks = retrieval.task(name, Setting(words.model(), data))
    for task in tasks.get_all_tasks() if name == "longchat_lines" else [tasks]:
        rows = task.dataset["test"]
        assert len(rows) == (500 if name == "kv_retrieval" else 50)
        assert all(str(row["answer"]) in row["prompt"] for row in rows)
