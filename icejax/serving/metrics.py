"""Metrics for Prometheus under vLLM's names, which routers and dashboards know, and some own; none holds a prompt or a key.

`answers` counts, `status` writes them. Names and meanings: https://docs.vllm.ai/en/stable/usage/metrics.
"""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from icejax.engine.response import GenerationResponse
from icejax.engine.serving.scheduler import Load
from icejax.runtime.compile_clock import clock

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
COUNTERS = {
    "prompt_tokens": "prompt tokens of requests that have their first token",
    "generation_tokens": "answer tokens",
    "prefix_cache_queries": "prompt tokens that were looked for in the prefix store",
    "prefix_cache_hits": "prompt tokens that came from the prefix store",
    "admission_rejections": "requests refused because the queue was full",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": SECONDS,
    "inter_token_latency_seconds": SECONDS,
    "request_time_per_output_token_seconds": SECONDS,
    "e2e_request_latency_seconds": SECONDS,
    "request_queue_time_seconds": SECONDS,
    "request_prefill_time_seconds": SECONDS,
    "request_decode_time_seconds": SECONDS,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
}
GAUGES = {
    "num_requests_running": "answers that are prefilled or decode",
    "num_requests_waiting": "answers that wait for a place",
    "kv_cache_usage_perc": "share of the cache that running requests have, from 0 to 1",
    "gpu_cache_usage_perc": "the same by its older name",
    "gpu_prefix_cache_queries": "vllm:prefix_cache_queries_total by its older name",
    "gpu_prefix_cache_hits": "vllm:prefix_cache_hits_total by its older name",
}
OWN = {
    "icejax_free_extents": "extents of the pool that neither requests nor cached prefixes have",
    "icejax_compiled_programs": "programs compiled or loaded since the start",
}
disable_created_metrics()  # the time of the first value, which doubles the lines


class Metrics:
    """The metrics of one server, with the label `model_name`."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        common = dict(labelnames=("model_name",), registry=self._registry)
        self._counters = {name: Counter(f"vllm:{name}", about, **common).labels(model) for name, about in COUNTERS.items()}
        self._histograms = {
            name: Histogram(f"vllm:{name}", name.replace("_", " "), buckets=buckets, **common).labels(model)
            for name, buckets in HISTOGRAMS.items()
        }
        gauges = {f"vllm:{name}": about for name, about in GAUGES.items()} | OWN
        self._gauges = [Gauge(name, about, **common).labels(model) for name, about in gauges.items()]
        ProcessCollector(registry=self._registry)  # memory and open files of the process, by Prometheus' own names
        labels = ("model_name", "finished_reason")
        ended = Counter("vllm:request_success", "answers that are over", labelnames=labels, registry=self._registry)
        self._ended = {reason: ended.labels(model, reason) for reason in ("stop", "length", "abort")}
        self._config_labels = ("model_name", "block_size", "num_gpu_blocks", "cache_dtype")
        self._model, self._asked, self._hits = model, 0, 0

    def started(self, *, page_size: int, blocks: int, dtype: str) -> None:
        """Tells of the cache, which is known when the model has loaded."""
        about = "sizes of the cache: tokens of a block, and blocks of all places"
        gauge = Gauge("vllm:cache_config_info", about, labelnames=self._config_labels, registry=self._registry)
        gauge.labels(self._model, page_size, blocks, dtype).set(1)

    def prompt(self, piece: GenerationResponse) -> None:
        """Counts a prompt at the first piece of its first answer."""
        self._counters["prompt_tokens"].inc(piece.prompt_tokens)
        self._counters["prefix_cache_queries"].inc(piece.prompt_tokens)
        self._counters["prefix_cache_hits"].inc(piece.cached_tokens)
        self._asked, self._hits = self._asked + piece.prompt_tokens, self._hits + piece.cached_tokens

    def token(self, piece: GenerationResponse, seconds: float | None) -> None:
        """Counts a token; `seconds` since the one before it, None for the first."""
        self._counters["generation_tokens"].inc()
        if seconds is not None:
            self._histograms["inter_token_latency_seconds"].observe(seconds)
            return
        prefill = (piece.prompt_tokens - piece.cached_tokens) / piece.prefill_tps if piece.prefill_tps else 0.0
        self._histograms["time_to_first_token_seconds"].observe(piece.ttft_s)
        self._histograms["request_prefill_time_seconds"].observe(min(prefill, piece.ttft_s))
        self._histograms["request_queue_time_seconds"].observe(max(0.0, piece.ttft_s - prefill))

    def ended(self, piece: GenerationResponse, seconds: float) -> None:
        """Counts an answer that is over, at its last piece, so many seconds after it was asked for."""
        self._ended[piece.finish_reason].inc()
        decode = max(0.0, seconds - piece.ttft_s)
        self._histograms["e2e_request_latency_seconds"].observe(seconds)
        self._histograms["request_decode_time_seconds"].observe(decode)
        self._histograms["request_prompt_tokens"].observe(piece.prompt_tokens)
        self._histograms["request_generation_tokens"].observe(piece.new_tokens)
        if piece.new_tokens > 1:
            self._histograms["request_time_per_output_token_seconds"].observe(decode / (piece.new_tokens - 1))

    def cancelled(self, count: int) -> None:
        """Counts answers that ended because the client left."""
        self._ended["abort"].inc(count)

    def rejected(self) -> None:
        """Counts a request that came to a full queue."""
        self._counters["admission_rejections"].inc()

    def text(self, load: Load) -> bytes:
        """Returns all metrics in Prometheus' text form."""
        values = (load.running, load.waiting, load.used, load.used, self._asked, self._hits)
        for gauge, value in zip(self._gauges, (*values, load.free_extents, clock().programs), strict=True):
            gauge.set(value)
        return generate_latest(self._registry)
