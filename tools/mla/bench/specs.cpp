// SPDX-License-Identifier: Apache-2.0
#include "mla/bench/specs.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "mla/text.h"

namespace mla::bench {
namespace {

using cli::UsageError;

int32_t narrow(int64_t value, const char* what) {
  if (value < 0 || value > std::numeric_limits<int32_t>::max())
    throw UsageError("{}: expected at most {}, got {}", what, std::numeric_limits<int32_t>::max(), value);
  return static_cast<int32_t>(value);
}

std::vector<int32_t> q_lens(const Case& one) {
  std::vector<int32_t> lens;
  for (const Request& request : one.requests) lens.push_back(narrow(request.q_len, "q_len"));
  return lens;
}

std::vector<int32_t> kv_lens(const Case& one) {
  std::vector<int32_t> lens;
  for (const Request& request : one.requests) lens.push_back(narrow(request.kv_len, "kv_len"));
  return lens;
}

kit::CacheSpec cache_spec(const Case& one, CacheFormat format, int64_t page_size) {
  kit::CacheSpec spec;
  spec.format = format;
  spec.d_qk = narrow(one.d_qk, "d_qk");
  spec.d_v = narrow(one.d_v, "d_v");
  spec.page_size = narrow(page_size, "page_size");
  spec.garbage_table_tail = false;
  spec.unowned_pages = 0;
  spec.poison = false;
  const KvLayout layout = kv_layout(format);
  spec.token_scales = layout.nope.scale_place == ScalePlace::kTensor && one.scales == Scales::kPerSlot;
  spec.power_of_two_scales = one.scales != Scales::kF32;
  if (one.scales == Scales::kPowersOfTwo) spec.tensor_scale = 0x1p-6F;
  spec.padded_pages = layout.has_footer();
  if (layout.nope_dim != 0 && spec.d_qk != layout.nope_dim + layout.rope_dim)
    throw UsageError("cache format {}: expected d_qk = {} ({} + {}), got {}", layout.name,
                     layout.nope_dim + layout.rope_dim, layout.nope_dim, layout.rope_dim, spec.d_qk);
  if (spec.d_v > spec.d_qk) throw UsageError("head dims {}/{}: expected d_v at most d_qk", spec.d_qk, spec.d_v);
  return spec;
}

kit::CacheSpec cache_spec(const Case& one) { return cache_spec(one, one.cache, one.page_size); }

void set_attention(const Case& one, uint64_t seed, kit::AttentionSpec& spec) {
  spec.num_heads = narrow(one.heads, "heads");
  spec.o_dtype = one.q_dtype == DType::kE4M3 ? DType::kBF16 : one.q_dtype;
  spec.options.attn_sink = one.sink;
  spec.options.window_left = narrow(one.window + 1, "window") - 1;
  spec.options.logits_soft_cap = static_cast<float>(one.soft_cap);
  spec.options.alibi_slopes = one.alibi;
  spec.options.compute = one.compute;
  spec.batch_invariant = one.batch_invariant;
  spec.sm_scale = one.sm_scale;
  spec.seed = seed;
}

kit::SparsePoolSpec pool_spec(const Case& one, CacheFormat format, int64_t topk, int64_t page_size) {
  kit::SparsePoolSpec spec;
  spec.cache = cache_spec(one, format, page_size);
  spec.num_tokens = 1;
  for (const Request& request : one.requests)
    spec.num_tokens = std::max(spec.num_tokens, narrow(request.kv_len, "pool_tokens"));
  spec.topk = narrow(topk, "topk");
  spec.invalid_share = spec.duplicate_share = 0.0;
  return spec;
}

}  // namespace

int64_t pages_needed(const Case& one) {
  int64_t pages = 0;
  int64_t before = 0;
  for (const Request& request : one.requests) {
    const int64_t needed = (request.kv_len + one.page_size - 1) / one.page_size;
    pages += needed - std::min({one.prefix / one.page_size, before, needed});
    before = needed;
  }
  return std::max<int64_t>(pages, 1);
}

kit::DecodeSpec decode_spec(const Case& one, uint64_t seed) {
  kit::DecodeSpec spec;
  set_attention(one, seed, spec);
  spec.q_len = q_lens(one);
  spec.kv_len = kv_lens(one);
  spec.cache = cache_spec(one);
  spec.q_dtype = one.q_dtype;
  spec.causal = one.causal;
  spec.tree = one.tree;
  spec.context_parallel.world = narrow(one.dcp, "dcp");
  if (one.prefix > 0) spec.cache.shared_pages = {narrow(one.prefix / one.page_size, "prefix")};
  spec.shared_prefix = one.shared_prefix;
  return spec;
}

namespace {

kit::FinishSpec finish_spec(const Case& one) {
  kit::FinishSpec spec;
  spec.d_rotary = narrow(std::min<int64_t>(64, one.d_v / 2 * 2), "d_v");
  spec.gate_dtype = one.q_dtype;
  spec.gate = one.gate;
  if (one.out_dtype == DType::kE4M3 && one.d_v % spec.channels_per_scale != 0)
    throw UsageError("{}: expected a d_v of whole groups of {} channels, got {}", name(one.op), spec.channels_per_scale,
                     one.d_v);
  spec.power_of_two_scales = one.scales != Scales::kF32;
  return spec;
}

}  // namespace

kit::DecodeSparseSpec decode_sparse_spec(const Case& one, uint64_t seed) {
  kit::DecodeSparseSpec spec;
  set_attention(one, seed, spec);
  spec.q_len = q_lens(one);
  spec.q_dtype = one.q_dtype;
  spec.pool = pool_spec(one, one.cache, one.topk, one.page_size);
  if (one.extra_topk > 0) spec.extra_pool = pool_spec(one, one.extra_cache, one.extra_topk, one.extra_page_size);
  if (one.finishes) {
    spec.finish = finish_spec(one);
    spec.o_dtype = one.out_dtype;
  }
  return spec;
}

kit::PrefillSpec prefill_spec(const Case& one, uint64_t seed) {
  kit::PrefillSpec spec;
  set_attention(one, seed, spec);
  spec.q_len = q_lens(one);
  spec.kv_len = kv_lens(one);
  spec.d_qk = narrow(one.d_qk, "d_qk");
  spec.d_v = narrow(one.d_v, "d_v");
  spec.dtype = one.q_dtype;
  spec.causal = one.causal;
  spec.poison = false;
  return spec;
}

kit::PrefillSparseSpec prefill_sparse_spec(const Case& one, uint64_t seed) {
  const DType element = kv_layout(one.cache).nope.element;
  if (is_quantized(element)) throw UsageError("prefill_sparse: expected keys of bf16 or f16, got {}", name(one.cache));
  kit::PrefillSparseSpec spec;
  set_attention(one, seed, spec);
  spec.num_tokens = narrow(one.total_queries(), "query tokens");
  spec.num_keys = narrow(std::max<int64_t>(one.total_kv(), 1), "kv_len of all requests");
  spec.d_qk = narrow(one.d_qk, "d_qk");
  spec.d_v = narrow(one.d_v, "d_v");
  spec.q_dtype = one.q_dtype;
  spec.kv_dtype = element;
  spec.topk = narrow(one.topk, "topk");
  spec.invalid_share = spec.duplicate_share = 0.0;
  return spec;
}

kit::MergeSpec merge_spec(const Case& one, uint64_t seed) {
  kit::MergeSpec spec;
  spec.num_states = narrow(one.states, "states");
  spec.num_tokens = narrow(one.total_queries(), "query tokens");
  spec.num_heads = narrow(one.heads, "heads");
  spec.d_v = narrow(one.d_v, "d_v");
  spec.partial_dtype = spec.o_dtype = one.q_dtype;
  spec.empty_share = 0.0;
  spec.seed = seed;
  return spec;
}

kit::AppendSpec append_spec(const Case& one, uint64_t seed) {
  kit::AppendSpec spec;
  spec.num_tokens = narrow(one.total_kv(), "kv_len of all requests");
  spec.num_pages = narrow(pages_needed(one), "pages");
  spec.cache = cache_spec(one);
  spec.dtype = one.q_dtype;
  // Four scales for a token's ckv need to know which part that is.
  spec.split_rows = spec.cache.token_scales;
  spec.cache.two_tensors = spec.cache.token_scales;
  spec.skip_share = 0.0;
  spec.seed = seed;
  return spec;
}

kit::AppendRopeSpec append_rope_spec(const Case& one, uint64_t seed) {
  kit::AppendRopeSpec spec;
  spec.num_tokens = narrow(one.total_kv(), "kv_len of all requests");
  spec.num_heads = narrow(one.heads, "heads");
  spec.num_pages = narrow(pages_needed(one), "pages");
  spec.cache = cache_spec(one);
  spec.cache.two_tensors = spec.cache.token_scales;
  spec.q_dtype = spec.dtype = spec.q_out_dtype = one.q_dtype;
  spec.q_norm = one.norm;
  using Norm = kit::AppendRopeSpec::Norm;
  if (one.norm) spec.norm = kv_layout(one.cache).value_has_rope ? Norm::kRow : Norm::kLatent;
  spec.skip_share = 0.0;
  spec.seed = seed;
  return spec;
}

kit::GatherSpec gather_spec(const Case& one, uint64_t seed) {
  kit::GatherSpec spec;
  spec.kv_len = spec.count = kv_lens(one);
  spec.token_start.assign(spec.kv_len.size(), 0);
  spec.cache = cache_spec(one);
  spec.cache.two_tensors = spec.split_out = spec.cache.token_scales;
  spec.out_dtype = one.q_dtype;
  spec.seed = seed;
  return spec;
}

kit::CopyPagesSpec copy_pages_spec(const Case& one, uint64_t seed) {
  kit::CopyPagesSpec spec;
  spec.from = cache_spec(one);
  spec.to = cache_spec(one, one.to_cache, one.to_page_size);
  if (spec.from.token_scales || spec.to.token_scales) spec.from.two_tensors = spec.to.two_tensors = true;
  const int64_t whole = std::lcm(one.page_size, one.to_page_size);
  spec.num_tokens = narrow(std::max<int64_t>(one.total_kv() / whole, 1) * whole, "kv_len of all requests");
  spec.seed = seed;
  return spec;
}

kit::BlockTableToCsrSpec block_table_to_csr_spec(const Case& one, uint64_t seed) {
  kit::BlockTableToCsrSpec spec;
  spec.kv_len = kv_lens(one);
  spec.page_size = narrow(one.page_size, "page_size");
  spec.garbage_columns = 0;
  spec.seed = seed;
  return spec;
}

kit::PhysicalSlotsSpec physical_slots_spec(const Case& one, uint64_t seed) {
  kit::PhysicalSlotsSpec spec;
  spec.q_len = q_lens(one);
  spec.kv_len = kv_lens(one);
  spec.topk = narrow(one.topk, "topk");
  spec.page_size = narrow(one.page_size, "page_size");
  spec.ratio = narrow(one.ratio, "ratio");
  spec.list_tokens = one.list_tokens;
  spec.invalid_share = 0.0;
  spec.seed = seed;
  return spec;
}

kit::AppendIndexerSpec append_indexer_spec(const Case& one, uint64_t seed) {
  kit::AppendIndexerSpec spec;
  spec.num_tokens = narrow(one.total_kv(), "kv_len of all requests");
  spec.num_pages = narrow(pages_needed(one), "pages");
  spec.page_size = narrow(one.page_size, "page_size");
  spec.dtype = one.q_dtype;
  spec.format = one.indexer_format;
  spec.power_of_two_scales = one.scales != Scales::kF32;
  spec.skip_share = 0.0;
  spec.seed = seed;
  return spec;
}

kit::IndexerLogitsSpec indexer_logits_spec(const Case& one, uint64_t seed) {
  kit::IndexerLogitsSpec spec;
  spec.q_len = q_lens(one);
  spec.kv_len = kv_lens(one);
  spec.num_heads = narrow(one.heads, "heads");
  spec.q_dtype = one.q_dtype;
  spec.format = one.indexer_format;
  spec.page_size = narrow(one.page_size, "page_size");
  spec.causal = one.causal;
  spec.ratio = narrow(one.ratio, "ratio");
  spec.num_blocks = narrow(one.blocks, "blocks");
  spec.block_size = narrow(one.block_size, "block_size");
  spec.compute = one.compute;
  spec.logits_dtype = one.logits_dtype;
  spec.unowned_pages = 0;
  spec.poison = false;
  spec.seed = seed;
  return spec;
}

kit::TopKSpec top_k_spec(const Case& one, uint64_t seed) {
  kit::TopKSpec spec;
  spec.num_tokens = narrow(one.total_queries(), "query tokens");
  spec.num_logits = 1;
  for (const Request& request : one.requests)
    spec.num_logits = std::max(spec.num_logits, narrow(request.kv_len, "kv_len"));
  spec.block_size = narrow(one.block_size, "block_size");
  spec.k = narrow(one.topk, "topk");
  spec.logits_dtype = one.logits_dtype;
  spec.seed = seed;
  return spec;
}

kit::IndexerTopKSpec indexer_top_k_spec(const Case& one, uint64_t seed) {
  kit::IndexerTopKSpec spec;
  spec.indexer = indexer_logits_spec(one, seed);
  spec.topk = narrow(one.topk, "topk");
  spec.list_tokens = one.list_tokens;
  spec.page_size = spec.indexer.page_size;
  return spec;
}

kit::CompressSpec compress_spec(const Case& one, uint64_t seed) {
  kit::CompressSpec spec;
  spec.q_len = q_lens(one);
  spec.kv_len = kv_lens(one);
  spec.ratio = narrow(one.ratio, "ratio");
  spec.overlap = one.overlap;
  spec.dtype = one.q_dtype;
  spec.bias = one.ratio > 2;  // V4.1 has none
  spec.to = one.compress_to;
  spec.indexer_format = one.indexer_format;
  spec.cache = cache_spec(one);
  spec.cache.two_tensors = spec.cache.token_scales;
  spec.power_of_two_scales = one.scales != Scales::kF32;
  // Room for the tokens that a latent needs, and as many drafts.
  const int64_t span = one.ratio * (one.overlap ? 2 : 1);
  spec.block_size = narrow(std::max<int64_t>(one.ratio, 8), "block_size");
  spec.columns = narrow((2 * span + spec.block_size - 1) / spec.block_size, "columns");
  int64_t groups = 0;
  for (const Request& request : one.requests) groups += request.q_len / one.ratio + 1;
  spec.num_pages = narrow((groups + one.page_size - 1) / one.page_size, "pages");
  spec.skip_share = 0.0;
  spec.seed = seed;
  if (one.append) {
    Case window = one;
    window.cache = *one.append;
    window.heads = 0;
    window.norm = true;
    window.q_dtype = DType::kBF16;  // whatever the type of the tokens that are pooled
    for (Request& request : window.requests) request.kv_len = request.q_len;  // only new tokens are appended
    const KvLayout layout = kv_layout(window.cache);
    window.d_qk = layout.is_packed() ? layout.nope_dim + layout.rope_dim : 512 + 64;
    window.d_v = layout.value_has_rope ? window.d_qk : 512;
    window.scales = Scales::kPowersOfTwo;
    spec.append = append_rope_spec(window, seed);
  }
  return spec;
}

kit::FinishOutputSpec finish_output_spec(const Case& one, uint64_t seed) {
  kit::FinishOutputSpec spec;
  spec.num_tokens = narrow(one.total_queries(), "query tokens");
  spec.num_heads = narrow(one.heads, "heads");
  spec.d_v = narrow(one.d_v, "d_v");
  spec.dtype = one.q_dtype;
  spec.out_dtype = one.out_dtype;
  spec.seed = seed;
  static_cast<kit::FinishSpec&>(spec) = finish_spec(one);
  return spec;
}

}  // namespace mla::bench
