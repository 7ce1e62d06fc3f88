"""Rows of `bench.serving`, under the names of vLLM's `benchmarks/serve.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.serving.client import Timed


def latencies(answers: Sequence[Timed]) -> dict[str, list[float]]:
    """Returns milliseconds of answers: to the first token, per later token, between pieces, and to the end."""
    whole = [answer for answer in answers if answer.error is None and answer.times]
    later = [answer for answer in whole if answer.tokens > 1]
    return {
        "ttft_ms": [1e3 * (answer.times[0] - answer.asked) for answer in whole],
        "tpot_ms": [1e3 * (answer.times[-1] - answer.times[0]) / (answer.tokens - 1) for answer in later],
        "itl_ms": [1e3 * gap for answer in whole for gap in np.diff(answer.times).tolist()],
        "e2el_ms": [1e3 * (answer.over - answer.asked) for answer in whole],
    }


def load_row(answers: Sequence[Timed], duration: float) -> dict[str, float | int]:
    """Returns the figures of a load.

    Args:
        duration: seconds from the first request to the end of the last answer.
    """
    whole = [answer for answer in answers if answer.error is None]
    row = dict(completed=len(whole), duration=duration) | failures(answers)
    row |= dict(total_input_tokens=sum(answer.prompt_tokens for answer in whole))
    row |= dict(total_output_tokens=sum(answer.tokens for answer in whole))
    row |= dict(request_throughput=len(whole) / duration, output_throughput=row["total_output_tokens"] / duration)
    for name, values in latencies(answers).items():
        if values:
            row |= {f"mean_{name}": float(np.mean(values)), f"median_{name}": float(np.median(values))}
            row |= {f"std_{name}": float(np.std(values)), f"p99_{name}": float(np.percentile(values, 99))}
    return rounded(row)


def failures(answers: Sequence[Timed]) -> dict[str, int | str]:
    """Returns how many requests failed, and the first error."""
    errors = [answer.error for answer in answers if answer.error is not None]
    return dict(failed=len(errors)) | (dict(error=errors[0]) if errors else {})


def slope(minutes: Sequence[float], values: Sequence[float]) -> float:
    """Returns the slope of the line through the later half of some values, per hour."""
    half = len(minutes) // 2
    if len(minutes) - half < 2:
        return 0.0
    return 60 * float(np.polyfit(minutes[half:], values[half:], 1)[0])


def rounded(row: dict) -> dict:
    """Returns a row with four digits after the point."""
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}
