"""A sample of the result files that `bench.device` writes, with round figures, for the tests of its report."""

_H200 = "gpu: NVIDIA H200"
_MODEL = dict(
    shape="llama-3.1-8b", layers=None, dtype="bfloat16", budget=256, context=131072, batch=1, policy="clustered", device=_H200
)

FILES = {
    "machine.jsonl": [
        dict(
            part="versions and link", date="2026-11-22", versions=dict(jax="0.11.2"), devices=[dict(device=_H200)],
            host=dict(cores=16, memory_bytes=137e9), to_device_gb_per_s=50.0, to_host_gb_per_s=45.0,
            device_memory_gb_per_s=4000.0, nvidia=dict(name="NVIDIA H200", driver_version="580.1"),
        ),
        dict(part="doctor", fetch=[dict(backend="triton", exact=True, microseconds=90.5, gb_per_s=46.3)]),
        dict(
            part="bits", backend="gather", dtype="uint16", table_bytes=4328521728, exact=False, microseconds=100, gb_per_s=41.9
        ),
    ],
    "text.jsonl": [
        dict(
            part="text", policy="clustered", dtype="bfloat16", device=_H200, tokens=128, alike=17, logits_apart=0.0312,
            token=5, token_cpu=6, margin_cpu=0.00213,
        )
    ],
    "needle.jsonl": [
        dict(
            part="needles", task="hops", length=8192, cache="clustered", budget=64, exact=0.875, questions=8, tpot_s=0.0025,
            device=_H200,
        )
    ],
    "turns.jsonl": [
        dict(
            part="turns", model="qwen", length=50000, yarn=4, cache="clustered", budget=256, samples=2, turn_1=1.0, turn_2=0.5,
            turn_3=0.0, similarity=0.876, seconds=40.5, dtype="bfloat16", device=_H200,
        )
    ],
    "prefill.jsonl": [
        dict(
            part="prefill", shape="llama-3.1-8b", layers=8, length=32768, policy="full", blocks=True, prefill_s=1.5,
            tokens_per_s=21845.3, device=_H200,
        )
    ],
    "decode.jsonl": [
        _MODEL | dict(
            part="model, resident", options=["resident=true"], flags=dict(xla_x=""), backend="triton", tpot_s=0.004,
            tpot_low_s=0.003, tpot_high_s=0.005, weight_bytes=4800000000, device_kv_bytes=2400000000,
            digest_bytes=2400000000, host_kv_bytes=16000000000, moved_bytes_per_step=26000000,
            peak_device_bytes=30000000000, peak_rss_bytes=None,
        ),
        dict(
            part="model, resident", policy="clustered", context=131072, batch=1, graphs=1, kernels=1976, outside=dict(kCopy=2)
        ),
        _MODEL | dict(part="profile", scope_ms=dict(qkv=1.5, select=0.25), python_ms=0.02),
    ],
}  # fmt: skip
ENDS = {"model, resident": dict(end="done"), "model, 524288": dict(end="failed: SIGSEGV")}
