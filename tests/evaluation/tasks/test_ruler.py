"""RULER: prompts fit their length and have their answers, a solver by rules answers all, scores are official, bad input is named."""

import gzip
import hashlib
import json
import random
import re
from collections import Counter
from itertools import product

import pytest

from icejax.checks.errors import InputError
from tests.helpers import words

pytest.importorskip("lm_eval")
from icejax.evaluation.setting import Setting  # noqa: E402
from icejax.evaluation.tasks import ruler, ruler_needles, ruler_questions  # noqa: E402

SAMPLES = 4
NEW_TOKENS = dict(
    niah=128, vt=30, cwe=120, fwe=50, qa=32
)  # `tokens_to_generate` of RULER's scripts/data/synthetic/constants.py
LENGTHS = (2000, 4096)
# SHA-256, its beginning, of the prompts that RULER's own programs make (NVIDIA/RULER c3f5e3b) of these words and this tokenizer at
# the first length; in place of NLTK's sentences of essays they had ours.
OFFICIAL = dict(
    niah_single_1="2fc1f8f63f09676a",
    niah_single_2="9ca8e4ce431183a0",
    niah_single_3="6cfb7d7807d54867",
    niah_multikey_1="2d927289b1c08d90",
    niah_multikey_2="60805eba5a529e6c",
    niah_multikey_3="7c6bcdb388432a1c",
    niah_multivalue="7ff7fd5de60f0cfd",
    niah_multiquery="20047f23ae39e151",
    vt="c9570e4c0f60b966",
    cwe="baea7bf89ed361a9",
    fwe="b2e3a0144869bbd0",
    qa_1="f9d953b94181d598",
    qa_2="71090f20593eabe2",
)
WORDS = {
    kind: sorted({"".join(letters) for letters in product(kind[:3], "aeiou", "bdgklmnr", "aeiou", "st")})
    for kind in ("noun", "adjective", "verb")
}


@pytest.fixture(autouse=True)
def _own_words(monkeypatch):
    monkeypatch.setattr(ruler, "words", WORDS.get)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sources of essays and questions."""
    folder, draws = tmp_path_factory.mktemp("data"), random.Random(0)
    (folder / "ruler/essays").mkdir(parents=True)
    essay = " ".join(f"Essay number {i} is  short.\nIs it?" for i in range(300))
    (folder / ruler.ESSAYS).write_bytes(gzip.compress(json.dumps(dict(text=essay)).encode()))
    (folder / ruler.MORE_WORDS).write_text(json.dumps({str(i): f"word{i}" for i in range(5000)}))

    def filler() -> str:
        return " ".join(draws.choices(WORDS["noun"], k=30))

    def paragraph(name: str) -> dict:
        asked = dict(
            question=f"What is the code of {name}?", is_impossible=False, answers=[dict(text=f"{name}!"), dict(text="no")]
        )
        return dict(context=f"{filler()} The code of {name} is {name}!", qas=[asked, dict(question="?", is_impossible=True)])

    squad = dict(data=[dict(paragraphs=[paragraph(f"p{i}q{j}") for j in range(4)]) for i in range(20)])
    hotpotqa = [
        dict(
            question=f"Where is h{i}?",
            answer=f"place {i}!",
            context=[[f"h{i} {j}", [filler(), f" place {i}!"]] for j in range(10)],
        )
        for i in range(10)
    ]
    (folder / ruler_questions.FILES["qa_1"]).write_text(json.dumps(squad))
    (folder / ruler_questions.FILES["qa_2"]).write_text(json.dumps(hotpotqa))
    return folder


def solved(kind: str, prompt: str) -> str:
    """Answers a prompt by rules, from its text alone."""
    if kind.startswith("niah"):
        keys = re.findall(r"[\w-]+", re.search(r" for (.*?) mentioned in the provided text\?", prompt)[1].replace(" and ", " "))
        return ", ".join(value for key in keys for value in re.findall(rf"for {key} is: ([\w-]+)\.", prompt))
    if kind == "vt":
        *_, text = prompt.split("Memorize and track")
        value = re.search(r"assigned the value (\d+) in", text)[1]
        values = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text))

        def last(name: str) -> str:
            return last(values[name]) if name in values else name

        return " ".join(name for name in values if last(name) == value)
    if kind == "cwe":
        *_, text = prompt.split("Below is a numbered list")
        return " ".join(word for word, _ in Counter(re.findall(r"\d+\. (\w+)", text)).most_common(10))
    if kind == "fwe":
        text = prompt.split("coded words. ")[1].split("\nQuestion")[0]
        return " ".join(word for word, _ in Counter(text.split()).most_common(4) if word != "...")
    name = re.search(r"Question: (?:What is the code of|Where is) (\w+)\?", prompt)[1]
    return re.search(rf"{name} is ({name}!)|{name} \d\n.*? (place \d+!)", prompt)[0]


def test_lengths_go_behind_names_without_one():
    assert ruler.sized("ruler_vt", (4096, 8192)) == ["ruler_vt_4096", "ruler_vt_8192"]
    assert ruler.sized("ruler", (512,)) == ["ruler_512"]
    assert [ruler.sized(*asked) for asked in (("ruler_vt_1024", (4096,)), ("niah", (4096,)), ("ruler_vt", None))] == [
        ["ruler_vt_1024"],
        ["niah"],
        ["ruler_vt"],
    ]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", [*ruler.MADE, "qa_1", "qa_2"])
def test_prompts_fit_and_a_solver_by_rules_is_always_right(folder, kind, length):
    task = ruler.task(f"ruler_{kind}_{length}", Setting(words.model(), folder, limit=SAMPLES))
    rows = task.dataset["test"]
    asked = words.requests(task)
    assert len(rows) == SAMPLES and len({row["prompt"] for row in rows}) == SAMPLES
    for row, (prompt, options) in zip(rows, asked, strict=True):
        assert prompt == row["prompt"] + row["prefix"] and options["max_gen_toks"] == NEW_TOKENS[kind.partition("_")[0]]
        tokens = len(words.encode(prompt)) + options["max_gen_toks"]
        # Documents of HotpotQA come ten at least; other prompts fill at least three quarters of their length.
        assert (0.75 if kind != "qa_2" else 0.4) * length < tokens <= length
        assert any(text in row["prompt"] for text in row["answers"])
        assert task.process_results(row, [solved(kind, row["prompt"])]) == {"score": 1.0}
    if length == LENGTHS[0]:
        made = [[row[name] for name in ("prompt", "prefix", "answers")] for row in rows]
        assert hashlib.sha256(json.dumps(made).encode()).hexdigest().startswith(OFFICIAL[kind])


@pytest.mark.parametrize("kind", ["niah_single_1", "vt", "cwe", "fwe", "qa_1"])
def test_tokens_that_the_tokenizer_adds_change_no_prompt_and_have_room(folder, kind):
    def rows(added, chat_tokens):
        model = words.model()
        model.tok_encode = lambda text, add_special_tokens=True: ["<s>"] * (added * add_special_tokens) + words.encode(text)
        setting = Setting(model, folder, limit=SAMPLES, chat_tokens=chat_tokens)
        return list(ruler.task(f"ruler_{kind}_1900", setting).dataset["test"])

    assert rows(1, 0) == rows(0, 0)
    assert rows(1, 11) == rows(0, 10)  # a template of 11 tokens with bos
    for added, chat_tokens in ((100, 0), (100, 110)):
        for row in rows(added, chat_tokens):
            tokens = len(words.encode(row["prompt"] + row["prefix"])) + NEW_TOKENS[kind.partition("_")[0]]
            assert tokens + max(added, chat_tokens) <= 1900


@pytest.mark.parametrize(
    "kind", ["niah_multikey_1", "niah_multikey_2", "niah_multikey_3", "niah_multivalue", "niah_multiquery"]
)
def test_no_other_needle_has_the_answer(folder, kind):
    task = ruler.task(f"ruler_{kind}", Setting(words.model(), folder, limit=SAMPLES))
    for row in task.dataset["test"]:
        needles = re.findall(r"for ([\w-]+) is: ([\w-]+)\.", row["prompt"])
        question = row["prompt"].rsplit("\n", 1)[1]
        others = [value for key, value in needles if key not in question]
        assert len(needles) == len(others) + len(row["answers"])
        assert sorted(value for key, value in needles if key in question) == sorted(row["answers"])
        assert not set(others) & set(row["answers"])


def test_draws_depend_on_the_task_and_length_alone(folder):
    setting = Setting(words.model(), folder, limit=2)
    tasks = [ruler.task(name, setting) for name in ("ruler_vt", "ruler_vt_4096", "ruler_vt_2000")]
    prompts = [[row["prompt"] for row in task.dataset["test"]] for task in tasks]
    assert prompts[0] == prompts[1] != prompts[2]
    longer = ruler.task("ruler_vt", Setting(words.model(), folder, limit=3)).dataset["test"]
    assert [row["prompt"] for row in longer][:2] == prompts[0]


def test_the_chat_template_counts(folder):
    plain, chat = (
        ruler.task("ruler_niah_single_1", Setting(words.model(), folder, limit=1, chat_tokens=tokens)).dataset["test"][0]
        for tokens in (0, 1000)
    )
    assert 900 < len(words.encode(plain["prompt"])) - len(words.encode(chat["prompt"])) < 1100


def test_pairs_are_those_of_a_sorted_set():
    adjectives, nouns = ["old", "old-new", "new", "new-", "a", "new"], ["z", "new-b", "b", "a", "b"]
    pairs = ruler_needles.Pairs(adjectives, nouns)
    assert list(pairs[i] for i in range(len(pairs))) == sorted({f"{a}-{b}" for a in adjectives for b in nouns})


@pytest.mark.parametrize(
    "answer, every, some",
    [("12 and AB", 1.0, 1.0), ("ab", 0.5, 1.0), ("1\x002", 0.0, 0.0), ("\x00ab\x01", 0.5, 1.0), ("", 0.0, 0.0)],
)
def test_scores_are_official(answer, every, some):
    """`string_match_all` and `string_match_part` of scripts/eval/synthetic/constants.py, behind `postprocess_pred`."""
    row = dict(answers=["12", "ab"])
    assert (ruler.all_texts(row, answer), ruler.any_text(row, answer)) == (every, some)


def test_names_have_lengths():
    for name in ("ruler", "ruler_8192", "ruler_vt", "ruler_niah_single_1", "ruler_niah_single_1_16384", "ruler_qa_2_4096"):
        assert ruler.has(name), name
    for name in ("ruler_", "ruler_vt_", "ruler_niah", "ruler_qa_3", "ruler_vt_4096_1", "niah_single_1"):
        assert not ruler.has(name), name


def test_the_group_has_all_made_tasks(folder):
    together = ruler.task("ruler_2000", Setting(words.model(), folder, limit=1))
    assert together.child_names == [f"ruler_{kind}_2000" for kind in ruler.MADE] and len(together.child_names) == 11


def test_bad_input_is_named(folder, tmp_path, monkeypatch):
    setting, empty = Setting(words.model(3000), folder, limit=1), Setting(words.model(), tmp_path, limit=1)
    for name, given, message in (
        ("ruler_vt", setting, "ruler_vt needs 4096 tokens, and --context-length is 3000: raise it"),
        ("ruler_vt_100", setting, "has more than 100 tokens"),
        ("ruler_niah_single_1_100", setting, "has more than 100 tokens"),
        ("ruler_fwe_60", setting, "has more than 60 tokens"),
        ("ruler_fwe_230", setting, "has more than 230 tokens"),
        ("ruler_qa_2_300", setting, "has more than 300 tokens"),
        ("ruler_niah_single_2", empty, "--data has no PaulGrahamEssays.json.gz"),
        ("ruler_qa_1", empty, "--data has no squad.json"),
    ):
        with pytest.raises(InputError, match=message):
            ruler.task(name, given)
    (tmp_path / "ruler/essays").mkdir(parents=True)
    (tmp_path / ruler.ESSAYS).write_bytes(gzip.compress(b'{"words": 1}'))
    for kind, text in (("qa_1", "[]"), ("qa_2", '[{"question": "?"}]')):
        (tmp_path / ruler_questions.FILES[kind]).write_text(text)
    for name, message in (("ruler_niah_single_2", "RULER's essays"), ("ruler_qa_1", "SQuAD"), ("ruler_qa_2", "HotpotQA")):
        with pytest.raises(InputError, match=f"is not {message}"):
            ruler.task(name, empty)
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "wonderwords", None)
    ruler.words.cache_clear()
    with pytest.raises(InputError, match="wonderwords, which is not installed: pip install"):
        ruler.task("ruler_niah_single_1", Setting(words.model(), folder, limit=1))
