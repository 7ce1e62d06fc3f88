"""All device measurements in a few minutes: ``python -m bench.device --out DIR --minutes 9``.

The command needs no network and installs nothing. Parts run one after another, the most valuable first, each in a process of
its own with its own time limit. A row is written as soon as it is measured, and the page DIR/device.md after every part. The
next call continues with the parts that are not done, also after a crash. Parts that did not fit the minutes or failed are
reported, and a failed part makes the exit status 1. DIR has at most 8 files of 16 MiB; compiled programs and traces go to the
system's temporary folder. All parts take about an hour: on a machine that keeps nothing, carry DIR back and forth.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import tempfile
from pathlib import Path

import jax

from bench.device import page
from bench.device.parts import TINY, Sizes, parts
from bench.device.results import DONE, PAGE, Results
from bench.device.running import Part, run
from icejax.checks.errors import InputError, quoted
from icejax.runtime import devices

MOST_MINUTES = 24 * 60


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.device", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results are, and go")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts of this call (default: %(default)s)")
    parser.add_argument("--part", action="append", default=[], metavar="NAME", help="only this, done or not; repeatable")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the command itself where there is no device")
    parser.add_argument("--page", action="store_true", help="run nothing, only write the page of the results that are there")
    arguments = parser.parse_args(argv)
    out = arguments.out.absolute()
    scratch = Path(tempfile.gettempdir()) / f"{out.name}-scratch"
    jax.config.update("jax_platforms", "cpu")  # the parts use the device
    devices.set_limits()  # for all parts
    all_parts = parts(TINY if arguments.tiny else Sizes(), scratch)
    try:
        if not 0 < arguments.minutes <= MOST_MINUTES or math.isnan(arguments.minutes):
            raise InputError(f"--minutes must be above 0 and at most {MOST_MINUTES}, got {arguments.minutes:g}")
        by_name = {part.name: part for part in all_parts}
        if unknown := [name for name in arguments.part if name not in by_name]:
            raise InputError(f"--part must be one of {'; '.join(by_name)}, got {quoted(unknown[0])}")
        if arguments.page and not [*out.glob("*.jsonl")]:
            raise InputError(f"--page needs results in --out, got none in {out}: run it without --page first")
        results = Results(out, tiny=arguments.tiny)
        if not arguments.page:
            scratch.mkdir(parents=True, exist_ok=True)
    except InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        _write(results, all_parts)

    if not arguments.page:
        chosen_parts = [by_name[name] for name in arguments.part]
        run(chosen_parts or all_parts, results, scratch, seconds=60 * arguments.minutes, told=report, again=bool(chosen_parts))
    _write(results, all_parts)
    print(out / PAGE)
    return int(any(end["end"] != DONE for end in results.ends().values()))


def _write(results: Results, all_parts: list[Part]) -> None:
    names = [part.name for part in all_parts]
    try:
        text = page.rendered(results.rows(), results.ends(), names)
    except Exception as error:  # an unexpected row must not prevent the remaining parts
        text = f"The page cannot be made of these results: {type(error).__name__}: {error}.\n"
        print(text, end="", file=sys.stderr, flush=True)
    (results.folder / PAGE).write_text(text)


if __name__ == "__main__":
    # Ended from outside, the command must also end the part that runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
