"""MiniLongBench: the official scorers to the digit, the cut of a long prompt, and files that are none."""

import gzip
import json

import pytest

from icejax.checks.errors import InputError
from tests.helpers import words

pytest.importorskip("lm_eval")
from icejax.evaluation.setting import Setting  # noqa: E402
from icejax.evaluation.tasks import longbench, longbench_scores  # noqa: E402

CLASSES = ["Individual", "Group", "Other entity", "entity", "Other", "Date"]
# Data set, answer, right ones, classes; the score is that of LongBench/eval.py and metrics.py with rouge 1.0.1, jieba 0.42.1 and
# fuzzywuzzy 0.18.0 without python-Levenshtein.
GOLDEN = (
    ("narrativeqa", "The Cat sat, on a mat.", ["cat sat on mat"], [], 1.0),
    ("narrativeqa", "", ["x"], [], 0.0),
    ("hotpotqa", "no no yes", ["no", "yes it is"], [], 0.5),
    ("triviaqa", "\n\nParis\nQuestion: next", ["paris"], [], 1.0),
    ("hotpotqa", "\n\nParis\nQuestion: next", ["paris"], [], 0.5),
    ("trec", "Other entity", ["Other entity"], CLASSES, 0.5),  # "Other" stays: the loop skips it
    ("trec", "Other entity or Date", ["Other entity"], CLASSES, 0.3333333333333333),
    ("trec", "Group\nDate", ["Group"], CLASSES, 1.0),
    ("trec", "entity", ["Other entity"], CLASSES, 0.0),
    ("lsht", "体育\n新闻", ["体育"], ["体育", "军事"], 1.0),
    ("passage_count", "The answer is 7, not 12 or 7", ["7"], [], 0.6666666666666666),
    ("passage_count", "seven", ["7"], [], 0.0),
    ("passage_retrieval_en", "Paragraph 3, or 13", ["Paragraph 3"], [], 0.5),
    ("passage_retrieval_zh", "段落5。5", ["段落5"], [], 1.0),
    ("lcc", "\n```python\n# comment\n\nx = 1", ["x = 1"], [], 0.0),  # the first line that is no comment is empty
    ("lcc", "```python\n    x = 1  // 2\n    return x\nrest", ["    return y"], [], 0.92),
    ("lcc", "`a`", ["x"], [], 0.0),
    ("repobench-p", "def f(self, name):", ["def f(self, names, age):"], [], 0.86),
    ("samsum", "\nEmilia is angry.\nDialogue: x", ["Emilia is still angry."], [], 0.8571428522448981),
    ("gov_report", "The cat sat. The dog ran.", ["The dog ran. The cat slept."], [], 0.7999999950000002),
    ("gov_report", "", ["x"], [], 0.0),
    ("gov_report", ".", ["a b"], [], 0.0),
    ("gov_report", "a b " * 700, ["b a " * 700], [], 0.0),  # rouge recurses too deeply
    ("multifieldqa_zh", "２０１２年，铜仁市增长了25%。", ["2012年，铜仁市的财政总收入增长了25.89%。"], [], 0.4444444444444444),
    ("dureader", "体验服是测试新模式的", ["体验服是逆战拿来测试新模式的。"], [], 0.7999999952000001),
    ("vcsum", "。", ["总结"], [], 0.0),
)  # fmt: skip
# What LongBench's own program gives the answers of another model that MiniLongBench has, in percent.
PUBLISHED = {
    "narrativeqa": 3.33, "qasper": 11.36, "multifieldqa_en": 23.33, "multifieldqa_zh": 12.01, "hotpotqa": 7.44,
    "2wikimqa": 7.99, "musique": 14.67, "dureader": 10.7, "gov_report": 20.6, "qmsum": 18.0, "multi_news": 32.59,
    "vcsum": 8.13, "trec": 37.5, "triviaqa": 83.93, "samsum": 27.15, "lsht": 25.0, "passage_retrieval_en": 6.67,
    "passage_count": 0.0, "passage_retrieval_zh": 7.22, "lcc": 69.58, "repobench-p": 42.43,
}  # fmt: skip


def need_packages(dataset: str) -> None:
    for package in longbench_scores.PACKAGES.get(longbench_scores.SCORES[dataset], ()):
        pytest.importorskip(package)


@pytest.mark.parametrize("dataset, answer, golds, classes, score", GOLDEN)
def test_scores_are_the_official_ones(dataset, answer, golds, classes, score):
    need_packages(dataset)
    assert longbench_scores.best(dataset, answer, golds, classes) == pytest.approx(score, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dataset", PUBLISHED)
def test_published_answers_score_as_officially(dataset, data):
    need_packages(dataset)
    file = data / "minilongbench" / f"{dataset}.jsonl.gz"
    answers = [json.loads(line)["prediction_of_another_model"] for line in gzip.open(file, "rt", encoding="utf-8")]
    rows = longbench.samples(file, dataset)
    scores = [
        longbench_scores.best(dataset, answer, row["answers"], row["classes"])
        for row, answer in zip(rows, answers, strict=True)
    ]
    assert round(100 * sum(scores) / len(scores), 2) == PUBLISHED[dataset]


def write(folder, dataset: str, *lines: dict) -> None:
    (folder / "minilongbench").mkdir(exist_ok=True)
    (folder / "longbench/config").mkdir(parents=True, exist_ok=True)
    (folder / longbench.LENGTHS).write_text(json.dumps(dict.fromkeys(longbench_scores.SCORES, 6)))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"minilongbench/{dataset}.jsonl.gz").write_bytes(gzip.compress(text.encode()))


def test_a_long_prompt_loses_its_middle_and_code_gets_no_chat_template(tmp_path):
    text = " ".join(map(str, range(50)))  # 99 tokens: numbers and spaces
    for dataset in ("lcc", "hotpotqa"):
        write(tmp_path, dataset, dict(prompt=text, gold=["x"]), dict(prompt="short", gold=["x"]))
    setting = Setting(words.model(30), tmp_path, chat_tokens=4)

    def template(messages, **_):
        return f"<{messages[-1]['content']}>"

    shown = {
        dataset: [
            prompt
            for prompt, _ in words.requests(
                longbench.task(f"minilongbench_{dataset}", setting), apply_chat_template=True, chat_template=template
            )
        ]
        for dataset in ("lcc", "hotpotqa")
    }
    # 24 tokens of 30 are the prompt's where 6 are the answer's, and 20 where the template adds 4.
    assert shown["lcc"] == ["0 1 2 3 4 5 44 45 46 47 48 49"[:12] + " 44 45 46 47 48 49", "short"]
    assert shown["hotpotqa"] == ["<0 1 2 3 4  45 46 47 48 49>", "<short>"]
    task = longbench.task("minilongbench_lcc", setting)
    assert task.process_results(task.dataset["test"][0], ["x\ny"]) == {"score": 1.0}
    assert words.requests(task)[0][1] == dict(until=[], max_gen_toks=6, do_sample=False)


def test_six_data_sets_are_continued_without_a_chat_template(tmp_path):
    for dataset in longbench_scores.SCORES:
        need_packages(dataset)
        write(tmp_path, dataset, dict(prompt="text", gold=["Paragraph 1"]))
    asked = {
        dataset: words.requests(
            longbench.task(f"minilongbench_{dataset}", Setting(words.model(), tmp_path)),
            apply_chat_template=True,
            chat_template=lambda messages, **_: f"<{messages[-1]['content']}>",
        )[0][0]
        for dataset in longbench_scores.SCORES
    }
    continued = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    assert asked == {dataset: "text" if dataset in continued else "<text>" for dataset in asked} and len(asked) == 21


def test_a_cut_text_that_has_more_tokens_than_its_parts_is_cut_further():
    model = words.model()
    # Each decoded half ends with "a", which counts twice in a text: halves of four tokens make 10, of three 5.
    model.tok_encode = lambda text: [part for word in words.encode(text) for part in (word, "")[: 1 + (word == "a")]]
    model.tokenizer.decode = lambda tokens, skip_special_tokens: "".join(tokens) + "a"
    assert len(model.tok_encode("b c a h ia")) == 10
    assert longbench.without_middle(model, "b c d e f g h i", 8) == "b cah ia"
    with pytest.raises(InputError, match="leaves no room"):
        longbench.without_middle(model, "a b c d e", 1)


@pytest.mark.parametrize(
    "gold", ["x", [1], dict(answers=["x"]), dict(answers="x", all_classes=[]), dict(answers=["x"], all_classes="x"), None]
)
def test_other_files_are_refused(tmp_path, gold):
    setting = Setting(words.model(), tmp_path)
    with pytest.raises(InputError, match="--data has no dataset2maxlen.json"):
        longbench.task("minilongbench_lcc", setting)
    write(tmp_path, "lcc", dict(prompt="a", gold=gold))
    with pytest.raises(InputError, match="is no file of prompts"):
        longbench.task("minilongbench_lcc", setting)
    with pytest.raises(InputError, match="--data has no trec.jsonl.gz"):
        longbench.task("minilongbench_trec", setting)
    write(tmp_path, "lcc")
    with pytest.raises(InputError, match="it is empty"):
        longbench.task("minilongbench_lcc", setting)


@pytest.mark.parametrize("dataset", ["passage_retrieval_en", "passage_retrieval_zh"])
def test_a_gold_without_a_paragraph_is_refused_before_a_question_is_asked(tmp_path, dataset):
    good = dict(prompt="a", gold=["Paragraph 3", "段落4"])
    write(tmp_path, dataset, good)
    assert longbench.samples(tmp_path / f"minilongbench/{dataset}.jsonl.gz", dataset)[0]["answers"] == good["gold"]
    write(tmp_path, dataset, good, dict(prompt="a", gold=["Paragraph three"]))
    with pytest.raises(InputError, match=f"{dataset}.jsonl.gz is no file of prompts .ValueError: a gold has no 'Paragraph 3'"):
        longbench.task(f"minilongbench_{dataset}", Setting(words.model(), tmp_path))


def test_a_scorer_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="minilongbench_vcsum is scored with rouge, which is not installed: pip install"):
        longbench.task("minilongbench_vcsum", Setting(words.model(), tmp_path))
