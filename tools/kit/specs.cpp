// SPDX-License-Identifier: Apache-2.0
#include "kit/specs.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string_view>
#include <utility>

#include "kit/paged_memory.h"

namespace mla::kit {
namespace {

std::string text(bool value) { return value ? "1" : "0"; }
std::string text(int32_t value) { return std::to_string(value); }
std::string text(int64_t value) { return std::to_string(value); }
std::string text(uint64_t value) { return std::to_string(value); }
std::string text(DType value) { return std::string(name(value)); }
std::string text(CacheFormat value) { return std::string(name(value)); }
std::string text(LseBase value) { return value == LseBase::kTwo ? "two" : "e"; }
std::string text(double value) {
  std::ostringstream out;
  out << value;
  return out.str();
}
std::string text(float value) { return text(static_cast<double>(value)); }
std::string text(const std::vector<int32_t>& values) {
  constexpr size_t kShown = 64;
  std::string list = "[";
  for (size_t i = 0; i < std::min(values.size(), kShown); ++i) {
    if (i != 0) list += ',';
    list += std::to_string(values[i]);
  }
  if (values.size() > kShown) list.append(",... ").append(std::to_string(values.size())).append(" in all");
  return list += ']';
}

/// "name=value" of a spec's fields; `knob` leaves out what is at its default.
template <class Spec>
class Line {
 public:
  explicit Line(const Spec& spec) : spec_(spec) {}

  template <class T>
  Line& always(const char* name, T Spec::*field) {
    return append(std::string(name).append("=").append(text(spec_.*field)));
  }
  template <class T>
  Line& knob(const char* name, T Spec::*field) {
    return spec_.*field == usual_.*field ? *this : always(name, field);
  }
  Line& append(std::string_view part) {
    if (!line_.empty()) line_ += ' ';
    line_ += part;
    return *this;
  }
  std::string take() { return std::move(line_); }

 private:
  const Spec& spec_;
  const Spec usual_ = {};
  std::string line_;
};

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
      .knob("page_stride_extra", &CacheSpec::page_stride_extra)
      .knob("token_stride_extra", &CacheSpec::token_stride_extra)
      .knob("poison", &CacheSpec::poison)
      .take();
}

/// What decode and prefill have in common, beyond the shape.
template <class Spec>
std::string describe_attention(const Spec& spec) {
  return Line(spec)
      .always("o_dtype", &Spec::o_dtype)
      .knob("causal", &Spec::causal)
      .knob("want_lse", &Spec::want_lse)
      .knob("lse_base", &Spec::lse_base)
      .knob("batch_invariant", &Spec::batch_invariant)
      .knob("sm_scale", &Spec::sm_scale)
      .knob("score_std", &Spec::score_std)
      .knob("q_head_extra", &Spec::q_head_extra)
      .knob("q_token_extra", &Spec::q_token_extra)
      .knob("o_head_extra", &Spec::o_head_extra)
      .knob("o_token_extra", &Spec::o_token_extra)
      .knob("lse_token_extra", &Spec::lse_token_extra)
      .knob("workspace_misalign", &Spec::workspace_misalign)
      .take();
}

/// Query-key pairs that see each other, of one head.
template <class Spec>
double visible_pairs(const Spec& spec) {
  double pairs = 0;
  for (size_t request = 0; request < spec.kv_len.size(); ++request) {
    const int64_t q_len = spec.q_len_of(request), kv_len = spec.kv_len[request];
    if (!spec.causal) {
      pairs += static_cast<double>(q_len * kv_len);
      continue;
    }
    const int64_t with_keys = std::min(q_len, kv_len);  // the last of them sees all keys, each before it one less
    const int64_t unseen = with_keys * (with_keys - 1) / 2;
    pairs += static_cast<double>(with_keys * kv_len - unseen);
  }
  return pairs;
}

template <class Spec>
int64_t total_queries(const Spec& spec) {
  int64_t total = 0;
  for (size_t request = 0; request < spec.kv_len.size(); ++request) total += spec.q_len_of(request);
  return total;
}

double total(const std::vector<int32_t>& values) {
  double sum = 0;
  for (int32_t value : values) sum += value;
  return sum;
}

double bytes_of(DType dtype) { return static_cast<double>(size_of(dtype)); }

}  // namespace

float DecodeSpec::effective_sm_scale() const {
  return sm_scale != 0 ? sm_scale : 1.0F / std::sqrt(static_cast<float>(128 + cache.d_qk - cache.d_v));
}

float PrefillSpec::effective_sm_scale() const {
  return sm_scale != 0 ? sm_scale : 1.0F / std::sqrt(static_cast<float>(d_qk));
}

std::string describe(const DecodeSpec& spec) {
  using Spec = DecodeSpec;
  return Line(spec)
      .always("seed", &Spec::seed)
      .always("q_len", &Spec::q_len)
      .always("kv_len", &Spec::kv_len)
      .always("num_heads", &Spec::num_heads)
      .append(describe(spec.cache))
      .always("q_dtype", &Spec::q_dtype)
      .append(describe_attention(spec))
      .knob("split_q", &Spec::split_q)
      .knob("omit_qo_indptr", &Spec::omit_qo_indptr)
      .take();
}

std::string describe(const PrefillSpec& spec) {
  using Spec = PrefillSpec;
  return Line(spec)
      .always("seed", &Spec::seed)
      .always("q_len", &Spec::q_len)
      .always("kv_len", &Spec::kv_len)
      .always("num_heads", &Spec::num_heads)
      .always("d_qk", &Spec::d_qk)
      .always("d_v", &Spec::d_v)
      .always("dtype", &Spec::dtype)
      .append(describe_attention(spec))
      .knob("k_head_extra", &Spec::k_head_extra)
      .knob("k_token_extra", &Spec::k_token_extra)
      .knob("v_head_extra", &Spec::v_head_extra)
      .knob("v_token_extra", &Spec::v_token_extra)
      .knob("poison", &Spec::poison)
      .take();
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
      .knob("o_token_extra", &Spec::o_token_extra)
      .knob("o_head_extra", &Spec::o_head_extra)
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
      .knob("row_extra", &Spec::row_extra)
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

Problem problem_of(const DecodeSpec& spec) {
  return {.op = Op::kDecode,
          .device = {},
          .q_dtype = spec.q_dtype,
          .cache = spec.cache.format,
          .num_heads = spec.num_heads,
          .d_qk = spec.cache.d_qk,
          .d_v = spec.cache.d_v};
}

Problem problem_of(const PrefillSpec& spec) {
  return {.op = Op::kPrefill,
          .device = {},
          .q_dtype = spec.dtype,
          .cache = {},
          .num_heads = spec.num_heads,
          .d_qk = spec.d_qk,
          .d_v = spec.d_v};
}

Problem problem_of(const MergeSpec& spec) {
  return {.op = Op::kMergeStates,
          .device = {},
          .q_dtype = spec.partial_dtype,
          .cache = {},
          .num_heads = spec.num_heads,
          .d_qk = spec.d_v,
          .d_v = spec.d_v};
}

Problem problem_of(const AppendSpec& spec) {
  return {.op = Op::kAppend,
          .device = {},
          .q_dtype = spec.dtype,
          .cache = spec.cache.format,
          .num_heads = 1,
          .d_qk = spec.cache.d_qk,
          .d_v = spec.cache.d_v};
}

Problem problem_of(const GatherSpec& spec) {
  return {.op = Op::kGather,
          .device = {},
          .q_dtype = spec.out_dtype,
          .cache = spec.cache.format,
          .num_heads = 1,
          .d_qk = spec.cache.d_qk,
          .d_v = spec.cache.d_v};
}

Work work_of(const DecodeSpec& spec) {
  const double rows = static_cast<double>(total_queries(spec)) * spec.num_heads;
  const double d_qk = spec.cache.d_qk, d_v = spec.cache.d_v;
  return {.flops = 2 * visible_pairs(spec) * spec.num_heads * (d_qk + d_v),
          .bytes = total(spec.kv_len) * static_cast<double>(row_bytes(spec.cache.format, spec.cache.d_qk)) +
                   rows * (d_qk * bytes_of(spec.q_dtype) + d_v * bytes_of(spec.o_dtype) + (spec.want_lse ? 4 : 0))};
}

Work work_of(const PrefillSpec& spec) {
  const double rows = static_cast<double>(total_queries(spec)) * spec.num_heads;
  const double keys = total(spec.kv_len) * spec.num_heads;
  const double d_qk = spec.d_qk, d_v = spec.d_v;
  return {.flops = 2 * visible_pairs(spec) * spec.num_heads * (d_qk + d_v),
          .bytes = keys * (d_qk + d_v) * bytes_of(spec.dtype) +
                   rows * (d_qk * bytes_of(spec.dtype) + d_v * bytes_of(spec.o_dtype) + (spec.want_lse ? 4 : 0))};
}

Work work_of(const MergeSpec& spec) {
  const double rows = static_cast<double>(spec.num_tokens) * spec.num_heads;
  const double reads = spec.num_states * (spec.d_v * bytes_of(spec.partial_dtype) + 4);
  const double state = spec.d_v * bytes_of(spec.o_dtype) + (spec.want_lse ? 4 : 0);
  return {.flops = 0, .bytes = rows * (reads + state * (spec.in_place ? 2 : 1))};
}

Work work_of(const AppendSpec& spec) {
  const double row = spec.cache.d_qk * (bytes_of(spec.dtype) + bytes_of(dtype_of(spec.cache.format)));
  return {.flops = 0, .bytes = spec.num_tokens * (1 - spec.skip_share) * row + spec.num_tokens * 8.0};
}

Work work_of(const GatherSpec& spec) {
  const double row = spec.cache.d_qk * (bytes_of(spec.out_dtype) + bytes_of(dtype_of(spec.cache.format)));
  return {.flops = 0, .bytes = total(spec.count) * row};
}

}  // namespace mla::kit
