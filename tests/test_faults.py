"""That the tests can fail: a fault is planted in a copy of every module, and the test named beside it notices."""

import multiprocessing
import os
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).parent.parent
# Imported once, for all of the faults.
IMPORTED = [
    "flax.nnx",
    "orbax.checkpoint",
    "pytest",
    "torch",
    "transformers.modeling_utils",
    "hypothesis.strategies",
    "beartype",
]
PLAIN = ["--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:anyio", "--hypothesis-profile=planted"]
# Module, text that occurs once, the fault in its place, the test that is to notice.
FAULTS = (
    ("ops/pages/kmeans.py", "number < limit", "number <= limit", "ops/test_kmeans.py::test_of_some_centroids_there_are_few[False]"),
    ("ops/rope.py", "[-second, first]", "[second, first]", "models/test_parity.py::test_logits_equal_transformers[llama-gqa-default]"),
    ("ops/rope.py", "return rotate(x, jnp.cos(angles), jnp.sin(angles))", "return rotate(x, jnp.cos(angles), -jnp.sin(angles))", "ops/test_rope.py::test_a_turned_key_is_that_of_its_new_position"),
    ("ops/attention/dense.py", "key_position > position - window", "key_position >= position - window", "ops/test_dense_attention.py::test_causal_equals_float64"),
    ("ops/attention/dense.py", "visible &= key_position >= j * block", "pass", "ops/test_dense_attention.py::test_attention_to_slots_equals_float64"),
    ("ops/slots.py", "(at < count[row])", "(at <= count[row])", "ops/test_append_text.py::test_text_fills_the_slots_behind_a_row"),
    ("ops/attention/dense.py", "v.shape[-1] == size and scoring.softcap is None", "True", "ops/test_dense_attention.py::test_cudnn_is_not_asked_for_what_it_cannot_do[16-None]"),
    ("ops/attention/dense.py", "self.softcap * jnp.tanh(", "jnp.tanh(", "models/test_softcap.py::test_prefill_decode_and_extend_equal_transformers"),
    ("ops/pages/digests.py", "0.5 * slope**2", "0.5 * slope", "ops/test_digests.py::test_score_is_second_order_and_close_to_log_sum_exp"),
    ("models/decoder.py", "self.config.softcap", "None", "models/test_softcap.py::test_prefill_decode_and_extend_equal_transformers"),
    ("ops/attention/key_attention_sums.py", "counts = position[None, :] < lengths[:, None]", "counts = position[None, :] <= lengths[:, None]", "ops/test_key_attention_sums.py::test_sums_equal_float64"),
    ("ops/pages/digests.py", "inliers, parts.width + wide)", "inliers, parts.width)", "ops/test_digests.py::test_merging_is_exact"),
    ("ops/pages/digests.py", "sum(_sums(per_key * n, x)", "sum(_sums(per_key, x)", "cache/test_latent_layers.py::test_mla_matches_kv_layer_with_half_the_pool"),
    ("ops/pages/key_scatter.py", "/ widths(variances))", ")", "ops/test_digests.py::test_score_is_second_order_and_close_to_log_sum_exp"),
    ("cache/index/digest_tree.py", "add_scatter(index.scatter, ", "add_scatter(0 * index.scatter, ", "cache/test_clustered.py::test_200_steps_equal_the_reference"),
    ("ops/pages/tree_walk.py", "if below is None else rules.opened", "if below is None else 1", "ops/test_digest_tree.py::test_a_tree_with_all_nodes_open_equals_the_flat_walk"),
    ("ops/pages/packing.py", "top_k(-distance, group)", "top_k(distance, group)", "ops/test_packing.py::test_each_token_has_one_slot_and_empty_slots_come_last"),
    ("ops/pages/paged_attention.py", "near_weights.sum(-1) + value_weights.sum(-1)", "near_weights.sum(-1)", "ops/test_paged_attention.py::test_equals_float64"),
    ("ops/pages/ranked_attention.py", "rest_weight[..., None] * rest[0]", "0 * rest[0]", "cache/test_clustered.py::test_200_steps_equal_the_reference[keys-first]"),
    ("ops/pages/ranked_attention.py", "jnp.where(selected[:, None], 0.0, paged_weights)", "paged_weights", "cache/test_clustered.py::test_200_steps_equal_the_reference[keys-first]"),
    ("ops/topk.py", "< room.reshape(-1, 1)", "< room.reshape(-1, 1) + 1", "cache/test_policies.py::test_clustered_attends_to_no_more_tokens_than_its_budget"),
    ("cache/bases/reranking.py", "(pages * p + single + 1) // KEY_ONLY_FACTOR", "(pages * p + 1) // KEY_ONLY_FACTOR", "cache/test_keys_first.py::test_host_sends_keys_of_pages_and_values_of_the_best"),
    ("cache/pool/host_pool.py", "(page_ids % height).reshape(-1) + plane * height", "(page_ids % height).reshape(-1)", "cache/test_host_pool.py::test_one_plane_is_fetched_and_nothing_of_the_other"),
    ("ops/topk.py", "((other == own) & before)", "(other == own)", "ops/test_accelerator_forms.py::test_the_best_are_the_first_of_a_stable_sort"),
    ("ops/quantized/rounding.py", "/ most, least", "/ (0.8 * most), least", "cache/test_page_format.py::test_int8_pages_are_within_half_a_step"),
    ("cache/pool/page_format.py", "[lax.bitcast_convert_type(codes, jnp.uint8), scale]", "[scale, lax.bitcast_convert_type(codes, jnp.uint8)]", "cache/test_page_format.py::test_int8_pages_are_within_half_a_step"),
    ("cache/pool/page_format.py", "(0, width - x.shape[-1])", "(width - x.shape[-1], 0)", "cache/test_latent_layers.py::test_a_budget_for_all_tokens_equals_float64"),
    ("cache/protocol.py", "planes[-1][..., : self.v.shape[-1]]", "planes[-1][..., -self.v.shape[-1] :]", "cache/test_latent_layers.py::test_a_budget_for_all_tokens_equals_float64"),
    ("cache/pool/host_pool.py", "missing &= ~self.ended[:, None, None]", "pass", "engine/test_prefill_and_decode.py::test_rows_that_have_ended_cost_no_fetches[True]"),
    ("cache/pool/host_pool.py", "[rows + plane * height for plane in", "[rows + 0 * height for plane in", "ops/test_slots.py::test_top_tokens_equal_numpy_and_nothing_else_is_fetched"),
    ("cache/pool/host_pool.py", "(page_ids % height).reshape(-1)", "0", "ops/test_slots.py::test_top_tokens_equal_numpy_and_nothing_else_is_fetched"),
    ("runtime/host_reads/selftest.py", 'None if exact else "brings wrong bits"', "None", "cache/test_host_pool.py::test_a_wrong_or_failing_backend_is_passed_over_and_told"),
    ("runtime/host_reads/backends.py", "planes * pages + plane, wanted", "planes * pages, wanted", "ops/test_accelerator_forms.py::test_kernel_copies_whole_pages_and_only_wanted_ones"),
    ("runtime/host_reads/probe.py", 'platform == "gpu" and', "", "runtime/test_host_read_probe.py::test_what_a_process_of_its_own_finds_is_kept_if_it_will_last"),
    ("cache/bases/all_tokens.py", "Attended(out[..., : heads.v.shape[-1]], lse)", "Attended(out[..., -heads.v.shape[-1] :], lse)", "cache/test_latent_layers.py::test_a_budget_for_all_tokens_equals_float64"),
    ("cache/policies/full.py", "slot=seen % state.k.shape[1]", "slot=seen % (state.k.shape[1] - 1)", "models/test_parity.py::test_greedy_text_equals_transformers[mistral-window]"),
    ("cache/bases/window.py", "slot = self.fill + lengths.clock % self.page_size", "slot = self.fill", "cache/test_policies.py::test_budget_for_all_tokens_equals_dense_attention"),
    ("cache/bases/window.py", "valid = leaving < self.start(after)", "valid = leaving <= self.start(after)", "engine/test_extend.py::test_logits_in_parts_equal_those_of_the_whole"),
    ("cache/bases/digest_pages.py", "score=self.score", "score='mean'", "cache/test_clustered.py::test_200_steps_equal_the_reference"),
    ("cache/bases/selection.py", "jnp.where(repeated, 0, counts)", "counts", "cache/test_streaming_and_quest.py::test_quest_chooses_pages_for_every_query_head"),
    ("cache/bases/pool_attention.py", "(view.lengths.next_page + block - 1) // block", "view.lengths.next_page // block", "engine/test_extend.py::test_logits_in_parts_equal_those_of_the_whole"),
    ("ops/slots.py", "(row, slots[row], 0)", "(row, slots[0], 0)", "cache/test_policies.py::test_budget_for_all_tokens_equals_dense_attention"),
    ("cache/index/base.py", "x, first, axis=2", "x, 0, axis=2", "cache/test_streaming_and_quest.py::test_quest_chooses_pages_for_every_query_head"),
    ("cache/bases/eviction.py", "jnp.where(is_new, view.lengths.seen", "jnp.where(~is_new, view.lengths.seen", "cache/test_streaming_and_quest.py::test_streaming_keeps_the_first_tokens_and_the_newest"),
    ("cache/policies/streaming.py", "tokens.positions.max((1, 2)) + 1", "tokens.positions.max((1, 2))", "cache/test_streaming_and_quest.py::test_streaming_keeps_the_first_tokens_and_the_newest"),
    ("cache/policies/snapkv.py", "tokens.positions < first)", "tokens.positions <= first)", "cache/test_streaming_and_quest.py::test_snapkv_keeps_what_the_last_queries_attend_to"),
    ("cache/policies/h2o.py", "-1, keepdims=True) - recent + 1", "-1, keepdims=True) - recent", "cache/test_eviction_policies.py::test_what_stays_and_what_comes_of_it_equal_plain_numpy[h2o]"),
    ("cache/policies/tova.py", "weights.mean((1, 2))", "weights.max((1, 2))", "cache/test_eviction_policies.py::test_what_stays_and_what_comes_of_it_equal_plain_numpy[tova]"),
    ("cache/bases/eviction.py", "jnp.where(tokens.there, self.worth(tokens), -jnp.inf)", "jnp.where(tokens.there, tokens.scores, -jnp.inf)", "cache/test_eviction_policies.py::test_what_stays_and_what_comes_of_it_equal_plain_numpy[h2o]"),
    ("cache/policies/keydiff.py", "directions = keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-12)", "directions = keys", "cache/test_eviction_policies.py::test_what_stays_and_what_comes_of_it_equal_plain_numpy[keydiff]"),
    ("cache/policies/pyramidkv.py", "layers - 1 - 2 * rank", "layers - 2 * rank", "cache/test_budgets.py::test_pyramid_equals_its_own_code_where_nothing_is_rounded"),
    ("cache/policies/adakv.py", " + np.float32(int(self.floor * (self.budget - self.window)))", "", "cache/test_budgets.py::test_spread_heads_get_more_and_none_less_than_the_floor"),
    ("cache/policies/expected_attention.py", "& (positions >= self.sinks)", "", "cache/test_eviction_policies.py::test_what_stays_and_what_comes_of_it_equal_plain_numpy[expected]"),
    ("cache/policies/restkv.py", " - view.project(none)  #", "  #", "cache/test_eviction_policies.py::test_what_stays_and_what_comes_of_it_equal_plain_numpy[restkv]"),
    ("cache/policies/lacache.py", "self._room(cursor) < 1, self.sinks", "self._room(cursor) < 1, 0", "cache/test_eviction_policies.py::test_what_stays_and_what_comes_of_it_equal_plain_numpy[lacache-places]"),
    ("cache/policies/infinigen.py", "jnp.minimum(num_close, wanted)", "num_close", "cache/test_later_policies.py::test_infinigen_attends_to_tokens_near_the_highest_score[counted]"),
    ("cache/policies/quest.py", "products(jnp.minimum(q, 0), low)", "products(jnp.minimum(q, 0), high)", "cache/test_streaming_and_quest.py::test_quest_chooses_pages_for_every_query_head"),
    ("ops/pages/value_fit.py", "old + x[:, :, ::-1]", "old + x", "ops/test_value_fit.py::test_values_that_have_nothing_to_do_with_keys_stay_means"),
    ("ops/pages/tree_walk.py", "(w * scores.lean)", "w", "cache/test_clustered.py::test_200_steps_equal_the_reference"),
    ("ops/pages/digests.py", "jnp.sqrt(bounded / jnp.maximum(second, 1e-30))", "jnp.ones_like(second)", "ops/test_digest_tree.py::test_tail_is_finite_at_any_scale_and_width"),
    ("ops/pages/key_scatter.py", "SHRUNK = 0.5", "SHRUNK = 0.4", "cache/test_clustered.py::test_200_steps_equal_the_reference"),
    ("ops/pages/paged_attention.py", "deviation = paged_weights - value_weights - even", "deviation = paged_weights - value_weights", "cache/test_clustered.py::test_200_steps_equal_the_reference[whole-pages]"),
    ("ops/pages/tree_walk.py", "jnp.expm1(scores.wide)", "jnp.exp(scores.wide)", "cache/test_tolerant.py::test_the_estimate_and_what_follows_from_it_equal_plain_numpy"),
    ("ops/pages/paged_attention.py", "jnp.square(deviation / total[..., None])", "jnp.square(deviation)", "cache/test_tolerant.py::test_the_estimate_and_what_follows_from_it_equal_plain_numpy"),
    ("cache/policies/tolerant.py", "jnp.where(exceeds[..., None], found", "jnp.where(~exceeds[..., None], found", "cache/test_tolerant.py::test_the_estimate_and_what_follows_from_it_equal_plain_numpy"),
    ("ops/pages/channel_scaling.py", "0.25 *", "0.5 *", "ops/test_channel_scaling.py::test_a_channel_far_off_is_brought_back_by_a_power_of_two"),
    ("ops/pages/channel_scaling.py", "jnp.where(valid, x, 0)", "x", "ops/test_channel_scaling.py::test_neither_padding_nor_what_is_no_number_counts"),
    ("cache/bases/similar_pages.py", "super().extend(state, scaled(heads, state.factors), view)", "super().extend(state, heads, view)", "ops/test_channel_scaling.py::test_scale_of_channels_changes_no_bit[clustered]"),
    ("cache/policies/tolerant.py", "heads = scaled(heads, state.factors)", "", "cache/test_tolerant.py::test_the_estimate_and_what_follows_from_it_equal_plain_numpy"),
    ("ops/pages/tail.py", "even[..., None], 0.0).reshape", "0.0, 0.0).reshape", "cache/test_coded.py::test_200_steps_equal_the_reference[4-tokens]"),
    ("ops/pages/key_codes.py", "return mean_y - slope * mean_x, slope", "return mean_y, slope", "cache/test_coded.py::test_codes_stand_for_the_line_nearest_to_the_keys[4]"),
    ("ops/pages/key_codes.py", "if scales is not None:", "if False:", "ops/test_key_codes.py::test_codes_are_chosen_for_the_rounded_line[3-bfloat16]"),
    ("ops/pages/key_codes.py", "[..., :size] << low_bits", "[..., :size] << 0", "ops/test_key_codes.py::test_odd_and_whole_byte_codes_equal_the_reference[3]"),
    ("ops/pages/key_codes.py", "jnp.arange(groups * GROUP) < size", "jnp.arange(groups * GROUP) >= 0", "ops/test_key_codes.py::test_values_by_token_share_a_line_in_groups_of_32[40]"),
    ("cache/policies/coded.py", "page * p + best % p", "page * p", "cache/test_coded.py::test_200_steps_equal_the_reference[4-tokens]"),
    ("cache/index/coded_digest_tree.py", "codes=put_pages(index.codes, codes, first)", "codes=index.codes", "cache/test_coded.py::test_200_steps_equal_the_reference[4-tokens]"),
    ("cache/index/coded_digest_tree.py", "codes = move_pages(index.codes, ids, there, first, behind=behind)", "codes = index.codes", "cache/test_coded.py::test_codes_go_where_their_pages_go"),
    ("ops/pages/code_attention.py", "jax.nn.logsumexp(scores, axis=-1), merge_heads(near)", "jax.nn.logsumexp(scores, axis=-1), -jnp.inf", "ops/test_code_attention.py::test_the_best_tokens_and_the_rest_equal_numpy[plain-20]"),
    ("ops/pages/code_attention.py", "jnp.where(selected[:, None], -jnp.inf, scores)", "scores", "ops/test_code_attention.py::test_the_best_tokens_and_the_rest_equal_numpy[plain-20]"),
    ("ops/pages/code_attention.py", "range(0, pages, size)", "range(0, pages, pages)", "ops/test_code_attention.py::test_no_part_decodes_all_pages"),
    ("cache/policies/clustered.py", "Attended(*merge_by_lse(*attended, *found.tail))", "attended", "cache/test_look.py::test_short_rows_and_late_ones_equal_the_reference[0]"),
    ("cache/bases/two_precisions.py", "jnp.logaddexp(outside, tail.lse)", "outside", "cache/test_look.py::test_200_steps_equal_the_reference[4]"),
    ("cache/bases/retrieval.py", "self._described(*parts), jax.tree.map(lambda x: x[:, :, 0], self.stored(*parts))", "self._described(*parts), jax.tree.map(lambda x: x[:, :, 0], self.stored(parts[0], ~parts[1]))", "cache/test_look.py::test_short_rows_and_late_ones_equal_the_reference[0]"),
    ("ops/pages/code_bytes.py", "jnp.where(count[..., None] > 0, data, 0)", "data", "cache/test_look.py::test_codes_come_back_from_their_bytes[4-(24,)]"),
    ("engine/batch.py", "lambda x: x[ids - plan.prompt_pages]", "lambda x: x[(ids - plan.prompt_pages) // (1 + (x.dtype == jnp.uint8))]", "engine/test_codes.py::test_codes_follow_their_pages_through_a_batch"),
    ("engine/snapshot/row_arrays.py", "bits[:, : pages.shape[1]] = pages", "bits[:, : pages.shape[1] - (len(bits.shape) == 6 and bits.shape[3] == 1)] = 0", "engine/test_codes.py::test_sessions_keep_codes_bit_for_bit"),
    ("cache/policies/packed.py", "tokens.counts, tail=tokens.rest", "tokens.counts", "cache/test_packed.py::test_200_steps_equal_the_reference[4]"),
    ("ops/pooling.py", "jnp.clip(places + step, first, last)", "jnp.clip(places + step, 0, last)", "cache/test_eviction_policies.py::test_what_stays_and_what_comes_of_it_equal_plain_numpy[restkv]"),
    ("ops/attention/recent_attention.py", "jnp.exp(scores - lse)", "jnp.exp(scores)", "cache/test_streaming_and_quest.py::test_snapkv_keeps_what_the_last_queries_attend_to"),
    ("cache/registry.py", "2 if layers >= 16", "2 if layers > 16", "engine/test_prefill_and_decode.py::test_dense_first_layers_by_depth"),
    ("cache/registry.py", "else Ring(window)", "else Ring(window + 1)", "models/test_parity.py::test_greedy_text_equals_transformers[mistral-window]"),
    ("checks/errors.py", "c if c.isprintable() else ascii(c)[1:-1]", "c", "checks/test_json_file.py::test_a_message_is_one_short_line_whatever_it_quotes"),
    ("checks/numbers.py", "isinstance(value, int) or isinstance(value, bool)", "isinstance(value, int)", "models/test_config_ranges.py::test_every_value_has_a_range"),
    ("checks/json_file.py", "if len(fields) < len(pairs):", "if False:", "checks/test_json_file.py::test_a_fault_is_one_line"),
    ("runtime/devices.py", "* 3 // 4", "", "cache/test_host_pool.py::test_pinned_limit_is_three_quarters_of_memory_unless_set"),
    ("config/model.py", '("linear", "dynamic")', '("linear",)', "models/test_config.py::test_uncounted_rope_scalings_lengthen_the_context"),
    ("models/parts/linear.py", "normal.astype(x.dtype) * weight", "normal.astype(x.dtype) + 0 * weight", "models/test_parity.py::test_logits_equal_transformers[llama-gqa-default]"),
    ("models/parts/linear.py", "weight = weight.astype(jnp.float32)", "normal = normal.astype(x.dtype)", "models/test_gemma.py::test_norms_round_where_transformers_does"),
    ("models/decoder.py", "cap * jnp.tanh(logits / cap)", "logits", "models/test_parity.py::test_logits_equal_transformers[gemma3_text-plain-fan_in]"),
    ("config/model.py", "self.sliding_rope or full.rope", "full.rope", "models/test_parity.py::test_logits_equal_transformers[gemma3_text-plain-fan_in]"),
    ("ops/rope.py", "lengths[..., None] > scaling.original", "lengths[..., None] >= scaling.original", "models/test_longrope.py::test_a_row_alone_equals_transformers[64-20]"),
    ("engine/decode/row.py", "len(self.tokens) + 1 == tokens and", "len(self.tokens) == tokens and", "models/test_longrope.py::test_a_row_alone_equals_transformers[30-60]"),
    ("engine/decode/run.py", "step if alone else self.step.with_row(at, step)", "step if alone else self.step", "models/test_longrope.py::test_rows_of_a_batch_equal_transformers_row_by_row[full]"),
    ("engine/plan.py", "max(tokens, self.renewal)", "tokens", "models/test_longrope.py::test_a_plan_has_room_for_the_new_keys_where_rows_need_them"),
    ("session/room.py", "not seen <= short < tokens", "True", "session/test_longrope_session.py::test_turns_equal_transformers[a text outgrows it-full]"),
    ("session/session.py", "and run.renewing", "and False", "session/test_longrope_session.py::test_an_interrupt_while_keys_are_made_anew_loses_nothing"),
    ("models/decoder.py", "jax.nn.sigmoid(attended.lse - ", "jax.nn.sigmoid(-", "models/test_sinks.py::test_prefill_decode_and_extend_equal_transformers"),
    ("ops/experts/mixture.py", "y + bias[ids].astype(jnp.float32)", "y", "ops/test_mixture.py::test_every_form_takes_biases_and_limits"),
    ("ops/experts/mixture.py", "jnp.where((slot >= 0)[..., None], here,", "jnp.where((slot < 0)[..., None], here,", "ops/test_offloaded_experts.py::test_codes_from_the_host_are_those_on_the_device"),
    ("ops/experts/offloaded_experts.py", "(self.slot[ids] < 0) & (", "(", "ops/test_offloaded_experts.py::test_experts_are_brought_as_tokens_take_them"),
    ("runtime/host_reads/reader.py", "read(table, runs[order[i]])[0], order[i]", "read(table, runs[order[i]])[0], i", "ops/test_offloaded_experts.py::test_experts_are_brought_as_tokens_take_them"),
    ("engine/units/programs.py", "seen=first[None], lengths=new", "seen=None, lengths=new", "engine/test_prefill_units.py::test_a_prefill_in_units_equals_a_whole_one[phi3-long-Full-None]"),
    ("engine/units/programs.py", "count, dtype=jnp.int32)[None], lengths).q", "count, dtype=jnp.int32)[None], lengths % 64).q", "engine/test_prefill_units.py::test_a_prefill_in_units_equals_a_whole_one[phi3-long-Full-None]"),
    ("engine/units/programs.py", "jnp.where(is_token, by_head(y), 0)", "by_head(y)", "engine/test_prefill_units.py::test_nothing_comes_from_padding_in_units"),
    ("engine/units/programs.py", "queries.uses + expert_uses(experts, new,", "queries.uses + expert_uses(experts, lengths,", "engine/test_prefill_units.py::test_experts_in_host_memory_are_those_the_prompt_takes"),
    ("engine/units/programs.py", "head * part.shape[axes[0]], axis", "0, axis", "engine/test_prefill_units.py::test_steps_between_units_change_nothing"),
    ("engine/prefill.py", ".at[experts].add(is_token[..., None].astype(jnp.int32))", ".at[experts].add(1)", "ops/test_offloaded_experts.py::test_experts_are_brought_as_tokens_take_them"),
    ("ops/activations.py", "(up + 1.0)", "up", "ops/test_mixture.py::test_every_form_takes_biases_and_limits"),
    ("ops/rope.py", "int(scaling.part * size // 2)", "size // 2", "models/test_parity.py::test_logits_equal_transformers[gemma4_text-experts-fan_in]"),
    ("models/parts/experts.py", "self.mlp_norm(made) + ", "made + ", "models/test_parity.py::test_logits_equal_transformers[gemma4_text-experts-fan_in]"),
    ("models/decoder.py", "if self.layer.values_from_keys else self.v_proj(x)", "if self.layer.values_from_keys else k", "models/test_parity.py::test_logits_equal_transformers[llama-gqa-default]"),
    ("cache/registry.py", "(same_heads and window >= capacity)", "window >= capacity", "models/test_gemma.py::test_few_tokens_are_kept_in_rings_of_their_size"),
    ("ops/rope.py", "[pairs[..., 0], pairs[..., 1],", "[pairs[..., 1], pairs[..., 0],", "models/test_parity.py::test_logits_equal_transformers[deepseek_v3-yarn-fan_in]"),
    ("models/decoder.py", 'config.norm_places != "after"', "True", "models/test_parity.py::test_logits_equal_transformers[olmo3-plain-fan_in]"),
    ("models/decoder.py", "x + self.post_mlp_layernorm(out)", "self.post_mlp_layernorm(out)", "models/test_parity.py::test_logits_equal_transformers[llama-gqa-default]"),
    ("models/parts/latent_attention.py", "EPS = 1e-6", "EPS = 1e-2", "models/test_parity.py::test_logits_equal_transformers[deepseek_v3-yarn-fan_in]"),
    ("models/parts/latent_attention.py", "if self.interleaved:", "if False:", "models/test_parity.py::test_logits_equal_transformers[deepseek_v3-yarn-fan_in]"),
    ("models/parts/latent_attention.py", "lax.dynamic_slice_in_dim(self._made, group * count", "lax.dynamic_slice_in_dim(self._made, 0 * count", "models/test_parity.py::test_chunked_prefill_equals_whole[deepseek_v3-yarn]"),
    ("models/parts/latent_attention.py", "rerotate(heads[..., self.config.kv_lora_rank :], by, seen, rope=self.rope)", "heads[..., self.config.kv_lora_rank :]", "models/test_latent_expanded.py::test_heads_are_rotated_to_the_positions_of_their_making"),
    ("models/hf/rope_scaling.py", "scale(weights[1]) ** 2", "1.0", "models/test_parity.py::test_logits_equal_transformers[deepseek_v3-yarn-fan_in]"),
    ("models/parts/experts.py", "best(groups, routing.group_best)", "best(groups, 2)", "ops/test_mixture.py::test_every_number_of_the_experts_is_read"),
    ("engine/plan.py", "latent=config.latent is not None", "latent=False", "models/test_latent_expanded.py::test_pages_hold_the_key_alone"),
    ("models/hf/fields.py", "for name, value in self.raw.items():", "for name, value in ():", "models/test_config.py::test_what_is_missing_unknown_or_unsupported_is_named"),
    ("models/hf/hf_config.py", "fields.others() - read - USUAL", "fields.others() - USUAL", "models/test_reference_fields.py::test_a_field_that_transformers_reads_is_read_or_refused"),
    ("models/hf/fields.py", "if token >= 0)", ")", "models/test_config.py::test_an_end_token_of_minus_one_is_none"),
    ("config/model.py", "tokens = max(tokens, int(", "tokens = min(tokens, int(", "models/test_config.py::test_yarn_lengthens_the_context"),
    ("models/hf/fields.py", "if len(ids) > MOST_EOS:", "if False:", "models/test_config_ranges.py::test_every_value_has_a_range"),
    ("models/hf/rope_scaling.py", '("linear", "dynamic", "yarn") and', '() and', "models/test_config_ranges.py::test_every_value_has_a_range"),
    ("models/families/qwen.py", "qkv_bias=True", "qkv_bias=False", "models/test_parity.py::test_logits_equal_transformers[qwen2-plain-default]"),
    ("checkpoint/tensor_mapping.py", "slice(index, None, len(names))", "slice(0, None, len(names))", "checkpoint/test_tensor_mapping.py::test_what_stands_in_one_tensor_is_taken_apart"),
    ("checkpoint/tensor_mapping.py", "slice(sum(sizes[:index])", "slice(0 * sum(sizes[:index])", "checkpoint/test_tensor_mapping.py::test_what_stands_in_one_tensor_is_taken_apart"),
    ("checkpoint/tensors.py", ".whole or len(parameter_keys) > 1:", ".whole and len(parameter_keys) > 1:", "checkpoint/test_loading.py::test_weights_go_to_a_device_one_by_one"),
    ("checkpoint/tensor_mapping.py", "            matrix = matrix.T\n", "            pass\n", "checkpoint/test_rounding.py::test_experts_in_one_tensor_are_rounded_each_by_itself"),
    ("checkpoint/load.py", "        del tensor  #", "        #", "checkpoint/test_loading.py::test_weights_go_to_a_device_one_by_one"),
    ("checkpoint/readers/huggingface.py", "stream.seek(offset)", "stream.seek(offset + 8)", "checkpoint/test_rounding.py::test_a_folder_of_codes_is_what_is_rounded_as_it_is_read"),
    ("checkpoint/quantized/formats.py", "for module in modules for name in names", "for module in modules[:1] for name in names", "models/test_wrapped.py::test_a_method_may_name_modules_in_any_form"),
    ("models/hf/wrapped.py", "**outer, ", "", "models/test_wrapped.py::test_the_weights_type_may_be_said_outside"),
    ("models/hf/wrapped.py", "**ends, ", "", "models/test_wrapped.py::test_a_mistral_with_images_has_the_logits_of_its_text_model"),
    ("checkpoint/tensors.py", "return not all(map(np.array_equal", "return all(map(np.array_equal", "checkpoint/test_checkpoint.py::test_a_head_beside_a_tied_config_is_used"),
    ("checkpoint/folder.py", 'if not file.name.startswith("adapter")', "", "checkpoint/test_checkpoint.py::test_a_lora_is_called_one"),
    ("checkpoint/tensors.py", 'faults.append(f"{key} is stored twice")', "pass", "checkpoint/test_checkpoint.py::test_a_tensor_in_two_shards_is_refused"),
    ("checkpoint/quantized/layouts.py", "numbers[:, ::2] | numbers[:, 1::2] << 4", "numbers[:, 1::2] | numbers[:, ::2] << 4", "checkpoint/test_rounding.py::test_a_folder_of_codes_is_what_is_rounded_as_it_is_read"),
    ("checkpoint/tensors.py", "len(set(map(self._form, stack.keys))) == 1", "True", "ops/test_quantized_products.py::test_experts_stay_codes_but_in_several_forms"),
    ("ops/experts/mixture.py", "groups).sum((2, 4))", "groups).sum((2, 4)) * 1.01", "ops/test_mixture.py::test_every_form_takes_codes"),
    ("checkpoint/quantized/layouts.py", "np.bitwise_and(packed, 15, out=numbers[..., 0])", "np.bitwise_and(packed, 15, out=numbers[..., 1])", "checkpoint/test_layouts.py::test_a_matrix_is_what_its_bits_say"),
    ("checkpoint/quantized/float4.py", 'shape) / parts["', 'shape) * parts["', "checkpoint/test_layouts.py::test_a_matrix_is_what_its_bits_say"),
    ("checkpoint/quantized/cpu_codes.py", "view(FP8).astype(HALF)", "view(np.int8).astype(HALF)", "ops/test_quantized_products.py::test_matrices_stay_codes"),
    ("ops/quantized/products.py", "-(-count // size)", "count // size", "ops/test_quantized_products.py::test_a_product_is_that_of_the_dequantised_matrix"),
    ("checkpoint/quantized/rounding.py", '"re:.*gate$"', '""', "checkpoint/test_rounding.py::test_routers_stay_and_experts_are_rounded"),
    ("checkpoint/quantized/rounding.py", "(*targets, (self.group", "((self.group", "checkpoint/test_rounding.py::test_widths_that_128_does_not_divide_get_smaller_groups"),
    ("checkpoint/quantized/rounding.py", "group or matrix.shape[1]", "matrix.shape[1]", "checkpoint/test_rounding.py::test_a_matrix_is_rounded_to_the_nearest_codes"),
    ("checkpoint/tensors.py", "if part in self.stored}", "}", "checkpoint/test_formats.py::test_unsound_tensors_are_one_line"),
    ("checkpoint/readers/huggingface.py", "> shard_bytes:", ">= shard_bytes * 2:", "checkpoint/test_checkpoint.py::test_large_checkpoints_are_written_in_shards_with_an_index"),
    ("engine/penalties.py", "logits / penalty, logits * penalty", "logits * penalty, logits / penalty", "engine/test_sampling.py::test_draws_follow_transformers_probabilities"),
    ("engine/penalties.py", "jnp.where(self.counts > 0,", "jnp.where(self.counts > 1,", "engine/test_penalties.py::test_logits_equal_transformers_and_the_formulas"),
    ("engine/penalties.py", "counts=None if self.counts is None else jnp.zeros_like(self.counts)", "counts=self.counts", "engine/test_penalties.py::test_a_further_text_begins_the_counts_anew"),
    ("engine/decode/logprobs.py", "zip(ids[i, :n], best[i, :n]", "zip(ids[i], best[i]", "commands/test_prompt_lines.py::test_rows_of_a_batch_report_what_each_asks_for"),
    ("checkpoint/generation_config.py", "if samples else given", "if True else given", "commands/test_sampling_options.py::test_the_models_sampling_is_taken_and_told"),
    ("api/model_sampling.py", "if name not in options}", "}", "commands/test_sampling_options.py::test_an_option_stands_in_for_a_value_out_of_range"),
    ("engine/sampling.py", "jnp.where(rows.temperature > 0, drawn, best)", "drawn", "engine/test_batches_of_prompts.py::test_each_row_samples_in_its_own_way_as_it_would_alone"),
    ("engine/plan.py", "capacity=spec.capacity", "capacity=prompt_tokens + new_tokens", "engine/test_batch.py::test_a_row_that_decodes_all_it_may_has_its_windows"),
    ("engine/layers.py", "window=layer.config.window", "window=None", "models/test_parity.py::test_logits_equal_transformers[mistral-window-default]"),
    ("engine/batch.py", "ids[filled], ids[~filled]", "ids[~filled], ids[filled]", "engine/test_batch.py::test_twins_that_settle_write_to_extents_of_their_own"),
    ("cache/index/base.py", "jnp.where((jnp.arange(x.shape[2]) < behind).reshape(shape), x, jnp.zeros((), x.dtype))", "x", "engine/test_batch.py::test_twins_that_settle_write_to_extents_of_their_own"),
    ("cache/bases/eviction.py", "< state.room, -jnp.inf, jnp.inf)", "< state.room, -jnp.inf, -jnp.inf)", "cache/test_budgets.py::test_each_kv_head_evicts_within_its_own_room"),
    ("engine/batch.py", "origin=row.cache.lengths.seen - clock", "origin=row.cache.lengths.seen", "engine/test_batch.py::test_a_row_that_joins_at_any_step_goes_on_as_alone"),
    ("engine/batch.py", "plan.prompt_pages // host_pool.EXTENT) &", "plan.prompt_pages // host_pool.EXTENT + 1) &", "engine/test_batch.py::test_a_fork_goes_on_in_its_own_way[clustered-250]"),
    ("engine/batch.py", "| extents.shared(table))", ")", "engine/test_batch.py::test_twins_that_settle_write_to_extents_of_their_own"),
    ("engine/decode/between_steps.py", "plan.pool.pages, cache.lengths.next_page)", "cache.lengths.next_page, cache.lengths.next_page)", "engine/test_batch.py::test_the_last_round_before_that_is_compacted_as_the_others"),
    ("cache/bases/selection.py", "per_query_head = near + seen", "per_query_head = seen", "cache/test_streaming_and_quest.py::test_quest_chooses_pages_for_every_query_head"),
    ("cache/bases/retrieval.py", "planes = tuple(jnp.where(filled[:, None, :, None], x, 0) for x in planes)", "planes = tuple(planes)", "engine/test_batch.py::test_nothing_is_read_of_what_others_have_left_in_the_pool[clustered]"),
    ("cache/pool/extents.py", "np.flatnonzero(self._users == 0)", "np.flatnonzero(self._users < 9)", "engine/test_batch.py::test_a_row_that_joins_at_any_step_goes_on_as_alone"),
    ("cache/bases/window.py", "first = jnp.maximum(state.first, lengths.seen - self.fill)", "first = state.first", "engine/test_batch.py::test_a_row_that_joins_at_any_step_goes_on_as_alone"),
    ("engine/plan.py", "-(-spec.new_capacity // every) * every", "spec.new_capacity", "engine/test_batch.py::test_pages_for_new_tokens_are_whole_rounds_of_compaction"),
    ("engine/decode/step.py", "shared if layer.policy.follows else None", "None", "engine/test_prefill_and_decode.py::test_a_step_by_layers_equals_one_program[followed]"),
    ("engine/decode/layer.py", "donate_argnums=1", "donate_argnums=()", "engine/test_prefill_and_decode.py::test_a_step_by_layers_equals_one_program[followed]"),
    ("engine/decode/step.py", "done=state.done | ended", "done=state.done", "engine/test_prefill_and_decode.py::test_rows_that_have_ended_cost_no_fetches[True]"),
    ("text/tokenizer.py", "if not _reads_as_its_file(tokenizer, folder):", "if False:", "text/test_tokenizer_file.py::test_token_ids_are_the_files[byte level-qwen2-Qwen2Tokenizer]"),
    ("text/token_text.py", "if name.startswith(SPACE) and", "if False and", "text/test_detokenize.py::test_a_token_is_told_with_its_space_and_its_bytes[llama-2]"),
    ("text/continuation.py", "return whole[len(before) :]", "return ids", "text/test_continuation.py::test_later_text_has_the_tokens_of_the_middle_of_a_text"),
    ("engine/decode/row.py", "before=self.prompt", "before=()", "session/test_sentencepiece.py::test_a_text_is_what_follows_the_prompt[llama-2]"),
    ("session/session.py", "continues=bool(self.token_ids)", "continues=False", "session/test_sentencepiece.py::test_a_session_reads_as_one_text[llama-2]"),
    ("session/session.py", "self._encode(added, answer, continues=True)", "self._encode(added, answer)", "session/test_sentencepiece.py::test_the_next_turn_of_a_chat_gains_no_space[llama-2]"),
    ("text/detokenize.py", "if text.endswith(UNFINISHED):", "if False:", "text/test_detokenize.py::test_pieces_join_to_the_text"),
    ("api/jobs.py", "else (request.seed, 0)", "else (answer.seed, 0)", "commands/test_prompt_lines.py::test_lines_have_what_they_ask_for_in_the_order_asked"),
    ("engine/decode/row.py", "1 - totals.pages_fetched / totals.pages_needed", "totals.pages_fetched / totals.pages_needed", "cache/test_step_counts.py::test_a_short_text_fetches_the_few_pages_it_has"),
    ("engine/request.py", "(items and isinstance(items[0], Integral))", "False", "commands/test_prompt_lines.py::test_token_ids_are_prompts"),
    ("engine/response.py", "for p in pieces for token in p.logprobs", "for p in pieces[1:] for token in p.logprobs", "commands/test_prompt_lines.py::test_log_probabilities_are_those_of_the_logits"),
    ("engine/decode/logprobs.py", "jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)", "logits", "commands/test_prompt_lines.py::test_log_probabilities_are_those_of_the_logits"),
    ("commands/show.py", "while next_row in pieces and", "while next_row not in pieces and", "commands/test_prompt_lines.py::test_lines_have_what_they_ask_for_in_the_order_asked"),
    ("commands/requests.py", "if name not in FIELDS:", "if False:", "commands/test_prompt_lines.py::test_a_line_that_asks_for_what_cannot_be_is_refused"),
    ("session/usage.py", "slots + int(counts.sum())", "slots + counts.size", "session/test_usage.py::test_a_pool_uses_what_its_tokens_take"),
    ("session/usage.py", "used += share * (size - report.digest_bytes)", "used += size - report.digest_bytes", "session/test_usage.py::test_a_full_cache_uses_what_its_tokens_take"),
    ("commands/phases.py", "if phase != self._phase:\n                self._end()", "if phase != self._phase:\n                pass", "commands/test_phases.py::test_a_phase_that_lasts_is_told_and_its_end"),
    ("commands/phases.py", "first, self._writing = not self._writing, True", "first = not self._writing", "commands/test_phases.py::test_no_line_cuts_an_answer_in_two"),
    ("runtime/compile_clock.py", "if threading.get_ident() == thread:", "if True:", "runtime/test_compile_clock.py::test_a_thread_is_told_of_the_programs_that_it_compiles"),
    ("runtime/progress.py", "progress(PREFILL, done, layers)", "progress(PREFILL, layers, layers)", "session/test_session.py::test_progress_is_told_and_may_end_the_first_text"),
    ("commands/requests.py", "[*arguments.text, *arguments.prompt]", "[*arguments.prompt]", "commands/test_command_line.py::test_prompts_are_typed_as_elsewhere"),
    ("commands/loading.py", "if template is not None:", "if False:", "commands/test_command_line.py::test_another_chat_template_is_used"),
    ("checkpoint/folder.py", "isinstance(cause, OfflineModeIsEnabled)", "False", "checkpoint/test_folder.py::test_without_a_network_the_line_says_so"),
    ("session/session.py", "self.token_ids += piece.token_ids", "pass", "session/test_session.py::test_questions_follow_one_another"),
    ("engine/request.py", "if name in [field.name for field in fields(Sampling)]:", "if False:", "engine/test_request.py::test_an_unknown_option_is_told_with_the_right_one[temperature]"),
    ("session/room.py", "        if not held:\n            raise\n", "        raise\n", "session/test_session.py::test_a_full_session_says_so_and_stays_as_it_was"),
    ("session/session.py", "and not outdated:", ":", "text/test_chat_turns.py::test_a_stop_string_does_not_stay_in_a_chat"),
    ("session/messages.py", "before = [*messages]", "before = messages", "commands/test_chat.py::test_a_refused_regen_keeps_the_message_and_its_answer"),
    ("session/messages.py", 'turns == ["user", "assistant"] * (len(turns) // 2)', "True", "session/test_storage.py::test_a_session_that_says_what_cannot_be_is_refused[a question without an answer]"),
    ("text/chat_messages.py", "(isinstance(content, list) and bool(content))", "bool(content)", "text/test_chat_messages.py::test_what_is_no_message_is_refused_in_one_line[a number]"),
    ("session/messages.py", "del messages[-2:]", "del messages[-1:]", "commands/test_chat.py::test_undo_takes_the_last_turn_back"),
    ("text/reasoning.py", "_channel(header) == THOUGHTS, True", "False, True", "text/test_reasoning.py::test_channels_come_apart"),
    ("text/encode.py", "own = _outside(names, spans_of(text))", "own = names", "text/test_encode.py::test_names_in_messages_are_text[llama-2]"),
    ("text/encode.py", "whole[len(before) :] if is_double else whole", "whole", "text/test_encode.py::test_a_text_has_one_bos[byte level]"),
    ("text/encode.py", "first=anew if end else not continues", "first=True", "text/test_encode.py::test_pieces_have_the_tokens_of_the_whole_text[mistral-0.3]"),
    ("text/chat_text.py", "min(end, stop) - start", "end", "text/test_encode.py::test_a_chat_keeps_its_spans_in_slices_and_sums"),
    ("text/control_tokens.py", "(FORM.fullmatch(token.content) and", "(False and", "text/test_encode.py::test_names_in_messages_are_text[not called special]"),
    ("text/control_tokens.py", "reverse=True", "reverse=False", "text/test_encode.py::test_the_longest_name_counts"),
    ("text/chat_marks.py", "if all(sides) else Origin.CUT", "if any(sides) else Origin.CUT", "text/test_chat_template.py::test_names_of_messages_are_told_from_the_templates[taken away]"),
    ("text/chat_marks.py", "return Origin.PARTS", "return Origin.TEMPLATE", "text/test_chat_template.py::test_names_of_messages_are_told_from_the_templates[lower case]"),
    ("text/chat_origin.py", "if text == marked.text else set()", "if True else set()", "text/test_chat_template.py::test_names_of_messages_are_told_from_the_templates[cut off behind]"),
    ("text/chat_origin.py", "if _names(marked, own | {Origin.CUT}) == expected:", "if False:", "text/test_chat_template.py::test_templates_that_join_names_take_harmless_chats"),
    ("text/chat_origin.py", "parts = {Origin.PARTS} & {*lettered.origins}", "parts = {Origin.PARTS}", "text/test_chat_template.py::test_names_of_messages_are_told_from_the_templates[cut off, with parts]"),
    ("text/chat_origin.py", "or _names(marked, parts) == _names(lettered, parts)", "", "text/test_chat_template.py::test_names_of_messages_are_told_from_the_templates[of parts, and one that depends on the text]"),
    ("text/chat_origin.py", "_lettered(chat, template) | words", "_lettered(chat, template)", "text/test_chat_template.py::test_an_argument_may_choose_a_name"),
    ("sandbox/worker.py", "pattern.sub(lambda match: match[0].join(marks), text)", "text", "text/test_chat_template.py::test_names_of_messages_are_told_from_the_templates[lower case, before the template's own]"),
    ("text/chat_template.py", 'before if behind.startswith(" ") else', 'before if True else', "text/test_chat_template.py::test_a_last_message_of_the_assistant_is_continued[llama-a space]"),
    ("text/chat_template.py", "and not _reads_parts(ask, values)", "and False", "text/test_chat_template.py::test_other_templates_get_the_parts_as_one_text[fails]"),
    ("text/chat_messages.py", "or name in FUNCTIONS:", "or False:", "text/test_chat_messages.py::test_what_is_no_variable_is_refused_in_one_line[a function of Jinja]"),
    ("session/messages.py", "return tokens >= SHORT", "return True", "text/test_chat_turns.py::test_a_short_chat_prefilled_anew_is_no_warning"),
    ("engine/trim.py", "[0, :, : joint.page].sum(-1)", "[0, :, : joint.page - 1].sum(-1)", "engine/test_trim.py::test_a_trimmed_cache_equals_one_without_the_forgotten_tokens[clustered]"),
    ("commands/convert.py", '"a Hugging Face" if to_hf else', '"a Hugging Face" if not to_hf else', "checkpoint/test_checkpoint.py::test_round_trip_is_bit_exact_and_transformers_loads_it"),
    ("text/chat_messages.py", "if depth > DEEPEST:", "if False:", "text/test_chat_messages.py::test_what_is_no_variable_is_refused_in_one_line[depth]"),
    ("commands/requests.py", "arguments | (self.chat_template_kwargs or {})", "arguments", "commands/test_template_options.py::test_arguments_and_tools_reach_the_template"),
    ("session/session.py", "template_variables=self.template_variables,", "template_variables={},", "commands/test_template_options.py::test_a_session_keeps_its_template_arguments"),
    ("text/turn_end.py", " or is_harmony(tokenizer)", "", "text/test_turn_end.py::test_the_end_of_a_harmony_message_ends_no_turn"),
    ("commands/printer.py", 'answer.finish_reason == "length" and ', "", "commands/test_printer.py::test_an_answer_of_thoughts_alone_is_told"),
    ("engine/decode/nonfinite.py", 'name.startswith("lm_head")', "0", "engine/test_nonfinite.py::test_infinity_in_the_head_is_named_first_weight_wins"),
    ("api/prompts.py", "characters < len(prompt)", "False", "cache/test_options.py::test_a_text_far_too_long_is_told_at_once"),
    ("evaluation/attention_map.py", "self.steps += 1", "self.steps += 2", "evaluation/test_attention_map.py::test_the_answers_digits_weigh_most_in_some_layer"),
    ("runtime/compile_clock.py", "self.seconds -= inner[1] - inner[0]", "pass", "runtime/test_compile_clock.py::test_what_lies_inside_counts_once"),
    ("files/atomic_folder.py", "mode & 0o666", "0o644", "files/test_atomic_folder.py::test_a_private_folder_is_the_users_alone"),
    ("files/private.py", "os.O_CREAT | os.O_EXCL, 0o600", "os.O_CREAT, 0o600", "files/test_private.py::test_a_link_is_not_followed"),
    ("session/session.py", "writing(private=True)", "writing()", "session/test_storage.py::test_a_session_is_the_users_alone"),
    ("runtime/compile_cache.py", "not mode & stat.S_ISVTX", "False", "runtime/test_compile_cache.py::test_a_folder_that_others_may_fill_is_not_used"),
    ("runtime/compile_cache.py", "            last.unlink()", "            pass", "runtime/test_compile_cache.py::test_a_damaged_program_is_one_line_and_replaced"),
    ("commands/texts.py", "if number > JSONL_LINES", "if False", "commands/test_texts.py::test_a_stream_of_lines_is_refused_once_it_passes"),
    ("session/room.py", "if not has_answer(messages):", "if True:", "commands/test_chat.py::test_a_chat_to_be_prefilled_anew_counts_what_it_will_hold"),
    ("session/session.py", "and not self._outdated):", "):", "commands/test_chat.py::test_a_chat_to_be_prefilled_anew_counts_what_it_will_hold"),
    ("runtime/heap.py", "        trim(0)", "        pass", "runtime/test_heap.py::test_freed_memory_goes_back_to_the_system"),
    ("session/room.py", "if room < 1", "if room < 0", "session/test_session.py::test_a_full_session_says_so_and_stays_as_it_was"),
    ("session/room.py", "pages=pages) < limit", "pages=pages) < -(10**6)", "session/test_session.py::test_a_full_pool_is_prefilled_anew"),
    ("commands/chat.py", "if session.room < most", "if session.room < 0", "commands/test_chat.py::test_a_full_context_is_told_before_and_nothing_is_lost"),
    ("commands/texts.py", "return status.st_size if", "return 0 if", "commands/test_texts.py::test_a_file_is_refused_by_its_size"),
    ("commands/process.py", "        _answers[-1].begun = True", "        pass", "commands/test_process.py::test_lines_of_the_log_do_not_cut_an_answer"),
    ("text/tokenizer_errors.py", "if not panicked:", "if True:", "text/test_tokenizer.py::test_a_command_prints_no_line_of_a_panic"),
    ("commands/process.py", "return BROKEN_PIPE", "return 1", "commands/test_process.py::test_a_closed_stdout_pipe_ends_quietly"),
    ("engine/serving/scheduler.py", "ticket = self.waiting[0]", "ticket = self.waiting[-1]", "engine/test_scheduler.py::test_a_long_prompt_at_the_head_is_not_passed_by"),
    ("engine/serving/scheduler.py", "self._newest is Work.DECODE and self._credit >= 0", "self._credit >= 0", "engine/test_scheduler.py::test_places_and_extents_have_one_owner"),
    ("engine/serving/scheduler.py", "self._credit = min(self._credit, 0.0)", "pass", "engine/test_scheduler.py::test_steps_without_a_prompt_save_no_time_for_later_prompts"),
    ("engine/serving/scheduler.py", "self.extents.give_back(ticket.table)", "pass", "engine/test_scheduler.py::test_refusals_leave_nothing_behind"),
    ("engine/serving/core.py", "run.step = run.step.with_row(ticket.at, step)", "pass", "engine/test_core.py::test_a_stop_string_frees_the_place_for_the_next"),
    ("engine/serving/core.py", "self._loop.drop(ticket.at)", "pass", "engine/test_core.py::test_a_stop_string_frees_the_place_for_the_next"),
    ("engine/serving/core.py", "if ticket is self.scheduler.prefilling and self._start is not None:", "if False:", "engine/test_core.py::test_a_prompt_cancelled_between_units_is_not_gone_on_with"),
    ("engine/serving/core.py", "self._progress is not None and not self._has_stepped", "self._progress is not None", "api/test_stream_generate.py::test_progress_counts_up_to_the_announced_total[1-3]"),
    ("engine/decode/loop.py", "if at not in self.rows:  # the caller", "if False:  # the caller", "engine/test_core.py::test_a_row_released_within_a_step_has_no_more_pieces"),
    ("engine/decode/row.py", "self._ready.time - self._prefill_from", "self.first_token['ttft_s']", "api/test_stream_generate.py::test_times_of_a_row_that_has_waited"),
    ("engine/serving/prefix_folder.py", "if x.path.name == _name(x.key, tokens[count * BLOCK : x.length])", "", "engine/test_prefix_folder.py::test_a_prompt_that_two_others_go_on_from_is_stored_whole"),
    ("engine/serving/prefix_folder.py", "os.utime(stored.path.with_suffix(ABOUT))", "pass", "engine/test_prefix_folder.py::test_the_least_recently_used_goes_first[False]"),
    ("engine/serving/prefix_cache.py", "shares &= np.arange(len(ticket.wanted)) < growth.start // EXTENT", "pass", "engine/test_core.py::test_answers_to_one_prompt_write_new_tokens_apart[clustered]"),
    ("engine/serving/prefix_folder.py", "if isinstance(error, Damaged | FileNotFoundError):", "if True:", "engine/test_prefix_folder.py::test_an_error_that_may_pass_removes_no_file"),
    ("engine/serving/prefix_cache.py", "entry.followers >= 2", "entry.followers >= 1", "engine/test_prefix_folder.py::test_a_prompt_that_two_others_go_on_from_is_stored_whole"),
    ("engine/serving/start.py", "row_keys([self._draw]), jnp.copy(counts)", "row_keys([self._draw]), jnp.copy(zeros)", "engine/test_prefix_folder.py::test_a_sampled_answer_behind_a_stored_prefix_draws_the_same"),
    ("engine/serving/start.py", "self._before_text(state), cut)", "state, cut)", "engine/test_core.py::test_prompts_behind_a_cached_prefix_equal_themselves[clustered-2]"),
    ("engine/serving/thread.py", "atexit.register(self.close)", "pass", "engine/test_engine_thread.py::test_an_interpreter_ends_with_an_engine_left_open"),
    ("engine/serving/thread.py", "traceback.clear_frames(error.__traceback__)", "pass", "engine/test_engine_thread.py::test_an_engine_that_has_failed_frees_its_core"),
    ("engine/serving/thread.py", "core.release(ticket)", "pass", "engine/test_engine_thread.py::test_requests_are_cancelled_in_the_queue_and_in_prefill"),
    ("engine/serving/thread.py", "error.__cause__ = self._failure", "pass", "engine/test_engine_thread.py::test_a_failure_is_raised_in_every_callers_thread"),
    ("engine/serving/thread.py", "[*self._tickets, *(handle for handle, _ in self._new)]", "[*self._tickets]", "engine/test_engine_thread.py::test_a_failure_is_raised_in_every_callers_thread"),
    ("api/engine.py", "if asked > self.max_new_tokens:", "if False:", "api/test_engine.py::test_what_cannot_be_answered_is_refused_at_once[many tokens]"),
    ("commands/generate.py", "sum(request.max_new_tokens for request in requests)", "arguments.max_new_tokens * len(prompts)", "api/test_stream_generate.py::test_tokens_count_up_to_what_lines_ask_for"),
    ("../bench/sandbox.py", "if os.read(reading_end, len(number)) == number:", "if True:", "bench/test_bench_sandbox.py::test_only_a_program_that_comes_to_its_end_passes"),
    ("../bench/engine/bars.py", "ratio >= self.bound if", "ratio <= self.bound if", "bench/test_bench_engine.py::test_the_median_ratio_is_held_against_the_bar"),
    ("../bench/engine/prefill.py", "later > start and", "earlier > start and", "bench/test_bench_engine.py::test_gaps_are_those_that_a_span_of_time_touches"),
    ("../bench/humaneval.py", "default=len(text)", "default=0", "bench/test_bench_humaneval.py::test_a_completion_ends_with_the_function"),
)  # fmt: skip


def test_each_fault_has_its_place():
    lost = [(module, text) for module, text, *_ in FAULTS if (ROOT / "icejax" / module).read_text().count(text) != 1]
    assert not lost


@pytest.fixture(scope="module")
def forks():
    """Processes that have imported what the project does not change, and nothing of the project."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


@pytest.fixture(scope="module")
def project(tmp_path_factory, forks):
    """A copy of the project with its modules compiled: to read and to check them is half of the time of most faults."""
    folder = tmp_path_factory.mktemp("project")
    for part in ("icejax", "convert", "bench", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    assert exit_status(forks, folder, ["--collect-only", "--ignore=tests/test_faults.py"]) == 0
    return folder


def exit_status(forks, folder: Path, line: list[str]) -> int:
    """Runs tests of a folder in a process of its own."""
    process = forks.Process(target=run, args=(folder, [*line, *PLAIN]))
    process.start()
    process.join()
    return process.exitcode


def run(folder: Path, line: list[str]) -> None:
    """The tests of a folder; what they print is left there."""
    printed = os.open(folder / "printed", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = False
    os.environ.pop("XLA_FLAGS", None)
    # One example that fails is enough: none is made smaller or explained.
    settings.register_profile("planted", phases=[Phase.explicit, Phase.generate])
    sys.exit(pytest.main(line))


@pytest.mark.slow
@pytest.mark.parametrize("module, text, fault, noticed_by", FAULTS, ids=lambda x: str(x)[:24])
def test_the_tests_notice(tmp_path, forks, project, module, text, fault, noticed_by):
    shutil.copytree(project, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "icejax" / module
    file.write_text(file.read_text().replace(text, fault))
    line = [f"tests/{noticed_by}", "-x", "-m", "slow or not slow"]
    assert exit_status(forks, tmp_path, line) == 1, (tmp_path / "printed").read_text()[-2000:]
