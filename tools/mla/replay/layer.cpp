// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/layer.h"

#include <algorithm>
#include <numeric>

namespace mla::cli::replay {
namespace {

template <class F>
auto timed(Recorder* recorder, Phase phase, F&& f) {
  if (recorder == nullptr) return f();
  return recorder->time(phase, std::forward<F>(f));
}

TensorView ints(const std::vector<int32_t>& values) {
  return contiguous(values.data(), DType::kI32, {std::ssize(values)});
}

DType cache_dtype(CacheFormat format) { return format == CacheFormat::kF16 ? DType::kF16 : DType::kBF16; }

// Keys that the queries of one request see, added up.
double visible_pairs(int64_t queries, int64_t keys, bool causal) {
  const auto q = static_cast<double>(queries), k = static_cast<double>(keys);
  return causal ? q * (k - q) + q * (q + 1) / 2 : q * k;
}

}  // namespace

TensorView slice(TensorView view, int32_t dim, int64_t begin, int64_t count) {
  const auto d = static_cast<size_t>(dim);
  view.data = static_cast<std::byte*>(view.data) + begin * view.stride[d] * static_cast<int64_t>(size_of(view.dtype));
  view.shape[d] = count;
  return view;
}

Layer::Layer(const LayerOptions& options, const Context& context, Projector& projector, const std::atomic<bool>& stop)
    : options_(options), context_(context), projector_(projector), stop_(stop) {
  const ModelConfig& model = options.model;
  const auto bytes = static_cast<int64_t>(size_of(options.dtype));
  const int64_t rows = Projector::padded_rows(options.chunk), heads = model.num_attention_heads;
  const auto buffer = [](int64_t size) { return bench::Buffer(static_cast<size_t>(size), /*huge_pages=*/true); };
  cache_memory_ = buffer(options.num_pages * page_bytes(options.cache, model.d_qk(), options.page_size, false));
  latents_ = buffer(rows * model.d_qk() * bytes);
  keys_ = buffer(rows * heads * model.prefill_d_qk() * bytes);
  values_ = buffer(rows * heads * model.v_head_dim * bytes);
  partial_o_ = buffer(int64_t{options.chunk} * heads * model.v_head_dim * 4);
  partial_lse_ = buffer(int64_t{options.chunk} * heads * 4);

  const DType dtype = cache_dtype(options.cache);
  const TensorView rows_view =
      contiguous(cache_memory_.data(), dtype, {options.num_pages, options.page_size, model.d_qk()});
  cache_.format = options.cache;
  cache_.kv = rows_view;
}

Status Layer::append(const void* latents, std::span<const int64_t> slots, Recorder* recorder) {
  const int64_t count = std::ssize(slots);
  AppendParams params;
  params.kv = contiguous(latents, options_.dtype, {count, options_.model.d_qk()});
  params.slot_mapping = contiguous(slots.data(), DType::kI64, {count});
  params.cache = cache_;
  return timed(recorder, Phase::kAppend, [&] { return run(context_, params); });
}

PageTable Layer::page_table(std::span<const TokenRange> ranges) {
  table_indptr_.assign(1, 0);
  table_.clear();
  lengths_.clear();
  for (const TokenRange& range : ranges) {
    const int32_t length = range.start + range.count;
    const int32_t pages = (length + options_.page_size - 1) / options_.page_size;
    table_.insert(table_.end(), range.pages.begin(), range.pages.begin() + pages);
    table_indptr_.push_back(static_cast<int32_t>(table_.size()));
    lengths_.push_back(length);
  }
  return {.kv_indptr = ints(table_indptr_), .kv_indices = ints(table_), .block_table = {}, .kv_len = ints(lengths_)};
}

// Keys and values of token ranges, one behind the other, into keys_ and values_.
Status Layer::load_keys(std::span<const TokenRange> ranges, Heads heads, Recorder* recorder) {
  GatherParams params;
  timed(recorder, Phase::kPlan, [&] {
    out_indptr_.assign(1, 0);
    starts_.clear();
    for (const TokenRange& range : ranges) {
      out_indptr_.push_back(out_indptr_.back() + range.count);
      starts_.push_back(range.start);
    }
    params.cache = cache_;
    params.pages = page_table(ranges);
    params.token_start = ints(starts_);
    params.out_indptr = ints(out_indptr_);
    params.out_kv = contiguous(latents_.data(), options_.dtype, {out_indptr_.back(), options_.model.d_qk()});
  });
  const int64_t rows = out_indptr_.back();
  if (Status status = timed(recorder, Phase::kGather, [&] { return run(context_, params); }); !status.ok())
    return status;
  timed(recorder, Phase::kUpProjection,
        [&] { projector_.keys_values(latents_.data(), rows, heads, keys_.data(), values_.data()); });
  if (recorder != nullptr)
    recorder->add_projection_flops(static_cast<double>(rows * heads.count) * projector_.keys_values_flops());
  return {};
}

Status Layer::attend(const TensorView& q, std::span<const int32_t> qo_indptr, std::span<const int32_t> kv_indptr,
                     Heads heads, bool causal, const TensorView& o, const TensorView& lse, Recorder* recorder) {
  const ModelConfig& model = options_.model;
  const int64_t keys = kv_indptr.back(), all_heads = model.num_attention_heads;
  PrefillParams params;
  params.q = q;
  params.k = slice(contiguous(keys_.data(), options_.dtype, {keys, all_heads, model.prefill_d_qk()}), 1, heads.begin,
                   heads.count);
  params.v = slice(contiguous(values_.data(), options_.dtype, {keys, all_heads, model.v_head_dim}), 1, heads.begin,
                   heads.count);
  params.qo_indptr = contiguous(qo_indptr.data(), DType::kI32, {std::ssize(qo_indptr)});
  params.kv_indptr = contiguous(kv_indptr.data(), DType::kI32, {std::ssize(kv_indptr)});
  params.causal = causal;
  params.sm_scale = model.sm_scale();
  params.o = o;
  params.lse = lse;
  const auto planned = timed(recorder, Phase::kPlan, [&]() -> Result<Plan> {
    const auto bytes = workspace_size(context_, params);
    if (!bytes.ok()) return bytes.status();
    return plan(context_, params, workspace_.reserve(*bytes));
  });
  if (!planned.ok()) return planned.status();
  Status status = timed(recorder, Phase::kPrefillAttention, [&] { return run(context_, *planned, params); });
  if (recorder == nullptr) return status;
  double pairs = 0.0;
  for (size_t i = 0; i + 1 < qo_indptr.size(); ++i)
    pairs += visible_pairs(qo_indptr[i + 1] - qo_indptr[i], kv_indptr[i + 1] - kv_indptr[i], causal);
  recorder->add_prefill_flops(2.0 * pairs * heads.count * (model.prefill_d_qk() + model.v_head_dim));
  return status;
}

Status Layer::prefill(const TensorView& q, std::span<const TokenRange> fresh, Heads heads, const TensorView& o,
                      const TensorView& lse, Recorder* recorder) {
  std::vector<int32_t> indptr = {0};
  for (const TokenRange& range : fresh) indptr.push_back(indptr.back() + range.count);
  if (Status status = load_keys(fresh, heads, recorder); !status.ok()) return status;
  if (Status status = attend(q, indptr, indptr, heads, /*causal=*/true, o, lse, recorder); !status.ok()) return status;
  for (size_t i = 0; i < fresh.size(); ++i) {
    const int64_t first = indptr[i], count = fresh[i].count;
    for (int32_t start = 0; start < fresh[i].start; start += options_.chunk) {
      cut_short_ = stop_;
      if (cut_short_) return {};
      const TokenRange context{
          .pages = fresh[i].pages, .start = start, .count = std::min(options_.chunk, fresh[i].start - start)};
      Status status = merge_context(slice(q, 0, first, count), context, heads, slice(o, 0, first, count),
                                    slice(lse, 0, first, count), recorder);
      if (!status.ok()) return status;
    }
  }
  return {};
}

// The part of the softmax over one range of earlier tokens, which all queries see.
Status Layer::merge_context(const TensorView& q, const TokenRange& context, Heads heads, const TensorView& o,
                            const TensorView& lse, Recorder* recorder) {
  if (Status status = load_keys(std::span(&context, 1), heads, recorder); !status.ok()) return status;
  const int64_t queries = q.shape[0], v_dim = options_.model.v_head_dim;
  const int32_t qo_indptr[] = {0, static_cast<int32_t>(queries)}, kv_indptr[] = {0, context.count};
  const TensorView partial_o = contiguous(partial_o_.data(), DType::kF32, {queries, heads.count, v_dim});
  const TensorView partial_lse = contiguous(partial_lse_.data(), DType::kF32, {queries, heads.count});
  Status status = attend(q, qo_indptr, kv_indptr, heads, /*causal=*/false, partial_o, partial_lse, recorder);
  if (!status.ok()) return status;
  MergeStatesParams merge;
  merge.partial_o = contiguous(partial_o_.data(), DType::kF32, {1, queries, heads.count, v_dim});
  merge.partial_lse = contiguous(partial_lse_.data(), DType::kF32, {1, queries, heads.count});
  merge.in_place = true;
  merge.o = o;
  merge.lse = lse;
  return timed(recorder, Phase::kMerge, [&] { return run(context_, merge); });
}

Status Layer::decode(const Context& context, const TensorView& q_nope, const TensorView& q_pe,
                     std::span<const TokenRange> requests, const TensorView& o, Recorder* recorder) {
  DecodeParams params;
  const auto planned = timed(recorder, Phase::kPlan, [&]() -> Result<Plan> {
    params.q_nope = q_nope;
    params.q_pe = q_pe;
    params.cache = cache_;
    params.pages = page_table(requests);
    params.sm_scale = options_.model.sm_scale();
    params.o = o;
    const auto bytes = workspace_size(context, params);
    if (!bytes.ok()) return bytes.status();
    return plan(context, params, workspace_.reserve(*bytes));
  });
  if (!planned.ok()) return planned.status();
  Status status = timed(recorder, Phase::kDecodeAttention, [&] { return run(context, *planned, params); });
  if (recorder != nullptr) {
    const double keys = std::accumulate(lengths_.begin(), lengths_.end(), 0.0);
    const auto heads = static_cast<double>(q_nope.shape[1]);
    recorder->add_decode_flops(2.0 * keys * heads * (options_.model.d_qk() + options_.model.kv_lora_rank));
  }
  return status;
}

}  // namespace mla::cli::replay
