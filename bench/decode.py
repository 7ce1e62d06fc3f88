"""Time per output token by context length: ``python -m bench.decode --shape attention --contexts 4096,131072``.

Caches are filled with the keys and values of a short prefill, tiled with noise; `--prefill` runs the whole prompt instead. All
subjects (caches) of a context are in memory together. After a warm-up they take turns of 16 timed steps, each after one step
that is not timed, so a disturbance of the machine hits all of them. A step is started before the tokens of the previous step
are read, as in `icejax.generate`. The output is one JSON line per subject and context:

- seconds per token: median, 10th and 90th percentiles, and the mean, which includes steps in which a page leaves the window
- bytes by part over the batch, and bytes moved from the host per token
- seconds of compilation (the first step minus a median step) and of filling the cache
- peak memory of the process so far, on the host and, where the platform reports it, on the device

A table goes to stderr. `--profile` adds a line per subject with a step's milliseconds by named scope, and the time of Python
outside the programs that it calls (`python_ms`).
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.flags import flag, listed, make_folder, numbers
from bench.steps import shapes
from bench.steps.scopes import by_scope, python_ms, traced
from bench.steps.subjects import DotProduct, Icejax, Transformers
from icejax.cache.options import cache_options, make_policy
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer
from icejax.runtime import compiler_options, devices
from icejax.runtime.host_reads.choose import try_ahead

TURN = 16  # timed steps
OURS = ("clustered", "coded", "packed")  # caches that take --cache-option
TRANSFORMERS = ("transformers-dynamic", "transformers-static", "transformers-kvpress")
SUBJECTS = ("full", *OURS, "dot-product", *TRANSFORMERS)


def makers(names: list[str], options: dict, model, config: dict) -> dict[str, Callable]:
    """Returns a function per subject that makes it from `context`, `batch`, `steps` and `filled`."""
    makers_by_name: dict[str, Callable] = {}
    for name in names:
        if name.startswith("transformers-"):
            kind = name.removeprefix("transformers-")
            peer = functools.partial(Transformers, config, kind, budget=options["budget"])
            makers_by_name[name] = lambda peer=peer, *, filled, **sizes: peer(**sizes)
            continue
        kind, *texts = name.split(":")
        own = dict(text.partition("=")[::2] for text in texts)
        policy = DotProduct() if name == "dot-product" else make_policy(kind, options | own if kind in OURS else own)
        makers_by_name[name] = lambda policy=policy, **sizes: Icejax(model, policy, **sizes)
    return makers_by_name


def rows(subjects: dict[str, Callable], *, context: int, batch: int, steps: int, filled: bool) -> Iterator[dict]:
    """Yields a row per subject; one that does not fit or is not installed is left out, with a line on stderr."""
    instances, first_seconds, turns = {}, {}, -(-steps // TURN)
    for name, make in subjects.items():
        try:
            sizes = dict(context=context, batch=batch, steps=turns * (TURN + 1), filled=filled)
            instances[name], first_seconds[name] = _warmed_up(make, **sizes)
        except (InputError, ImportError, MemoryError, jax.errors.JaxRuntimeError) as error:
            print(f"{name}, {context}: left out: {(str(error) or type(error).__name__).splitlines()[0]}", file=sys.stderr)
    seconds: dict[str, list[float]] = {name: [] for name in instances}
    for _ in range(turns):
        for name, subject in instances.items():
            subject.step()
            for _ in range(TURN):
                started = time.perf_counter()
                subject.step()
                seconds[name].append(time.perf_counter() - started)
            subject.rest()
    for name, subject in instances.items():
        low, tpot, high = np.quantile(seconds[name], (0.1, 0.5, 0.9))
        mean = np.mean(seconds[name])
        times = dict(tpot_s=tpot, tpot_low_s=low, tpot_high_s=high, tpot_mean_s=mean, compile_s=first_seconds[name] - tpot)
        times = {key: round(float(value), 6) for key, value in times.items()} | dict(tokens_per_s=round(batch / tpot, 2))
        yield dict(policy=name, context=context, batch=batch, filled=filled) | times | subject.row()


def _warmed_up(make: Callable, **sizes: int) -> tuple[Any, float]:
    """Returns a subject after its warm-up, and the seconds of its first step."""
    subject = make(**sizes)
    started = time.perf_counter()
    subject.step()
    subject.rest()
    seconds = time.perf_counter() - started
    for _ in range(subject.warm_up - 1):
        subject.step()
    subject.rest()
    return subject, seconds


def profile(make: Callable, folder: Path, sizes: dict) -> dict:
    """Traces 16 steps of a subject into `folder`; returns a step's milliseconds by named scope, and Python's."""
    subject = make(**sizes | dict(steps=TURN))
    scopes = subject.scopes()
    for _ in range(subject.warm_up - 1):
        subject.step()
    subject.rest()
    with jax.profiler.trace(str(folder)):
        for _ in range(TURN):
            subject.step()
        subject.rest()
    events = traced(folder)
    return dict(scope_ms=by_scope(events, scopes, steps=TURN), python_ms=python_ms(events))


def _table(printed: list[dict]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2))
    times, slots = ("ms/token", "10%", "90%"), ("slots used", "allocated")
    for name in ("policy", "context", *times, *slots, "KV device", "digests", "KV host", "moved/step"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in printed:
        times = (f"{1e3 * row[key]:.2f}" for key in ("tpot_s", "tpot_low_s", "tpot_high_s"))
        sizes = ("device_kv_bytes", "digest_bytes", "host_kv_bytes", "moved_bytes_per_step")
        slots = (f"{row[key]:.0f}" if row.get(key) else "" for key in ("slots_used", "slots_allocated"))
        bytes_of = (f"{row[key] / 2**20:.1f} MiB" for key in sizes)
        table.add_row(row["policy"], str(row["context"]), *times, *slots, *bytes_of)
    return table


def plot(found: list[dict], picture: Path) -> None:
    """Draws milliseconds per token and device memory against the context, a line per policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (time_axes, memory_axes) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for name in dict.fromkeys(row["policy"] for row in found):
        policy_rows = [row for row in found if row["policy"] == name]
        contexts = [row["context"] for row in policy_rows]
        time_axes.plot(contexts, [1e3 * row["tpot_s"] for row in policy_rows], marker="o", label=name)
        memory_axes.plot(
            contexts, [(row["device_kv_bytes"] + row["digest_bytes"]) / 2**20 for row in policy_rows], marker="o", label=name
        )
    time_axes.set(title="time per token, ms", xlabel="context, tokens", yscale="log")
    memory_axes.set(title="cache on the device, MiB", xlabel="context, tokens", yscale="log")
    for axes in (time_axes, memory_axes):
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    time_axes.legend()
    figure.savefig(picture, dpi=110)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.decode", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=shapes.NAMES, default="attention", help="default: %(default)s")
    parser.add_argument("--layers", type=int, help="of the shape, where all do not fit the host's memory")
    parser.add_argument("--contexts", default="4096,131072", help="tokens, comma-separated (default: %(default)s)")
    parser.add_argument(
        "--policies",
        default="full,clustered",
        help=f"comma-separated, of {', '.join(SUBJECTS)}; caches with options as in packed:exact=0",
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument(
        "--cache-option", action="append", default=[], metavar="KEY=VALUE", help=f"of {' and '.join(OURS)}; repeatable"
    )
    parser.add_argument("--steps", type=int, default=64, help="timed, per subject and context (default: %(default)s)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--flag", action="append", default=[], metavar="NAME=VALUE", help="a compiler option; NAME= is without it"
    )
    parser.add_argument("--prefill", action="store_true", help="run the whole prompt instead of filling the cache")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="time and memory against context")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="also trace 16 steps of the last context")
    arguments = parser.parse_args(argv)
    devices.set_limits()
    try_ahead()
    try:
        flags = dict(map(flag, arguments.flag))
        if flags:
            compiler_flags = compiler_options.OPTIONS.get(devices.platform(), {}) | flags
            compiler_options.OPTIONS[devices.platform()] = {
                name: value for name, value in compiler_flags.items() if value != ""
            }
        options = cache_options(arguments.cache_option, budget=arguments.budget)
        names, contexts = arguments.policies.split(","), numbers("--contexts", arguments.contexts)
        listed("--policies", ",".join(name.partition(":")[0] for name in names), SUBJECTS)
        batch, steps = (integer(f"--{name}", getattr(arguments, name)) for name in ("batch", "steps"))
        for place in (arguments.plot and arguments.plot.parent, arguments.profile):
            if place is not None:
                make_folder(place)
        model = None
        if any(not name.startswith("transformers-") for name in names):
            model = shapes.model(arguments.shape, dtype=arguments.dtype, layers=arguments.layers)
        config = shapes.raw_config(arguments.shape, layers=arguments.layers)
        subjects = makers(names, options, model, config)
    except InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    environment = dict(shape=arguments.shape, layers=arguments.layers, device=devices.device_name())
    environment |= dict(flags=flags, options=arguments.cache_option)
    printed = []
    for context in contexts:
        sizes = dict(context=context, batch=batch, steps=steps, filled=not arguments.prefill)
        for row in rows(subjects, **sizes):
            row |= environment | dict(
                peak_rss_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                peak_device_bytes=(devices.device().memory_stats() or {}).get("peak_bytes_in_use"),
            )
            print(json.dumps(row), flush=True)
            printed.append(row)
    if arguments.profile is not None:
        for name in (name for name in names if not name.startswith("transformers-")):
            row = dict(policy=name, context=context) | environment | profile(subjects[name], arguments.profile / name, sizes)
            print(json.dumps(row), flush=True)
    Console(stderr=True, width=140).print(_table(printed))
    if arguments.plot is not None:
        plot(printed, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
