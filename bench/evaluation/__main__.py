"""Runs `icejax evaluate` for bench/results/evaluation.md: ``python -m bench.evaluation --question 5 --data DATA --out DIR``.

The runs of a question are those of `bench/evaluation/runs.py`. Each run's folder is DIR/q5/NAME, with a folder of scores for
each cache, as `icejax evaluate --output` writes it. It skips a finished run and continues an interrupted one; `--limit` raises
the number of samples, and answers that are there stay. In question 1 a run is a command of its own, because it is timed. In the
others each prompt is prefilled once for all caches (`bench/evaluation/together.py`), and times of a prefill are of no cache.

`--page` adds all finished runs in DIR to evaluation.jsonl in --results and makes evaluation-tables.md and evaluation.png of it.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from bench import published, texts
from bench.evaluation import page, rows
from bench.evaluation.runs import MODEL, Run, all_runs, estimate, groups, texts_folder
from bench.flags import listed, make_folder
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.evaluation", description=__doc__.splitlines()[0])
    runs = all_runs()
    parser.add_argument("--question", type=int, choices=sorted({run.question for run in runs}), help="default: all")
    parser.add_argument("--runs", metavar="NAMES", help="names of runs, comma-separated (default: all of the question)")
    parser.add_argument("--caches", metavar="NAMES", help="as in full,clustered-64 (default: all of the question)")
    parser.add_argument("--limit", type=int, help="samples of each task (default: the run's)")
    parser.add_argument("--model", default=MODEL, help="a folder, or a name of bench.published (default: %(default)s)")
    parser.add_argument("--data", type=Path, metavar="DIR", default=Path("data"), help="as in icejax evaluate (default: data)")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("evaluation"), help="default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="print the commands that are left, and the estimated time")
    parser.add_argument("--page", action="store_true", help="run nothing, and write the page")
    parser.add_argument("--results", type=Path, metavar="DIR", default=Path("bench/results"), help="default: %(default)s")
    arguments = parser.parse_args(argv)
    try:
        if arguments.page:
            make_folder(arguments.results)
            page.write(rows.of_runs(runs, arguments.out), arguments.results)
            return 0
        if arguments.limit is not None:
            integer("--limit", arguments.limit)
        left = [run for run in _chosen(arguments, runs) if not run.is_finished(arguments.model, arguments.out, arguments.limit)]
        _dry_run(arguments, left) if arguments.dry_run else _run(arguments, left)
    except InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return 0


def _chosen(arguments: argparse.Namespace, runs: list[Run]) -> list[Run]:
    runs = [run for run in runs if arguments.question in (None, run.question)]
    names, caches = (list(dict.fromkeys(getattr(run, field) for run in runs)) for field in ("name", "cache"))
    if arguments.runs is not None:
        names = listed("--runs", arguments.runs, names)
    if arguments.caches is not None:
        caches = listed("--caches", arguments.caches, caches)
    return [run for run in runs if run.name in names and run.cache in caches]


def _command(arguments: argparse.Namespace, run: Run) -> list[str]:
    return run.arguments(arguments.model, arguments.data, arguments.out, arguments.limit)


def _dry_run(arguments: argparse.Namespace, left: list[Run]) -> None:
    total, compiled = 0.0, set()
    for group in _shared(left):
        seconds = estimate(group, arguments.limit, compiled)
        total += seconds
        print(f"# {group[0].name}: {', '.join(run.cache for run in group)}: about {seconds / 60:.0f} minutes")
        for run in group:
            print(shlex.join(["icejax", "evaluate", *_command(arguments, run)]))
    print(f"# {len(left)} runs are left, about {total / 60:.0f} minutes on two cores")


def _shared(left: list[Run]) -> list[list[Run]]:
    return [part for group in groups(left) for part in ([group] if group[0].prompt else [[run] for run in group])]


def _run(arguments: argparse.Namespace, left: list[Run]) -> None:
    console = Console(stderr=True, width=180, highlight=False)
    if left:
        make_folder(arguments.out)
        for weights in {run.weights for run in left} if arguments.model in published.MODELS else ():
            (published.gguf if weights == "gguf" else published.folder)(arguments.model, say=console.print)
    if any("{texts}" in part for run in left for part in run.options):
        make_folder(texts_folder(arguments.out))
        for kind in texts.WHOLE:
            (texts_folder(arguments.out) / f"{kind}.txt").write_text(texts.whole(kind))
    loaded = None
    for group in _shared(left):
        if not group[0].prompt:
            _alone(group[0], _command(arguments, group[0]), console)
        else:
            loaded = _together(group, [_command(arguments, run) for run in group], arguments.out, loaded, console)


def _alone(run: Run, command: list[str], console: Console) -> None:
    started = time.perf_counter()
    status = subprocess.run([sys.executable, "-m", "icejax", "evaluate", *command], stdout=subprocess.DEVNULL).returncode
    if status:
        raise InputError(f"{run.name} ended with status {status}: icejax evaluate {shlex.join(command)}")
    console.print(f"{run.name}: {time.perf_counter() - started:.0f} s")


def _together(group: list[Run], commands: list[list[str]], out: Path, loaded: tuple | None, console: Console) -> tuple:
    """Runs the caches of a group after one prefill; returns the model and the tokenizer, loaded if they were not."""
    from bench.evaluation.together import Together, stream  # imports JAX and the harness, which a dry run does not need
    from icejax.commands import evaluate, options

    first, started = group[0], time.perf_counter()
    parsed = [evaluate.parser("icejax evaluate").parse_args(command) for command in commands]
    for arguments in parsed:
        evaluate.check(arguments)
    model, tokenizer = loaded or evaluate.loaded(parsed[0], console)
    answering = stream(model, tokenizer, first.prompt)
    models = [evaluate.harness_model(x, model, tokenizer, options.policy(x), answering) for x in parsed]
    tell = lambda line: console.print(f"{time.strftime('%T')} {first.name}: {line}", markup=False)  # noqa: E731
    evaluate.run_tasks(parsed[0], Together(models, out, tell))
    for arguments, one in zip(parsed, models, strict=True):
        evaluate.score(arguments, one)
    tell(f"{len(group)} caches are scored after {time.perf_counter() - started:.0f} s")
    return model, tokenizer


if __name__ == "__main__":
    sys.exit(main())
