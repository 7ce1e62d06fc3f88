"""That the default tests can fail: a fault is planted in a copy of every module, and the file named beside it notices."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROOFS = ("eviction_peers", "retrieval_peers", "omnikv")  # most of them are slow; elsewhere the default tests notice
# Module, text that occurs once, the fault in its place, the file of tests that is to notice.
FAULTS = (
    ("ops/rope.py", "[-second, first]", "[second, first]", "parity"),
    ("ops/rope.py", "return rotate(x, jnp.cos(angles), jnp.sin(angles))", "return rotate(x, jnp.cos(angles), -jnp.sin(angles))", "rope"),
    ("ops/attention.py", "key_position[None, :] > position[:, None] - window", "key_position[None, :] >= position[:, None] - window", "attention"),
    ("ops/attention.py", "v.shape[-1] == size and scoring.softcap is None", "True", "attention"),
    ("ops/attention.py", "self.softcap * jnp.tanh(", "jnp.tanh(", "softcap"),
    ("ops/digests.py", "0.5 * slope**2", "0.5 * slope", "digests"),
    ("models/decoder.py", "self.config.softcap", "None", "softcap"),
    ("ops/column_sums.py", "counts = position[None, :] < lengths[:, None]", "counts = position[None, :] <= lengths[:, None]", "column_sums"),
    ("ops/digests.py", "variance + wide), (others, far)", "variance), (others, far)", "digests"),
    ("ops/digests.py", " + _sums(each, digests.outlier)", "", "latent"),
    ("ops/tree.py", "if below is None else opened, estimates", "if below is None else 1, estimates", "tree"),
    ("ops/packing.py", "top_k(-distance, group)", "top_k(distance, group)", "packing"),
    ("ops/paged_attention.py", "own.sum(-1) + exact.sum(-1)", "own.sum(-1)", "paged_attention"),
    ("ops/topk.py", "((other == own) & before)", "(other == own)", "accelerator"),
    ("ops/quantize.py", "/ most, least", "/ (0.8 * most), least", "page_format"),
    ("cache/page_format.py", "[lax.bitcast_convert_type(codes, jnp.uint8), scale]", "[scale, lax.bitcast_convert_type(codes, jnp.uint8)]", "page_format"),
    ("cache/page_format.py", "(0, width - x.shape[-1])", "(width - x.shape[-1], 0)", "latent"),
    ("cache/policy.py", "planes[-1][..., : self.v.shape[-1]]", "planes[-1][..., -self.v.shape[-1] :]", "latent"),
    ("cache/host.py", "missing &= ~self.ended[:, None, None]", "pass", "inference"),
    ("cache/host.py", "[rows + plane * height for plane in", "[rows + 0 * height for plane in", "slots"),
    ("cache/host.py", "(page_ids % height).reshape(-1)", "0", "slots"),
    ("cache/fetch.py", "if not exact:", "if False:", "host"),
    ("cache/backends.py", "planes * pages + plane, wanted", "planes * pages, wanted", "accelerator"),
    ("cache/probe.py", 'platform == "gpu" and', "", "probe"),
    ("cache/policies/full.py", "before[..., : heads.v.shape[-1]]", "before[..., -heads.v.shape[-1] :]", "latent"),
    ("cache/policies/full.py", "slot=seen % state.k.shape[1]", "slot=seen % (state.k.shape[1] - 1)", "parity"),
    ("cache/window.py", "slot = self.fill + lengths.clock % self.page_size", "slot = self.fill", "policies"),
    ("cache/window.py", "valid = leaving < self.start(after)", "valid = leaving <= self.start(after)", "extend"),
    ("cache/policies/clustered.py", "rule=self.score", "rule='mean'", "reference"),
    ("cache/found.py", "jnp.where(again, 0, tokens)", "tokens", "peers"),
    ("cache/blocks.py", "(view.lengths.pages + block - 1) // block", "view.lengths.pages // block", "extend"),
    ("cache/slots.py", "(row, slots[row], 0)", "(row, slots[0], 0)", "policies"),
    ("cache/index.py", "x, first, axis=2", "x, 0, axis=2", "peers"),
    ("cache/eviction.py", "jnp.where(here, view.lengths.seen", "jnp.where(~here, view.lengths.seen", "peers"),
    ("cache/policies/streaming.py", "tokens.positions.max((1, 2)) + 1", "tokens.positions.max((1, 2))", "peers"),
    ("cache/policies/snapkv.py", "tokens.positions < first)", "tokens.positions <= first)", "peers"),
    ("cache/policies/h2o.py", "-1, keepdims=True) - recent + 1", "-1, keepdims=True) - recent", "eviction_peers"),
    ("cache/policies/tova.py", "weights.mean((1, 2))", "weights.max((1, 2))", "eviction_peers"),
    ("cache/eviction.py", "jnp.where(tokens.there, self.worth(tokens), -jnp.inf)", "jnp.where(tokens.there, tokens.scores, -jnp.inf)", "eviction_peers"),
    ("cache/policies/keydiff.py", "directions = keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-12)", "directions = keys", "eviction_peers"),
    ("cache/policies/pyramidkv.py", "layers - 1 - 2 * rank", "layers - 2 * rank", "budgets"),
    ("cache/policies/adakv.py", "jnp.arange(several)[None, None] < self._safe", "jnp.arange(several)[None, None] < 0", "budgets"),
    ("cache/policies/expected_attention.py", "& (positions >= self.sinks)", "", "eviction_peers"),
    ("cache/policies/restkv.py", " - view.project(none)  #", "  #", "eviction_peers"),
    ("cache/policies/lacache.py", "self._room(cursor) < 1, self.sinks", "self._room(cursor) < 1, 0", "eviction_peers"),
    ("cache/policies/quest.py", "products(jnp.minimum(q, 0), low)", "products(jnp.minimum(q, 0), high)", "peers"),
    ("ops/value_fit.py", "old + x[:, :, ::-1]", "old + x", "value_fit"),
    ("ops/tree.py", "spread(w * scores.lean, digests)", "spread(w, digests)", "tree"),
    ("ops/paged_attention.py", "apart = paged - exact - alike", "apart = paged - exact", "reference"),
    ("ops/pooling.py", "jnp.clip(places + step, first, last)", "jnp.clip(places + step, 0, last)", "eviction_peers"),
    ("ops/observed.py", "jnp.exp(scores - lse)", "jnp.exp(scores)", "peers"),
    ("cache/__init__.py", "2 if layers >= 16", "2 if layers > 16", "inference"),
    ("cache/__init__.py", "else Ring(window)", "else Ring(window + 1)", "parity"),
    ("errors.py", "c if c.isprintable() else ascii(c)[1:-1]", "c", "jsontext"),
    ("ranges.py", "isinstance(value, int) or isinstance(value, bool)", "isinstance(value, int)", "config_ranges"),
    ("jsontext.py", "if len(fields) < len(pairs):", "if False:", "jsontext"),
    ("memory.py", "* 3 // 4", "", "host"),
    ("config.py", '("linear", "dynamic")', '("linear",)', "config"),
    ("models/linear.py", "normal.astype(x.dtype) * weight", "normal.astype(x.dtype) + 0 * weight", "parity"),
    ("models/linear.py", "weight = weight.astype(jnp.float32)", "normal = normal.astype(x.dtype)", "gemma"),
    ("models/decoder.py", "cap * jnp.tanh(logits / cap)", "logits", "parity"),
    ("config.py", "self.sliding_rope or full.rope", "full.rope", "parity"),
    ("config.py", "tokens > scaling.original_max", "scaling.original_max", "longrope"),
    ("models/decoder.py", "jax.nn.sigmoid(attended.lse - ", "jax.nn.sigmoid(-", "sinks"),
    ("ops/experts.py", "y + bias[ids].astype(jnp.float32)", "y", "experts"),
    ("ops/gated.py", "(up + 1.0)", "up", "experts"),
    ("ops/rope.py", "int(scaling.part * size // 2)", "size // 2", "parity"),
    ("models/experts.py", "self.mlp_norm(made) + ", "made + ", "parity"),
    ("models/decoder.py", "if self.layer.keys_alone else self.v_proj(x)", "if self.layer.keys_alone else k", "parity"),
    ("cache/__init__.py", "(alike and window >= capacity)", "window >= capacity", "gemma"),
    ("ops/rope.py", "[pairs[..., 0], pairs[..., 1],", "[pairs[..., 1], pairs[..., 0],", "parity"),
    ("models/decoder.py", 'config.norm_places != "after"', "True", "parity"),
    ("models/decoder.py", "x + self.post_mlp_layernorm(out)", "self.post_mlp_layernorm(out)", "parity"),
    ("models/latent.py", "EPS = 1e-6", "EPS = 1e-2", "parity"),
    ("models/latent.py", "if self.interleaved:", "if False:", "parity"),
    ("models/latent.py", "lax.dynamic_slice_in_dim(self._made, group * count", "lax.dynamic_slice_in_dim(self._made, 0 * count", "parity"),
    ("models/latent.py", "turn(heads[..., rank:], by, rope=self.rope)", "heads[..., rank:]", "expanded"),
    ("models/scaling.py", "scale(weights[1]) ** 2", "1.0", "parity"),
    ("models/experts.py", "best(groups, routing.group_best)", "best(groups, 2)", "experts"),
    ("plan.py", "latent=config.latent is not None", "latent=False", "expanded"),
    ("models/hf_config.py", "for name, value in fields.raw.items():", "for name, value in ():", "config"),
    ("models/fields.py", "if len(ids) > MOST_EOS:", "if False:", "config_ranges"),
    ("models/scaling.py", '("linear", "dynamic") and', '() and', "config_ranges"),
    ("models/qwen.py", "qkv_bias=True", "qkv_bias=False", "parity"),
    ("checkpoint/stacked.py", "slice(at, None, len(names))", "slice(0, None, len(names))", "stacked"),
    ("checkpoint/stacked.py", "slice(sum(rows[:at])", "slice(0 * sum(rows[:at])", "stacked"),
    ("checkpoint/tensors.py", 'faults.append(f"{key} is stored twice")', "pass", "checkpoint"),
    ("checkpoint/layouts.py", "padded[:, ::2] | padded[:, 1::2] << 4", "padded[:, 1::2] | padded[:, ::2] << 4", "rounding"),
    ("checkpoint/tensors.py", "len(set(map(self._form, stack.keys))) == 1", "True", "quantized"),
    ("ops/experts.py", "groups).sum((2, 4))", "groups).sum((2, 4)) * 1.01", "experts"),
    ("checkpoint/float4.py", "[packed & 15, packed >> 4]", "[packed >> 4, packed & 15]", "layouts"),
    ("checkpoint/float4.py", 'shape) / parts["', 'shape) * parts["', "layouts"),
    ("checkpoint/rounding.py", '"re:.*gate$"', '""', "rounding"),
    ("checkpoint/rounding.py", "group or matrix.shape[1]", "matrix.shape[1]", "rounding"),
    ("checkpoint/tensors.py", "if part in self.stored}", "}", "formats"),
    ("checkpoint/huggingface.py", "> shard_bytes:", ">= shard_bytes * 2:", "checkpoint"),
    ("sampling.py", "logits / penalty, logits * penalty", "logits * penalty, logits / penalty", "sampling"),
    ("sampling.py", "jnp.where(rows.temperature > 0, drawn, best)", "drawn", "batches"),
    ("plan.py", "(rows if self.pool.unit == self.page_size else 1)", "rows", "slots"),
    ("plan.py", "capacity=prompt_tokens + new_tokens", "capacity=prompt_tokens", "parity"),
    ("walk.py", "window=layer.config.window", "window=None", "parity"),
    ("rows.py", "ids[there], ids[~there]", "ids[~there], ids[there]", "rows"),
    ("cache/index.py", "jnp.where((jnp.arange(x.shape[2]) < behind).reshape(shape), x, 0)", "x", "rows"),
    ("cache/eviction.py", "< state.room, -jnp.inf, jnp.inf)", "< state.room, -jnp.inf, -jnp.inf)", "budgets"),
    ("rows.py", "origin=row.cache.lengths.seen - clock", "origin=row.cache.lengths.seen", "rows"),
    ("rows.py", "plan.prompt_pages // host.EXTENT) &", "plan.prompt_pages // host.EXTENT + 1) &", "rows"),
    ("rows.py", "| extents.shared(table))", ")", "rows"),
    ("decoding.py", "plan.pool.pages, cache.lengths.pages)", "cache.lengths.pages, cache.lengths.pages)", "rows"),
    ("cache/retrieval.py", "planes = tuple(jnp.where(there[:, None, :, None], x, 0) for x in planes)", "planes = tuple(planes)", "rows"),
    ("cache/extents.py", "np.flatnonzero(self._users == 0)", "np.flatnonzero(self._users < 9)", "rows"),
    ("cache/window.py", "first = jnp.maximum(state.first, lengths.seen - self.fill)", "first = state.first", "rows"),
    ("plan.py", "-(-spec.new_capacity // every) * every", "spec.new_capacity", "rows"),
    ("decoding.py", "done=state.done | ended", "done=state.done", "inference"),
    ("detokenize.py", "if text.endswith(UNFINISHED):", "if False:", "detokenize"),
    ("generation.py", "else (each.seed, 0)", "else (seed, 0)", "requests"),
    ("streaming.py", "1 - row.pages[1] / row.pages[2]", "row.pages[1] / row.pages[2]", "counts"),
    ("request.py", "(several and isinstance(several[0], Integral))", "False", "requests"),
    ("response.py", "for p in pieces for token in p.logprobs", "for p in pieces[1:] for token in p.logprobs", "requests"),
    ("logprobs.py", "jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)", "logits", "requests"),
    ("commands/generate.py", "while told in responses and", "while told not in responses and", "requests"),
    ("commands/requests.py", "if name not in FIELDS:", "if False:", "requests"),
    ("session.py", "self.token_ids += piece.token_ids", "pass", "session"),
    ("diagnose.py", 'name.startswith("lm_head")', "0", "diagnose"),
    ("prompts.py", "characters < len(prompt)", "False", "options"),
    ("explain.py", "self.steps += 1", "self.steps += 2", "explain"),
    ("compiling.py", "self.seconds -= inner[1] - inner[0]", "pass", "compiling"),
    ("launch.py", "return BROKEN_PIPE", "return 1", "launch"),
)  # fmt: skip


@pytest.mark.parametrize("module, text, _, __", FAULTS, ids=lambda x: str(x)[:24])
def test_each_fault_has_its_place(module, text, _, __):
    assert (ROOT / "icejax" / module).read_text().count(text) == 1


@pytest.mark.slow
@pytest.mark.parametrize("module, text, fault, noticed_by", FAULTS, ids=lambda x: str(x)[:24])
def test_the_tests_notice(tmp_path, module, text, fault, noticed_by):
    for folder in ("icejax", "convert", "bench", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    file = tmp_path / "icejax" / module
    file.write_text(file.read_text().replace(text, fault))
    line = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/test_{noticed_by}.py"]
    line += ["-m", "slow or not slow"] if noticed_by in PROOFS else []
    done = subprocess.run(
        line,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout[-2000:]
