"""One start of icejax, measured: `bench.start` runs this module in a process of its own and reads the JSON object it prints.

The process imports what ``icejax generate`` imports, loads a model, and answers a prompt until the second token has come.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import threading
import time
from itertools import pairwise

# JAX's events. JAX reports the parts of a program, such as an inner function's trace, before the whole.
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing_s",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering_s",
    "/jax/core/compile/backend_compile_duration": "compiling_s",
    "/jax/compilation_cache/cache_retrieval_time_sec": "retrieving_s",
}
TEXT = "A start is measured from the command to the second token. "


class ProgramTimes:
    """Seconds that JAX traced, lowered, compiled and read programs from the compile cache; no second counts twice.

    Example: a trace of 3 s, within which a function was traced for 1 s and compiled for 1 s, counts as 1 s of compiling and 2 s
    of tracing.

    Attributes:
        seconds: sums by name of `EVENTS`.
        programs: number of programs compiled or read.
    """

    def __init__(self) -> None:
        self.seconds, self.programs = dict.fromkeys(EVENTS.values(), 0.0), 0
        self._spans: dict[int, list[tuple[float, float]]] = {}  # of each thread, disjoint

    def add(self, event: str, duration: float, *, end: float | None = None) -> None:
        """Counts an event that ends at `end`; None: now."""
        if event not in EVENTS:
            return
        end = time.perf_counter() if end is None else end
        spans, start, inner = self._spans.setdefault(threading.get_ident(), []), end - duration, 0.0
        while spans and spans[-1][0] >= start:
            inner_start, inner_end = spans.pop()
            inner += inner_end - inner_start
        spans.append((start, end))
        self.seconds[EVENTS[event]] += duration - inner
        self.programs += EVENTS[event] == "compiling_s"


def measure(model: str, cache: str, programs: str, prompt_tokens: int, new_tokens: int, begun: float) -> dict:
    """Returns the seconds of a start.

    Args:
        model: a checkpoint folder or hub id; empty: the bundled model.
        programs: folder of the compile cache.
        begun: `time.monotonic()` when the process was started.
    """
    sys.modules.setdefault("torch", None)  # as the command does: transformers would import it
    import icejax.commands.generate  # noqa: F401 (the command imports it)
    from icejax.api.generate import ASSETS, load, stream_generate
    from icejax.cache.options import make_policy
    from icejax.runtime.compile_cache import keep_programs

    times = [begun, time.monotonic()]
    import jax.monitoring

    from icejax.runtime import devices

    program_times = ProgramTimes()
    jax.monitoring.register_event_duration_secs_listener(lambda event, duration, **_: program_times.add(event, duration))
    keep_programs(programs)
    loaded, tokenizer = load(model or ASSETS)
    times.append(time.monotonic())
    prompt = tokenizer(TEXT * prompt_tokens)["input_ids"][:prompt_tokens]
    stream = stream_generate(loaded, tokenizer, prompt, cache=make_policy(cache, {}), max_new_tokens=new_tokens)
    for _ in range(2):
        next(stream)
        times.append(time.monotonic())
    imports, reading, first, second = (round(end - start, 3) for start, end in pairwise(times))
    return dict(
        imports_s=imports, reading_s=reading, first_token_s=first, second_token_s=second,
        total_s=round(times[-1] - begun, 3), answer_s=round(first + second, 3),
        **{name: round(seconds, 3) for name, seconds in program_times.seconds.items()},
        processor_s=round(time.process_time(), 3), programs=program_times.programs,
        peak_rss_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        dtype=loaded.dtype, device=devices.device_name(), version=f"jax {jax.__version__}",
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="bench.one_start", description=__doc__.splitlines()[0])
    for name in ("--model", "--cache", "--programs"):
        parser.add_argument(name, required=True)
    for name in ("--prompt-tokens", "--new-tokens"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--begun", type=float, required=True)
    print(json.dumps(measure(**vars(parser.parse_args()))), flush=True)
