"""The command ``icejax bench``: rows as llama.cpp's llama-bench prints them on stdout, progress on stderr."""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
from typing import Any

import jax
from rich.console import Console

from icejax import __version__
from icejax.api.choice import batch_choice
from icejax.cache.registry import display_name
from icejax.checkpoint.load import abstract
from icejax.checks.errors import InputError
from icejax.checks.numbers import POSITIONS, integer, integers
from icejax.commands import options
from icejax.commands.loading import load, model_name, tell_cache
from icejax.commands.options import Parser
from icejax.commands.terminal.phases import Phases
from icejax.commands.terminal.process import ending, write
from icejax.commands.terminal.stderr import stderr_console
from icejax.evaluation.speed import Speed, SpeedTest, measure
from icejax.models.decoder import CausalLM
from icejax.runtime import devices
from icejax.runtime.out_of_memory import report_out_of_memory
from icejax.runtime.progress import MEASURING

HEADS = ("model", "size", "params", "device", "cache", "test", "t/s, median (lowest - highest)", "cache size", "peak memory")
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss


def main(argv: list[str] | None = None, *, name: str = "icejax bench") -> int:
    """Runs the command line and returns the exit status of `process.ending`."""
    return ending(name, lambda: _parse_and_run(argv, name))


def parser(name: str) -> Parser:
    """Returns the parser of `bench`; its flags are llama-bench's, where that has them."""
    parser = Parser(prog=name, description="Time prompts and answers on a model, as llama.cpp's llama-bench does.")
    tests = parser.add_argument_group("tests")
    listed = "tokens, comma-separated (default: %(default)s)"
    tests.add_argument("-p", "--prompt-tokens", "--n-prompt", default="512", metavar="N", help=f"of the prompts: {listed}")
    tests.add_argument("-n", "--new-tokens", "--n-gen", default="128", metavar="N", help=f"of the answers: {listed}")
    tests.add_argument("-d", "--depth", "--n-depth", default="0", metavar="N", help=f"in the cache before either: {listed}")
    repetitions = "of each test, besides one that is not timed (default: %(default)s)"
    tests.add_argument("-r", "--repetitions", type=int, default=5, metavar="N", help=repetitions)
    tests.add_argument("--json", action="store_true", help="print one JSON object per test")
    options.add_quiet(tests)
    options.add_weights(parser)
    options.add_cache(parser, has_context=False)
    parser.set_defaults(chat_template=None)
    return parser


def _parse_and_run(argv: list[str] | None, name: str) -> None:
    arguments = parser(name).parse_args(argv)
    with report_out_of_memory("use a smaller --depth, or a 16-bit --dtype", None):
        run(arguments, stderr_console())


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Times the tests of the command line and prints a row for each; raises InputError for bad input."""
    policy, limits, tests = options.policy(arguments), options.memory_limits(arguments), tests_of(arguments)
    repetitions = integer("--repetitions", arguments.repetitions)
    model, _ = load(arguments, console)
    if policy is None:
        longest = max(tests, key=lambda test: test.depth + test.tokens)
        tokens = dict(prompt_tokens=longest.depth + longest.tokens, new_tokens=1)
        choice = batch_choice(model, batch_size=1, joins=False, **tokens, **limits)
        policy = choice.policy
        tell_cache(arguments, choice.reason, console)
    weight_bytes = sum(x.nbytes for x in jax.tree.leaves(model))
    fields = dict(
        model=model_name(arguments.model), model_type=model.config.model_type, params=_parameters(model),
        weight_bytes=weight_bytes, dtype=model.dtype, cache=display_name(policy), budget=policy.budget,
        device=devices.device_name(), icejax=__version__, jax=jax.__version__,
    )  # fmt: skip
    with Phases(console, quiet=arguments.quiet) as phases:
        told = dict(host_memory_limit=limits["host_memory_limit"], progress=lambda done, total: phases(MEASURING, done, total))
        for number, speed in enumerate(measure(model, policy, tests, repetitions=repetitions, **told)):
            row = fields | _figures(speed)
            if arguments.json:
                write(json.dumps(row) + "\n")
                continue
            if number == 0:
                write(_line(HEADS) + "|" + "---|" * len(HEADS) + "\n")
            write(_line(_cells(row)))
    if not arguments.json:
        write(f"\nicejax {__version__}, jax {jax.__version__}, {model.dtype}, repetitions {repetitions}\n")


def tests_of(arguments: argparse.Namespace) -> list[SpeedTest]:
    """Returns the tests in the order in which they run: at each depth prompts, then answers.

    Raises:
        InputError: a number of tokens is none or is out of range, or no test is left.
    """
    bounds = dict(least=0, most=POSITIONS)
    depths = integers("--depth", arguments.depth, **bounds)
    kinds = [(False, tokens) for tokens in integers("--prompt-tokens", arguments.prompt_tokens, **bounds)]
    kinds += [(True, tokens) for tokens in integers("--new-tokens", arguments.new_tokens, **bounds)]
    tests = [SpeedTest(tokens, answer, depth) for depth in depths for answer, tokens in kinds if tokens]
    if not tests:
        raise InputError("--prompt-tokens and --new-tokens are both 0, so nothing is timed: give one of them")
    return tests


def _parameters(model: CausalLM) -> int:
    """Returns the number of a model's parameters; a quantised matrix counts by its shape."""
    return sum(math.prod(leaf.shape) for leaf in abstract(model.config, model.dtype)[1].values())


def _figures(speed: Speed) -> dict[str, Any]:
    median, low, high = speed.rates
    return dict(
        test=speed.test.name, tokens=speed.test.tokens, depth=speed.test.depth, repetitions=len(speed.seconds),
        tokens_per_s=round(median, 3), low_tokens_per_s=round(low, 3), high_tokens_per_s=round(high, 3),
        seconds=[round(seconds, 6) for seconds in speed.seconds],
        device_kv_bytes=speed.device_kv_bytes, digest_bytes=speed.digest_bytes, host_kv_bytes=speed.host_kv_bytes,
        peak_rss_bytes=RSS_UNIT * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        peak_device_bytes=(devices.device().memory_stats() or {}).get("peak_bytes_in_use"),
    )  # fmt: skip


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    cache = row["cache"] + ("" if row["budget"] is None else f" {row['budget']}")
    rate = f"{row['tokens_per_s']:.2f} ({row['low_tokens_per_s']:.2f} - {row['high_tokens_per_s']:.2f})"
    sizes = [row["device_kv_bytes"] + row["digest_bytes"], row["host_kv_bytes"]]
    peaks = [size for size in (row["peak_device_bytes"], row["peak_rss_bytes"]) if size is not None]
    return (
        row["model"], _size(row["weight_bytes"]), f"{row['params'] / 1e6:.2f} M", row["device"], cache, row["test"], rate,
        " + ".join(_size(size) for size in sizes if size), " + ".join(map(_size, peaks)),
    )  # fmt: skip


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |\n"
