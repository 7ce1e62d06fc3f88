"""The scorers of LongBench (Bai et al. 2023, arXiv 2308.14508), as in LongBench/metrics.py of THUDM/LongBench, from 0 to 1.

Their quirks are part of the scores that papers print, so they stay:

- a class that is part of the right one's name is removed from a list while a loop reads the list, which skips the next name;
- code is compared by its first line without a backtick, "#" or "//", which may be empty, by `difflib` in whole percent: that is
  fuzzywuzzy without its optional package python-Levenshtein, with which the score is another;
- ROUGE-L is the package `rouge`'s, over sets of words of sentences; an answer that it cannot score gets 0.
"""

from __future__ import annotations

import difflib
import functools
import re
import string
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

Score = Callable[[str, str, Sequence[str]], float]
PARAGRAPH = re.compile(r"(?:Paragraph |段落)(\d+)")  # in a right answer of passage retrieval
CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃"
    "》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


def f1(answer: list[str], gold: list[str]) -> float:
    """Returns the harmonic mean of precision and recall of words, each as often as it occurs."""
    same = sum((Counter(answer) & Counter(gold)).values())
    if not same:
        return 0.0
    precision, recall = same / len(answer), same / len(gold)
    return 2 * precision * recall / (precision + recall)


def question(answer: str, gold: str, _: Sequence[str]) -> float:
    """Returns F1 of words, without case, punctuation and articles."""
    return f1(_words(answer), _words(gold))


def _words(text: str) -> list[str]:
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def chinese_question(answer: str, gold: str, _: Sequence[str]) -> float:
    """Returns F1 of Chinese words, without case and punctuation."""
    return f1(_chinese_words(answer), _chinese_words(gold))


def _chinese_words(text: str) -> list[str]:
    left_out = set(string.punctuation + CHINESE_PUNCTUATION)
    words = ("".join(x for x in word.lower() if x not in left_out) for word in segmented(text))
    return [word for word in ("".join(word.split()) for word in words) if word]


def segmented(text: str) -> list[str]:
    """Returns the words of a Chinese text by jieba."""
    return _segmenter().lcut(text)


@functools.cache
def _segmenter() -> Any:
    import jieba

    jieba.setLogLevel("WARNING")
    segmenter = jieba.Tokenizer()
    # It would read its dictionary from a file in the temporary folder that anyone can write.
    with tempfile.TemporaryDirectory() as segmenter.tmp_dir:
        segmenter.initialize()
    return segmenter


def rouge_l(answer: str, gold: str, _: Sequence[str]) -> float:
    """Returns F1 of ROUGE-L."""
    from rouge import Rouge

    try:
        return Rouge(metrics=["rouge-l"]).get_scores([answer], [gold], avg=True)["rouge-l"]["f"]
    except (ValueError, RecursionError):  # no sentence, or one too long for its recursion
        return 0.0


def chinese_rouge_l(answer: str, gold: str, classes: Sequence[str]) -> float:
    """Returns F1 of ROUGE-L over Chinese words."""
    return rouge_l(" ".join(segmented(answer)), " ".join(segmented(gold)), classes)


def classification(answer: str, gold: str, classes: Sequence[str]) -> float:
    """Returns 1 over the number of classes that the answer names, if the right one is among them."""
    named = [name for name in classes if name in answer]
    for name in named:
        if name in gold and name != gold:
            named.remove(name)  # noqa: B909 - the official loop; it skips the next name
    return 1 / len(named) if gold in named else 0.0


def count(answer: str, gold: str, _: Sequence[str]) -> float:
    """Returns the fraction of numbers in the answer that are the right one."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(gold) / len(numbers) if numbers else 0.0


def retrieval(answer: str, gold: str, classes: Sequence[str]) -> float:
    """Returns the fraction of numbers in the answer that are the number of the right paragraph."""
    return count(answer, PARAGRAPH.findall(gold)[0], classes)


def code(answer: str, gold: str, _: Sequence[str]) -> float:
    """Returns how alike the first line of code and the right line are, in whole percent."""
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, gold).ratio()) / 100


SCORES: dict[str, Score] = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"), question),
    "multifieldqa_zh": chinese_question,
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), rouge_l),
    **dict.fromkeys(("dureader", "vcsum"), chinese_rouge_l),
    **dict.fromkeys(("trec", "lsht"), classification),
    **dict.fromkeys(("passage_retrieval_en", "passage_retrieval_zh"), retrieval),
    "passage_count": count,
    **dict.fromkeys(("lcc", "repobench-p"), code),
}
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")  # data sets whose answers end with a line
PACKAGES = {rouge_l: ("rouge",), chinese_rouge_l: ("rouge", "jieba"), chinese_question: ("jieba",)}


def best(dataset: str, answer: str, golds: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Returns the score of an answer: the best over the right ones, 0 without any.

    Args:
        dataset: a name in `SCORES`.
        classes: all classes of a data set of classification.
    """
    if dataset in FIRST_LINE:
        answer = answer.lstrip("\n").split("\n")[0]
    return max((SCORES[dataset](answer, gold, classes) for gold in golds), default=0.0)
