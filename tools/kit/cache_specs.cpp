// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <vector>

#include "kit/paged_memory.h"
#include "kit/spec_line.h"
#include "kit/specs.h"

namespace mla::kit {

int32_t CacheSpec::d_ckv() const {
  const KvLayout layout = kv_layout(format);
  return layout.nope_dim != 0 ? layout.nope_dim : d_v;
}

namespace {

template <class Belongs>
std::vector<CacheFormat> formats_that(const Belongs& belongs) {
  std::vector<CacheFormat> list;
  std::ranges::copy_if(kAllCacheFormats, std::back_inserter(list), belongs);
  return list;
}

}  // namespace

std::span<const CacheFormat> tensor_formats() {
  static const std::vector<CacheFormat> formats =
      formats_that([](CacheFormat format) { return !kv_layout(format).is_packed(); });
  return formats;
}

std::vector<CacheFormat> formats_like(CacheFormat format) {
  const KvLayout layout = kv_layout(format);
  return formats_that([&](CacheFormat other) {
    const KvLayout of_other = kv_layout(other);
    return of_other.nope_dim == layout.nope_dim && of_other.rope_dim == layout.rope_dim;
  });
}

CacheSpec usual_cache(CacheFormat format) {
  CacheSpec spec;
  spec.format = format;
  const KvLayout layout = kv_layout(format);
  if (layout.nope_dim != 0) spec.d_qk = layout.nope_dim + layout.rope_dim;
  if (layout.value_has_rope) spec.d_v = spec.d_qk;
  if (layout.nope.outer_scale) spec.outer_scale = 0.0037F;
  return spec;
}

std::string describe(const CacheSpec& spec) {
  return Line(spec)
      .always("cache", &CacheSpec::format)
      .always("d_qk", &CacheSpec::d_qk)
      .always("d_v", &CacheSpec::d_v)
      .always("page_size", &CacheSpec::page_size)
      .knob("two_tensors", &CacheSpec::two_tensors)
      .knob("block_table", &CacheSpec::block_table)
      .knob("garbage_table_tail", &CacheSpec::garbage_table_tail)
      .knob("shuffled_pages", &CacheSpec::shuffled_pages)
      .knob("unowned_pages", &CacheSpec::unowned_pages)
      .knob("shared_pages", &CacheSpec::shared_pages)
      .knob("page_stride_extra", &CacheSpec::page_stride_extra)
      .knob("token_stride_extra", &CacheSpec::token_stride_extra)
      .knob("scale_page_extra", &CacheSpec::scale_page_extra)
      .knob("scale_token_extra", &CacheSpec::scale_token_extra)
      .knob("table_row_extra", &CacheSpec::table_row_extra)
      .knob("poison", &CacheSpec::poison)
      .knob("token_scales", &CacheSpec::token_scales)
      .knob("own_kpe_scale", &CacheSpec::own_kpe_scale)
      .knob("tensor_scale", &CacheSpec::tensor_scale)
      .knob("kpe_scale", &CacheSpec::kpe_scale)
      .knob("outer_scale", &CacheSpec::outer_scale)
      .knob("power_of_two_scales", &CacheSpec::power_of_two_scales)
      .knob("few_long_scales", &CacheSpec::few_long_scales)
      .knob("padded_pages", &CacheSpec::padded_pages)
      .knob("uneven_rows", &CacheSpec::uneven_rows)
      .take();
}

double cache_row_bytes(const CacheSpec& spec) {
  const KvLayout layout = kv_layout(spec.format);
  double bytes = static_cast<double>(row_bytes(spec.format, spec.d_qk));
  if (layout.has_footer()) bytes += layout.scale_bytes_per_token;
  if (spec.token_scales) bytes += kTensorScalesPerToken * size_of(layout.nope.scale_type);
  return bytes;
}

std::string describe(const MergeSpec& spec) {
  using Spec = MergeSpec;
  return Line(spec)
      .always("seed", &Spec::seed)
      .always("num_states", &Spec::num_states)
      .always("num_tokens", &Spec::num_tokens)
      .always("num_heads", &Spec::num_heads)
      .always("d_v", &Spec::d_v)
      .always("partial_dtype", &Spec::partial_dtype)
      .always("o_dtype", &Spec::o_dtype)
      .knob("lse_base", &Spec::lse_base)
      .knob("in_place", &Spec::in_place)
      .knob("want_lse", &Spec::want_lse)
      .knob("empty_share", &Spec::empty_share)
      .knob("lse_std", &Spec::lse_std)
      .knob("partial_state_extra", &Spec::partial_state_extra)
      .knob("partial_token_extra", &Spec::partial_token_extra)
      .knob("partial_head_extra", &Spec::partial_head_extra)
      .knob("partial_lse_state_extra", &Spec::partial_lse_state_extra)
      .knob("partial_lse_token_extra", &Spec::partial_lse_token_extra)
      .knob("partial_lse_head_extra", &Spec::partial_lse_head_extra)
      .knob("o_token_extra", &Spec::o_token_extra)
      .knob("o_head_extra", &Spec::o_head_extra)
      .knob("lse_token_extra", &Spec::lse_token_extra)
      .knob("lse_head_extra", &Spec::lse_head_extra)
      .take();
}

std::string describe(const AppendSpec& spec) {
  using Spec = AppendSpec;
  return Line(spec)
      .always("seed", &Spec::seed)
      .always("num_tokens", &Spec::num_tokens)
      .always("num_pages", &Spec::num_pages)
      .append(describe(spec.cache))
      .always("dtype", &Spec::dtype)
      .knob("split_rows", &Spec::split_rows)
      .knob("skip_share", &Spec::skip_share)
      .knob("special_share", &Spec::special_share)
      .knob("row_extra", &Spec::row_extra)
      .take();
}

std::string describe(const AppendRopeSpec& spec) {
  using Spec = AppendRopeSpec;
  return Line(spec)
      .always("seed", &Spec::seed)
      .always("num_tokens", &Spec::num_tokens)
      .always("num_heads", &Spec::num_heads)
      .always("num_pages", &Spec::num_pages)
      .append(describe(spec.cache))
      .always("q_dtype", &Spec::q_dtype)
      .always("q_out_dtype", &Spec::q_out_dtype)
      .always("dtype", &Spec::dtype)
      .knob("q_scale", &Spec::q_scale)
      .knob("interleaved", &Spec::interleaved)
      .knob("max_positions", &Spec::max_positions)
      .append(spec.norm == Spec::Norm::kNone     ? ""
              : spec.norm == Spec::Norm::kLatent ? "norm=latent"
                                                 : "norm=row")
      .knob("q_norm", &Spec::q_norm)
      .knob("q_norm_weight", &Spec::q_norm_weight)
      .knob("norm_dtype", &Spec::norm_dtype)
      .knob("skip_share", &Spec::skip_share)
      .knob("special_share", &Spec::special_share)
      .knob("q_head_extra", &Spec::q_head_extra)
      .knob("q_token_extra", &Spec::q_token_extra)
      .knob("q_out_head_extra", &Spec::q_out_head_extra)
      .knob("q_out_token_extra", &Spec::q_out_token_extra)
      .knob("row_extra", &Spec::row_extra)
      .knob("cos_sin_extra", &Spec::cos_sin_extra)
      .take();
}

std::string describe(const GatherSpec& spec) {
  using Spec = GatherSpec;
  return Line(spec)
      .always("seed", &Spec::seed)
      .always("kv_len", &Spec::kv_len)
      .always("token_start", &Spec::token_start)
      .always("count", &Spec::count)
      .append(describe(spec.cache))
      .always("out_dtype", &Spec::out_dtype)
      .knob("omit_token_start", &Spec::omit_token_start)
      .knob("split_out", &Spec::split_out)
      .knob("row_extra", &Spec::row_extra)
      .take();
}

std::string describe(const CopyPagesSpec& spec) {
  return Line(spec)
      .always("seed", &CopyPagesSpec::seed)
      .always("num_tokens", &CopyPagesSpec::num_tokens)
      .append("from: " + describe(spec.from) + "; to: " + describe(spec.to))
      .take();
}

namespace {

/// Returns the problem that `explain` judges for an operation that moves rows.
Problem rows_problem(Op op, DType dtype, const CacheSpec& cache, int64_t num_heads) {
  return {.op = op,
          .device = {},
          .q_dtype = dtype,
          .cache = cache.format,
          .num_heads = num_heads,
          .d_qk = cache.d_qk,
          .d_v = cache.d_ckv()};
}

}  // namespace

Problem problem_of(const MergeSpec& spec) {
  return {.op = Op::kMergeStates,
          .device = {},
          .q_dtype = spec.partial_dtype,
          .cache = {},
          .num_heads = spec.num_heads,
          .d_qk = spec.d_v,
          .d_v = spec.d_v};
}

Problem problem_of(const AppendSpec& spec) { return rows_problem(Op::kAppend, spec.dtype, spec.cache, 1); }
Problem problem_of(const GatherSpec& spec) { return rows_problem(Op::kGather, spec.out_dtype, spec.cache, 1); }
Problem problem_of(const AppendRopeSpec& spec) {
  return rows_problem(Op::kAppendRope, spec.dtype, spec.cache, std::max(spec.num_heads, 1));
}
Problem problem_of(const CopyPagesSpec& spec) { return rows_problem(Op::kCopyPages, DType::kBF16, spec.to, 1); }

Work work_of(const MergeSpec& spec) {
  const double rows = static_cast<double>(spec.num_tokens) * spec.num_heads;
  const double reads = spec.num_states * (spec.d_v * bytes_of(spec.partial_dtype) + 4);
  const double state = spec.d_v * bytes_of(spec.o_dtype) + (spec.want_lse ? 4 : 0);
  return {.flops = 0, .bytes = rows * (reads + state * (spec.in_place ? 2 : 1))};
}

Work work_of(const AppendSpec& spec) {
  const double row = spec.cache.d_qk * bytes_of(spec.dtype) + cache_row_bytes(spec.cache);
  return {.flops = 0, .bytes = spec.num_tokens * (1 - spec.skip_share) * row + spec.num_tokens * 8.0};
}

Work work_of(const AppendRopeSpec& spec) {
  const double key = spec.cache.d_qk * bytes_of(spec.dtype) + (1 - spec.skip_share) * cache_row_bytes(spec.cache);
  const double query = spec.num_heads * spec.cache.d_qk * (bytes_of(spec.q_dtype) + bytes_of(spec.q_out_dtype));
  return {.flops = 0, .bytes = spec.num_tokens * (key + query + spec.cache.d_rotary() * 4.0 + 16)};
}

Work work_of(const GatherSpec& spec) {
  return {.flops = 0,
          .bytes = total(spec.count) * (spec.cache.d_qk * bytes_of(spec.out_dtype) + cache_row_bytes(spec.cache))};
}

Work work_of(const CopyPagesSpec& spec) {
  return {.flops = 0, .bytes = spec.num_tokens * (cache_row_bytes(spec.from) + cache_row_bytes(spec.to))};
}

}  // namespace mla::kit
