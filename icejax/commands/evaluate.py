"""The command ``icejax evaluate``: tasks of lm-evaluation-harness on a model with one cache or two, and reports on runs."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from icejax import __version__
from icejax.api.choice import batch_choice
from icejax.api.prompts import check_context
from icejax.cache.options import make_policy
from icejax.cache.protocol import CachePolicy
from icejax.cache.registry import IN_PAGES, ON_DEVICE, display_name
from icejax.checks.errors import InputError
from icejax.checks.numbers import POSITIONS, integer, integers
from icejax.commands import options
from icejax.commands.group import in_group, is_first
from icejax.commands.loading import load, model_name, tell_cache
from icejax.commands.options import Parser
from icejax.commands.terminal.process import ending, write
from icejax.commands.terminal.stderr import stderr_console
from icejax.engine.snapshot.fingerprint import fingerprint, weights_sum
from icejax.evaluation.answers import Answers
from icejax.files import private
from icejax.models.decoder import CausalLM
from icejax.runtime import processes
from icejax.runtime.mesh import holders
from icejax.runtime.out_of_memory import report_out_of_memory
from icejax.text.encode import encode

AGAINST = "full"  # the cache that others are compared with, unless the command line names one
PACKAGES = {"lm_eval": "the benchmarks are those of lm-eval", "matplotlib": "the report draws with matplotlib"}
MAX_GEN_TOKS = 256  # answer tokens of tasks that name none, as in the harness


def main(argv: list[str] | None = None, *, name: str) -> int:
    """Runs the command line and returns the exit status of `process.ending`."""
    return ending(name, lambda: _parse_and_run(argv, name))


def parser(name: str) -> Parser:
    """Returns the parser of `evaluate`; names are those of lm-evaluation-harness."""
    parser = Parser(prog=name, description="Score a model with a cache on tasks of lm-evaluation-harness.")
    tasks = parser.add_argument_group("tasks")
    tasks.add_argument("-t", "--tasks", metavar="NAMES", help="comma-separated, such as gsm8k,hellaswag")
    compare_help = "run nothing: report on finished runs in these folders, or in the folders inside them"
    tasks.add_argument("--compare", type=Path, nargs="+", metavar="DIR", help=compare_help)
    tasks.add_argument("--data", type=Path, metavar="DIR", help="read tasks from files in DIR, where icejax knows their names")
    lengths_help = "tokens of generated samples, comma-separated (default: the task's)"
    tasks.add_argument("--lengths", metavar="N,...", help=lengths_help)
    tasks.add_argument("--text", type=Path, metavar="FILE", help="the text that the task perplexity scores")
    tasks.add_argument("--include-path", type=Path, metavar="DIR", help="a folder with task files (YAML) of your own")
    tasks.add_argument("-L", "--limit", type=int, metavar="N", help="samples of each task (default: all)")
    tasks.add_argument("-k", "--num-fewshot", "--num_fewshot", type=int, metavar="K", help="examples (default: the task's)")
    gen_help = "options of the answers over the task's, as in max_gen_toks=64,do_sample=True,temperature=0.5"
    tasks.add_argument("--gen-kwargs", "--gen_kwargs", metavar="KEY=VALUE,...", help=gen_help)
    tasks.add_argument("--chat", "--apply_chat_template", action="store_true", help="put prompts into the chat template")
    tasks.add_argument("--system", "--system_instruction", metavar="TEXT", help="system message, with --chat")
    against_help = "score this cache too, and the difference sample by sample; --cache auto takes another one"
    tasks.add_argument("--against", metavar="CACHE", help=against_help)
    log_help = "lm-eval's option; without effect, because samples are always written"
    tasks.add_argument("-s", "--log-samples", "--log_samples", action="store_true", help=log_help)
    tasks.add_argument("--batch-size", type=int, default=4, metavar="N", help="rows that run together (default: %(default)s)")
    output_help = "where scores, samples, answers and the report are written; a run there continues (default: evaluation)"
    tasks.add_argument("-o", "--output", type=Path, default=Path("evaluation"), metavar="DIR", help=output_help)
    options.add_ray(tasks)
    options.add_quiet(parser)
    options.add_model(parser)
    options.add_cache(parser)
    options.add_processes(parser, "0 writes the scores")
    return parser


def _parse_and_run(argv: list[str] | None, name: str) -> None:
    arguments = parser(name).parse_args(argv)
    for package, use in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            raise InputError(f"{use}, which is not installed: pip install 'icejax[evaluate]'")
    if arguments.compare is None and arguments.tasks is None:
        raise InputError("--tasks NAMES is needed, such as --tasks gsm8k,humaneval, or --compare DIR to compare finished runs")
    advice = "use a smaller --batch-size or --context-length, or a 16-bit --dtype"
    with in_group(arguments, name, alone=("compare", "ray")), report_out_of_memory(advice, None):
        if arguments.compare is None:
            _run(arguments, stderr_console())
            return
        if arguments.tasks is not None:
            raise InputError("--compare reads runs that are there, and runs none: leave --tasks out")
        _report(arguments, arguments.compare, arguments.against or AGAINST)


def check(arguments: argparse.Namespace) -> None:
    """Checks the options of a run, and reads those that are lists; InputError for one that is out of range."""
    for name, least in (("batch_size", 1), ("limit", 1), ("num_fewshot", 0)):
        if getattr(arguments, name) is not None:
            integer("--" + name.replace("_", "-"), getattr(arguments, name), least=least, most=2**31)
    if arguments.system is not None and not arguments.chat:
        raise InputError("--system needs --chat: it is a message of the chat template")
    if arguments.lengths is not None:
        arguments.lengths = tuple(integers("--lengths", arguments.lengths, most=POSITIONS))
    for flag, folder in (("--data", arguments.data), ("--include-path", arguments.include_path)):
        if folder is not None and not folder.is_dir():
            raise InputError(f"{flag} must be a folder, got {folder}")
    options.check_ray(arguments)
    options.make_absolute(arguments)


def _run(arguments: argparse.Namespace, console: Console) -> None:
    check(arguments)
    if arguments.quiet:
        os.environ["TQDM_DISABLE"] = "1"  # tqdm reads it when it is imported; lm-eval's own bars have no other switch
    policy, other = options.policy(arguments), None if arguments.against is None else make_policy(arguments.against, {})
    if policy is not None and other is not None and cache_folder(arguments, other) == cache_folder(arguments, policy):
        same = f"--against {arguments.against} has the name and budget of the cache that is scored"
        raise InputError(f"{same}: expected another cache or --budget")
    if is_first(arguments):
        _try_output(arguments.output)
    model, tokenizer = loaded(arguments, console)
    if policy is None and other in (ON_DEVICE, IN_PAGES):
        policy = IN_PAGES if other == ON_DEVICE else ON_DEVICE
        tell_cache(arguments, f"{display_name(policy)}: --against names {display_name(other)}", console)
    elif policy is None:
        tokens = dict(prompt_tokens=check_context(model, arguments.context_length) - 1, new_tokens=MAX_GEN_TOKS)
        limits = options.memory_limits(arguments)
        choice = batch_choice(model, batch_size=arguments.batch_size, joins=True, **tokens, **limits)
        policy = choice.policy
        tell_cache(arguments, choice.reason, console)
    policies = [policy] if other is None else [policy, other]
    models = (harness_model(arguments, model, tokenizer, policy, _stream(arguments)) for policy in policies)
    folders = [score(arguments, one) for one in models]
    if is_first(arguments):
        _report(arguments, folders, folders[-1])
    processes.from_first(None)  # at the end of a group the others wait for a minute only


@contextlib.contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Raises InputError where the block cannot write the output."""
    try:
        yield
    except OSError as error:
        raise InputError(f"--output {folder} cannot be written: {error.strerror}") from None


def _try_output(folder: Path) -> None:
    """Makes the folder; raises InputError if it cannot be written, before anything runs."""
    with _written(folder):
        private.make_folder(folder)
        private.new_file(part := folder / ".part").close()
        part.unlink()


def loaded(arguments: argparse.Namespace, console: Console) -> tuple[CausalLM, Any]:
    """Returns the model of the command line and its tokenizer, beside which the harness can be imported."""
    model, tokenizer = load(arguments, console)
    if sys.modules["torch"] is None:  # transformers is loaded by now, and `datasets` fails at such an entry
        del sys.modules["torch"]
    return model, tokenizer


def _report(arguments: argparse.Namespace, folders: list[Path], against: str | Path) -> None:
    """Writes the report on the runs in some folders into the output, and prints its table; `against` as in `rows`."""
    from icejax.evaluation.report import page, runs, table

    finished = runs.read(folders)
    with _written(arguments.output):
        found = page.write(arguments.output, finished, against)
    write(table.text(found))
    if not arguments.quiet:
        write(f"{arguments.output / 'report.html'}\n")


def _stream(arguments: argparse.Namespace) -> Callable[..., Any] | None:
    """Returns what answers requests on the cluster of --ray; None without it."""
    if arguments.ray is None:
        return None
    from icejax.ray import jobs  # imports what the extra has

    return partial(jobs.responses, arguments)


def cache_folder(arguments: argparse.Namespace, policy: CachePolicy) -> Path:
    """Returns the folder of a cache in the output."""
    return arguments.output / f"{display_name(policy)}{'' if policy.budget is None else f'-{policy.budget}'}"


def harness_model(
    arguments: argparse.Namespace,
    model: CausalLM,
    tokenizer: Any,
    policy: CachePolicy,
    stream: Callable[..., Any] | None = None,
) -> Any:
    """Returns the `HarnessModel` of a model with a cache; its answers are in the cache's folder.

    Args:
        stream: as in `HarnessModel`.
    """
    from icejax.evaluation.harness import HarnessModel

    identity = fingerprint(model, policy, tokenizer) | dict(weights=weights_sum(model), context=arguments.context_length)
    identity |= dict(icejax=__version__, special_tokens=encode(tokenizer, "a", special_tokens=True, parse_special=True))
    if (count := holders(model.mesh, latent=model.config.latent is not None)) > 1:
        identity["copies"] = count  # each chooses pages for its own query heads
    answers = Answers()
    if is_first(arguments):
        private.make_folder(folder := cache_folder(arguments, policy))
        answers = Answers(folder / "answers.jsonl", identity)
    answers.share()
    sizes = dict(batch_size=arguments.batch_size, max_gen_toks=MAX_GEN_TOKS, max_length=arguments.context_length)
    return HarnessModel(
        model,
        tokenizer,
        cache=policy,
        host_memory_limit=options.memory_limits(arguments)["host_memory_limit"],
        answers=answers,
        stream=stream,
        **sizes,
    )


def run_tasks(arguments: argparse.Namespace, harness_model: Any) -> Any:
    """Returns the `Scores` of a `HarnessModel` on the tasks of the command line."""
    from icejax.evaluation.run import evaluate

    return evaluate(
        harness_model,
        arguments.tasks.split(","),
        data=arguments.data,
        include_path=arguments.include_path,
        lengths=arguments.lengths,
        text=arguments.text,
        limit=arguments.limit,
        num_fewshot=arguments.num_fewshot,
        gen_kwargs=arguments.gen_kwargs,
        apply_chat_template=arguments.chat,
        system_instruction=arguments.system,
    )


def score(arguments: argparse.Namespace, harness_model: Any) -> Path:
    """Scores a `HarnessModel`; returns its cache's folder, which has the scores."""
    from icejax.evaluation.report.about import ABOUT, about

    scores, folder = run_tasks(arguments, harness_model), cache_folder(arguments, harness_model.cache)
    asked = dict(chat=arguments.chat, system=arguments.system, quantize=arguments.quantize)
    scores.results[ABOUT] = about(harness_model, model_name(arguments.model), **asked)
    if is_first(arguments):
        with _written(folder):
            scores.save(folder)
    harness_model.answers.close()
    return folder
