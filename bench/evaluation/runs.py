"""The runs behind bench/results/evaluation.md, by the page's question; each is a command `icejax evaluate`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import published
from icejax.checks.errors import InputError

MODEL = "qwen2.5-coder-0.5b"  # of `bench.published`
SYSTEM = "You are an intelligent programming assistant to produce Python algorithmic solutions"  # Qwen's own evaluation
QUANTIZED = ("int8", "int4")  # weights that --quantize rounds to
COMPILE_S = 30  # seconds of compiling for a cache and a size of its batch
BUDGETS = "clustered-64 clustered-256 coded-256 icecache-256 quest-256 retroinfer-256 pqcache-256 snapkv-256"
SESSION_CACHES = "full clustered-256 coded-256 restkv-256 snapkv-256 streaming-256 h2o-256 lacache-256".split()
TASK_CACHES = ["full", *BUDGETS.split(), "q8_0", "q4_0"]
# MiniLongBench's data sets in English, and those of code
DATASETS = (
    "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique gov_report qmsum multi_news trec triviaqa samsum "
    "passage_count passage_retrieval_en lcc repobench-p"
).split()


@dataclass(frozen=True)
class Run:
    """A run of `icejax evaluate` with one cache.

    Attributes:
        question: number of the page's question.
        name: folder of the run, beside which other caches' stand if they share the prefill.
        cache: name and budget, as in `clustered-64`; the folder of its scores.
        options: options of `icejax evaluate` for the tasks; {data} and {texts} stand for folders.
        limit: samples of each task.
        tasks: number of tasks.
        seconds: estimated time of a sample on two cores: of all caches together, and of each cache.
        batch: rows that decode together.
        prompt: size of a prompt in the batch, where the prefill is shared with other caches; None: it is not shared.
        weights: fp32, gguf (Q4_K_M), int8 or int4.
        base: name and cache of the run that this one is compared with.
    """

    question: int
    name: str
    cache: str
    options: tuple[str, ...]
    limit: int
    tasks: int
    seconds: tuple[float, float]
    batch: int
    prompt: int | None
    weights: str
    base: tuple[str, str]

    def output(self, out: Path) -> Path:
        """Returns the folder that is given to --output."""
        return out / f"q{self.question}" / self.name

    def folder(self, out: Path) -> Path:
        """Returns the folder of the scores."""
        return self.output(out) / self.cache

    def model(self, asked: str) -> Path:
        """Returns the path of the model `asked`: a folder, or a name of `bench.published`, whose GGUF file may be meant."""
        if asked not in published.MODELS:
            return Path(asked)
        return published.home() / (published.MODELS[asked].file if self.weights == "gguf" else asked)

    def arguments(self, model: str, data: Path, out: Path, limit: int | None = None) -> list[str]:
        """Returns the arguments of `icejax evaluate`."""
        cache, _, budget = self.cache.partition("-")
        places = dict(data=data, texts=texts_folder(out))
        found = ["--model", str(self.model(model)), *(part.format(**places) for part in self.options)]
        found += ["--limit", str(limit or self.limit), "--batch-size", str(self.batch), "--cache", cache]
        found += ["--budget", budget] if budget else []
        found += ["--quantize", self.weights] if self.weights in QUANTIZED else []
        return [*found, "--quiet", "--output", str(self.output(out))]

    def is_finished(self, model: str, out: Path, limit: int | None = None) -> bool:
        """Whether the run has scores of at least as many samples as are asked for now.

        Raises:
            InputError: the scores are of another model than the asked one, or cannot be read.
        """
        path, asked = self.folder(out) / "results.json", self.model(model).name
        try:
            results = json.loads(path.read_text())
            scored, scored_model = results["config"]["limit"], results["icejax"]["model"]
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"{path} has no model or no limit of samples: remove it, and the run continues") from None
        if scored_model != asked:
            raise InputError(f"{path} is of {scored_model}, not of {asked}: give another --out")
        return scored is None or scored >= (limit or self.limit)


def texts_folder(out: Path) -> Path:
    """Returns the folder of the texts whose perplexity is measured."""
    return out / "texts"


def all_runs() -> list[Run]:
    """Returns the runs of all questions, in the order in which they run."""
    return [*_answers(), *_sessions(), *_tasks()]


def _answers() -> Iterator[Run]:
    """Yields the runs of question 1: programs, by weights, batch and cache."""
    humaneval, mbpp = (
        ("--tasks", tasks, "--chat", "--system", SYSTEM, "--data", "{data}")
        for tasks in ("humaneval_instruct,humaneval_plus_instruct", "mbpp_plus_instruct")
    )
    caches = dict(full="full", clustered="clustered-64")
    rows = [("fp32", "full", 16), ("fp32", "clustered", 16)]
    rows += [("fp32", cache, batch) for cache in caches for batch in (1, 4)]
    rows += [(weights, "full", batch) for weights in ("gguf", *QUANTIZED) for batch in (16, 1, 4)]
    others = dict(snapkv="snapkv-64", q4_0="q4_0", icecache="icecache-64", restkv="restkv-64", streaming="streaming-64")
    rows += [("fp32", cache, 16) for cache in others]
    for weights, cache, batch in rows:
        seconds, limit = (0.0, 4.0) if batch == 16 else (0.0, 14.0), 40 if batch == 16 else 8
        sizes = dict(limit=limit, tasks=1, seconds=seconds, batch=batch, prompt=None, weights=weights)  # both tasks ask alike
        name, asked = f"{weights}-{cache}-{batch}", (caches | others)[cache]
        yield Run(1, name, asked, humaneval, **sizes, base=("fp32-full-16", "full"))
    for cache, asked in caches.items():
        sizes = dict(limit=40, tasks=1, seconds=(0.0, 4.0), batch=16, prompt=None, weights="fp32")
        yield Run(1, f"mbpp_plus-{cache}-16", asked, mbpp, **sizes, base=("mbpp_plus-full-16", "full"))


def _sessions() -> Iterator[Run]:
    """Yields the runs of question 3: questions one after another, by length."""
    for length, shared, each in ((4096, 35, 60), (8192, 80, 70), (16384, 230, 90), (32768, 700, 140)):
        name, options = f"multi_turn_code-{length}", ("--tasks", "multi_turn_code", "--lengths", str(length))
        sizes = dict(limit=2, tasks=1, seconds=(shared, each), batch=1, prompt=length, weights="fp32")
        yield from (Run(3, name, cache, options, **sizes, base=(name, "full")) for cache in SESSION_CACHES)


def _tasks() -> Iterator[Run]:
    """Yields the runs of question 5: tasks, by cache."""
    local = ("--data", "{data}")
    minilongbench = ",".join(f"minilongbench_{name}" for name in DATASETS)
    # Perplexity by position: a size of prompts and a number of rows that other runs have too, and the seconds of a sample.
    positions = {1024: (2048, 8, (8, 4)), 2048: (2048, 8, (16, 4)), 4096: (4096, 4, (35, 6)), 8192: (8192, 2, (80, 8))}
    perplexity = (
        (f"perplexity-{kind}-{length}", ("--tasks", "perplexity", "--lengths", str(length), "--text", f"{{texts}}/{kind}.txt"),
         2, 1, seconds, batch, prompt)
        for kind in ("prose", "source")
        for length, (prompt, batch, seconds) in positions.items()
    )  # fmt: skip
    # name, options, samples of a task, tasks, seconds of a sample (all caches, each cache), rows, prompt
    rows = (
        ("gsm8k", ("--tasks", "gsm8k", "--num-fewshot", "8", *local), 24, 1, (10, 4), 8, 2048),
        ("ruler-4096", ("--tasks", "ruler_4096", *local), 1, 11, (35, 5), 4, 4096),
        ("ruler-8192", ("--tasks", "ruler_8192", *local), 1, 11, (80, 7), 2, 8192),
        ("longchat_lines_200", ("--tasks", "longchat_lines_200", *local), 6, 1, (50, 6), 2, 8192),
        ("kv_retrieval", ("--tasks", "kv_retrieval", *local), 6, 1, (50, 6), 2, 8192),
        *perplexity,
        ("minilongbench", ("--tasks", minilongbench, *local, "--context-length", "8192"), 1, 16, (70, 8), 2, 8192),
    )
    for name, options, limit, tasks, seconds, batch, prompt in rows:
        sizes = dict(limit=limit, tasks=tasks, seconds=seconds, batch=batch, prompt=prompt, weights="fp32")
        yield from (Run(5, name, cache, options, **sizes, base=(name, "full")) for cache in TASK_CACHES)


def groups(runs: Iterable[Run]) -> list[list[Run]]:
    """Returns the runs that share a prefill together, and others alone."""
    found: dict[tuple[int, str], list[Run]] = {}
    for run in runs:
        found.setdefault((run.question, run.name), []).append(run)
    return list(found.values())


def estimate(group: list[Run], limit: int | None, compiled: set[tuple]) -> float:
    """Returns the estimated seconds of runs that share a prefill; `compiled` has the caches and sizes of earlier ones."""
    first, new = group[0], {(run.weights, run.cache, run.batch, run.prompt) for run in group} - compiled
    compiled |= new
    of_all, of_each = first.seconds
    return (limit or first.limit) * first.tasks * (of_all + len(group) * of_each) + COMPILE_S * len(new)
