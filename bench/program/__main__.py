"""A decode step compiled for a device that this machine lacks: ``python -m bench.program --target h200 --context 131072``.

The output is one JSON line per program: kernels, graph launches, copies from and to the host, sorts and selections, operations
that block the host, bytes by named scope, memory, copies of the pool, an estimate of the milliseconds, and their floor. Tables,
and the assumptions of the estimate, go to stderr. `--target`, `--context`, `--batch`, `--cache` and `--weights` take lists;
with int8, fp8 or int4, matrices are codes as `--quantize` makes them. Nothing runs on a device, and no array of a cache's size
is made. The compilers come with ``pip install -e '.[aot]'``, for jax 0.10.2.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import sys

import jax
from rich.console import Console

from bench.flags import flag, numbers, print_rows
from bench.program import compile, estimate, report, targets
from bench.steps import shapes
from icejax.cache.options import cache_options, make_policy
from icejax.checkpoint.quantized.rounding import METHODS
from icejax.checks import numbers as ranges

PLAIN = "plain"  # weights in the dtype of --dtype
OURS = ("clustered", "coded", "packed", "tolerant")  # caches that take --cache-option


def rows(arguments: argparse.Namespace):
    """Yields a row per program; a program that is left out has the reason in its row."""
    options = cache_options(arguments.cache_option)
    flags = dict(map(flag, arguments.flag))
    chosen_targets = [targets.target(name) for name in arguments.target.split(",")]
    policies = {name: make_policy(name, options if name in OURS else {}) for name in arguments.cache.split(",")}
    contexts, batches = numbers("--context", arguments.context), numbers("--batch", arguments.batch)
    for target in chosen_targets:
        compile.check_compiler(target)
    models = {}
    for name in arguments.weights.split(","):
        ranges.one_of("--weights", name, (PLAIN, *METHODS))
        sizes = dict(
            dtype=arguments.dtype,
            layers=arguments.layers,
            rounding=METHODS.get(name),
            experts_on_host=arguments.experts_on_host,
        )
        models[name] = compile.abstract_model(arguments.shape, **sizes)
    combinations = itertools.product(chosen_targets, contexts, batches, policies.items(), models.items())
    for target, context, batch, (cache, policy), (weights, model) in combinations:
        labels = dict(target=target.name, shape=arguments.shape, layers=model.config.num_hidden_layers, dtype=arguments.dtype)
        labels |= dict(weights=arguments.dtype if weights == PLAIN else weights)
        labels |= {} if arguments.experts_on_host is None else dict(experts_on_host=arguments.experts_on_host)
        labels |= dict(context=context, batch=batch, cache=cache, options=options if cache in OURS else {}, flags=flags)
        sizes = dict(batch=batch, context=context, new_tokens=arguments.new_tokens, backend=arguments.fetch_backend)
        step = compile.decode_step(model, policy, target, **sizes)
        compile.check_compiler(target, step.plan.fetch_backend)
        yield labels | dict(backend=step.plan.fetch_backend) | report.row(target, step, flags) | versions(target)


def versions(target: targets.Target) -> dict[str, str]:
    """Returns the versions of JAX and of the compiler."""
    plugin = "jax-cuda12-plugin" if target.platform == "gpu" else "libtpu"
    return dict(jax=jax.__version__, plugin=f"{plugin} {importlib.metadata.version(plugin)}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.program", description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="h200", help=f"comma-separated, of {', '.join(targets.TARGETS)}")
    parser.add_argument("--shape", choices=shapes.NAMES, default="llama-3.1-8b", help="default: %(default)s")
    parser.add_argument("--layers", type=int, help="of the shape")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", default=PLAIN, help=f"comma-separated, of {', '.join((PLAIN, *METHODS))}")
    parser.add_argument("--experts-on-host", type=int, metavar="N", help="of each layer N experts are on the device")
    parser.add_argument("--context", default="131072", help="tokens, comma-separated (default: %(default)s)")
    parser.add_argument("--batch", default="1", help="comma-separated (default: %(default)s)")
    parser.add_argument("--cache", default="clustered", help="comma-separated, of the cache's names (default: %(default)s)")
    parser.add_argument(
        "--cache-option", action="append", default=[], metavar="KEY=VALUE", help=f"of {', '.join(OURS)}; repeatable"
    )
    parser.add_argument("--new-tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--fetch-backend", metavar="NAME", help="default: what that platform would take first")
    parser.add_argument("--flag", action="append", default=[], metavar="NAME=VALUE", help="a compiler option; repeatable")
    arguments = parser.parse_args(argv)
    compile.without_devices()
    printed = print_rows(parser, rows(arguments))
    console = Console(stderr=True, width=180)
    for table in report.tables(printed):
        console.print(table)
    for name in dict.fromkeys(row["target"] for row in printed):
        concurrent = any(row.get("concurrent") for row in printed if row["target"] == name)
        lines = estimate.reasons(targets.TARGETS[name], concurrent=concurrent)
        console.print(f"{name}, low / mid / high: {'; '.join(lines)}.", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
