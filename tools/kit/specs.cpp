// SPDX-License-Identifier: Apache-2.0
#include "kit/specs.h"

#include <algorithm>
#include <cmath>
#include <sstream>

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

/// Collects "name=value"; `knob` leaves out what is at its default.
class Line {
 public:
  template <class T>
  Line& always(const char* knob_name, const T& value) {
    if (!line_.empty()) line_ += ' ';
    line_.append(knob_name).append("=").append(text(value));
    return *this;
  }
  template <class T>
  Line& knob(const char* knob_name, const T& value, const T& usual) {
    return value == usual ? *this : always(knob_name, value);
  }
  std::string take() { return std::move(line_); }

 private:
  std::string line_;
};

void add_cache(Line& line, const CacheSpec& spec) {
  const CacheSpec usual;
  line.always("cache", spec.format)
      .always("d_qk", spec.d_qk)
      .always("d_v", spec.d_v)
      .always("page_size", spec.page_size)
      .knob("two_tensors", spec.two_tensors, usual.two_tensors)
      .knob("block_table", spec.block_table, usual.block_table)
      .knob("garbage_table_tail", spec.garbage_table_tail, usual.garbage_table_tail)
      .knob("shuffled_pages", spec.shuffled_pages, usual.shuffled_pages)
      .knob("unowned_pages", spec.unowned_pages, usual.unowned_pages)
      .knob("page_stride_extra", spec.page_stride_extra, usual.page_stride_extra)
      .knob("token_stride_extra", spec.token_stride_extra, usual.token_stride_extra)
      .knob("poison", spec.poison, usual.poison);
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
  const DecodeSpec usual;
  Line line;
  line.always("seed", spec.seed)
      .always("q_len", spec.q_len)
      .always("kv_len", spec.kv_len)
      .always("num_heads", spec.num_heads);
  add_cache(line, spec.cache);
  return line.always("q_dtype", spec.q_dtype)
      .always("o_dtype", spec.o_dtype)
      .knob("split_q", spec.split_q, usual.split_q)
      .knob("omit_qo_indptr", spec.omit_qo_indptr, usual.omit_qo_indptr)
      .knob("causal", spec.causal, usual.causal)
      .knob("want_lse", spec.want_lse, usual.want_lse)
      .knob("lse_base", spec.lse_base, usual.lse_base)
      .knob("batch_invariant", spec.batch_invariant, usual.batch_invariant)
      .knob("sm_scale", spec.sm_scale, usual.sm_scale)
      .knob("score_std", spec.score_std, usual.score_std)
      .knob("q_head_extra", spec.q_head_extra, usual.q_head_extra)
      .knob("q_token_extra", spec.q_token_extra, usual.q_token_extra)
      .knob("o_head_extra", spec.o_head_extra, usual.o_head_extra)
      .knob("o_token_extra", spec.o_token_extra, usual.o_token_extra)
      .knob("lse_token_extra", spec.lse_token_extra, usual.lse_token_extra)
      .knob("workspace_misalign", spec.workspace_misalign, usual.workspace_misalign)
      .take();
}

std::string describe(const PrefillSpec& spec) {
  const PrefillSpec usual;
  return Line()
      .always("seed", spec.seed)
      .always("q_len", spec.q_len)
      .always("kv_len", spec.kv_len)
      .always("num_heads", spec.num_heads)
      .always("d_qk", spec.d_qk)
      .always("d_v", spec.d_v)
      .always("dtype", spec.dtype)
      .always("o_dtype", spec.o_dtype)
      .knob("causal", spec.causal, usual.causal)
      .knob("want_lse", spec.want_lse, usual.want_lse)
      .knob("lse_base", spec.lse_base, usual.lse_base)
      .knob("batch_invariant", spec.batch_invariant, usual.batch_invariant)
      .knob("sm_scale", spec.sm_scale, usual.sm_scale)
      .knob("score_std", spec.score_std, usual.score_std)
      .knob("q_head_extra", spec.q_head_extra, usual.q_head_extra)
      .knob("q_token_extra", spec.q_token_extra, usual.q_token_extra)
      .knob("k_head_extra", spec.k_head_extra, usual.k_head_extra)
      .knob("k_token_extra", spec.k_token_extra, usual.k_token_extra)
      .knob("v_head_extra", spec.v_head_extra, usual.v_head_extra)
      .knob("v_token_extra", spec.v_token_extra, usual.v_token_extra)
      .knob("o_head_extra", spec.o_head_extra, usual.o_head_extra)
      .knob("o_token_extra", spec.o_token_extra, usual.o_token_extra)
      .knob("lse_token_extra", spec.lse_token_extra, usual.lse_token_extra)
      .knob("poison", spec.poison, usual.poison)
      .knob("workspace_misalign", spec.workspace_misalign, usual.workspace_misalign)
      .take();
}

std::string describe(const MergeSpec& spec) {
  const MergeSpec usual;
  return Line()
      .always("seed", spec.seed)
      .always("num_states", spec.num_states)
      .always("num_tokens", spec.num_tokens)
      .always("num_heads", spec.num_heads)
      .always("d_v", spec.d_v)
      .always("partial_dtype", spec.partial_dtype)
      .always("o_dtype", spec.o_dtype)
      .knob("lse_base", spec.lse_base, usual.lse_base)
      .knob("in_place", spec.in_place, usual.in_place)
      .knob("want_lse", spec.want_lse, usual.want_lse)
      .knob("empty_share", spec.empty_share, usual.empty_share)
      .knob("lse_std", spec.lse_std, usual.lse_std)
      .knob("partial_state_extra", spec.partial_state_extra, usual.partial_state_extra)
      .knob("partial_token_extra", spec.partial_token_extra, usual.partial_token_extra)
      .knob("partial_head_extra", spec.partial_head_extra, usual.partial_head_extra)
      .knob("o_token_extra", spec.o_token_extra, usual.o_token_extra)
      .knob("o_head_extra", spec.o_head_extra, usual.o_head_extra)
      .take();
}

std::string describe(const AppendSpec& spec) {
  const AppendSpec usual;
  Line line;
  line.always("seed", spec.seed).always("num_tokens", spec.num_tokens).always("num_pages", spec.num_pages);
  add_cache(line, spec.cache);
  return line.always("dtype", spec.dtype)
      .knob("split_rows", spec.split_rows, usual.split_rows)
      .knob("skip_share", spec.skip_share, usual.skip_share)
      .knob("row_extra", spec.row_extra, usual.row_extra)
      .take();
}

std::string describe(const GatherSpec& spec) {
  const GatherSpec usual;
  Line line;
  line.always("seed", spec.seed)
      .always("kv_len", spec.kv_len)
      .always("token_start", spec.token_start)
      .always("count", spec.count);
  add_cache(line, spec.cache);
  return line.always("out_dtype", spec.out_dtype)
      .knob("omit_token_start", spec.omit_token_start, usual.omit_token_start)
      .knob("split_out", spec.split_out, usual.split_out)
      .knob("row_extra", spec.row_extra, usual.row_extra)
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
