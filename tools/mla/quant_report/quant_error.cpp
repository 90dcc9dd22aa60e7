// SPDX-License-Identifier: Apache-2.0
#include "mla/quant_report/quant_error.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <utility>

#include "mla/mla.h"
#include "mla/replay/generator.h"
#include "mla/text.h"

namespace mla::cli {
namespace {

constexpr int64_t kPageSize = 64;

template <class T>
T value_of(Result<T> result) {
  if (!result.ok()) throw UsageError("{}", result.status().message());
  return std::move(result).value();
}

void require(const Status& status) {
  if (!status.ok()) throw UsageError("{}", status.message());
}

// The activations of one request, as they are before any cache sees them.
struct Activations {
  ModelConfig model;
  std::vector<uint16_t> rows;  // bf16 [kv_len, d_qk]
  std::vector<float> q;        // [queries, H, d_qk], absorbed
};

ModelConfig shape_of(const char* preset, int32_t heads) {
  ModelConfig model = value_of(load_model(preset));
  model.num_attention_heads = heads;
  return model;
}

// q_nope [H, nope] into the latent space: q_nope . W_UK.
void absorb(const ModelConfig& model, const float* w_uk, const float* q_nope, float* q) {
  const int64_t rank = model.kv_lora_rank, nope = model.qk_nope_head_dim;
  for (int64_t h = 0; h < model.num_attention_heads; ++h) {
    float* out = q + h * model.d_qk();
    std::fill_n(out, rank, 0.0F);
    for (int64_t d = 0; d < nope; ++d) {
      const float* row = w_uk + (h * nope + d) * rank;
      const float factor = q_nope[h * nope + d];
      for (int64_t c = 0; c < rank; ++c) out[c] += factor * row[c];
    }
  }
}

Activations make_activations(const ModelConfig& model, const QuantOptions& options, int32_t request_index) {
  Activations made{.model = model, .rows = {}, .q = {}};
  const int64_t heads = model.num_attention_heads, d_qk = model.d_qk(), nope = model.qk_nope_head_dim;
  const replay::Generator rows(model, options.seed, DType::kBF16), queries(model, options.seed, DType::kF32);
  replay::Request request;
  request.input_length = options.kv_len;
  request.hash_ids.resize(static_cast<size_t>((options.kv_len + replay::kBlockTokens - 1) / replay::kBlockTokens));
  std::iota(request.hash_ids.begin(), request.hash_ids.end(), int64_t{request_index} << 32);
  const std::vector<uint64_t> seeds = rows.token_seeds(request, 0, 0, options.kv_len);

  made.rows.resize(static_cast<size_t>(options.kv_len * d_qk));
  for (int32_t t = 0; t < options.kv_len; ++t) rows.latent(seeds[static_cast<size_t>(t)], t, &made.rows[t * d_qk]);

  const std::vector<std::byte> w_uk = queries.weights().w_uk;
  made.q.resize(static_cast<size_t>(options.queries * heads * d_qk));
  std::vector<float> q_nope(static_cast<size_t>(heads * nope));
  for (int32_t i = 0; i < options.queries; ++i) {
    const int32_t position = options.kv_len - options.queries + i;
    float* q = made.q.data() + i * heads * d_qk;
    // Without projections the query is as wide as the row, and made in place.
    const bool direct = model.value_is_row;
    queries.query(seeds[static_cast<size_t>(position)], position,
                  {.q_nope = direct ? q : q_nope.data(),
                   .q_nope_stride_head = direct ? d_qk : nope,
                   .q_pe = q + model.kv_lora_rank,
                   .q_pe_stride_head = d_qk});
    if (!direct) absorb(model, reinterpret_cast<const float*>(w_uk.data()), q_nope.data(), q);
  }
  return made;
}

// How one format's cache is made.
struct Variant {
  CacheFormat format = CacheFormat::kBF16;
  const char* scales = "-";
  bool per_slot = false;  // fp8: four scales per token
  bool power_of_two = true;
  bool outer = false;  // nvfp4_ds_mla: with the outer scale of a calibrated layer
};

struct CacheMemory {
  std::vector<std::byte> bytes;
  std::vector<float> scales;
  KvCache cache;
  int64_t d_ckv = 0;
  int64_t bytes_per_token = 0;
};

// The scale that calibration would give for the first `width` channels of rows: the largest magnitude becomes 448.
float one_scale(const Activations& from, int64_t width) {
  float amax = 0.0F;
  for (size_t first = 0; first < from.rows.size(); first += static_cast<size_t>(from.model.d_qk()))
    for (size_t c = 0; c < static_cast<size_t>(width); ++c)
      amax = std::max(amax, std::abs(bf16_to_f32(from.rows[first + c])));
  return e4m3_scale(amax);
}

CacheMemory make_cache(const Activations& from, const Variant& variant, int64_t pages) {
  CacheMemory made;
  const KvLayout layout = kv_layout(variant.format);
  const int64_t d_qk = from.model.d_qk(), page = page_bytes(variant.format, d_qk, kPageSize, true);
  made.bytes.resize(static_cast<size_t>(pages * page));
  made.cache.format = variant.format;
  made.cache.power_of_two_scales = variant.power_of_two;
  made.bytes_per_token = row_bytes(variant.format, d_qk);
  // A bf16 row whose value is the whole row has no rotary part of its own.
  made.d_ckv = layout.is_packed()                   ? layout.nope_dim
               : !is_quantized(layout.nope.element) ? from.model.d_v()
                                                    : from.model.kv_lora_rank;
  switch (layout.nope.scale_place) {
    case ScalePlace::kNone:
      made.cache.kv = contiguous(made.bytes.data(), layout.nope.element, {pages, kPageSize, d_qk});
      break;
    case ScalePlace::kTensor: {
      // Two tensors in one: what four scales cover is the latent part alone.
      const int64_t rank = from.model.kv_lora_rank, scaled = variant.per_slot ? pages * kPageSize * 4 : 1;
      made.cache.ckv = made.cache.kpe = contiguous(made.bytes.data(), layout.nope.element, {pages, kPageSize, d_qk});
      made.cache.ckv.shape[2] = rank;
      made.cache.kpe.shape[2] = d_qk - rank;
      made.cache.kpe.data = made.bytes.data() + rank;
      made.scales.assign(static_cast<size_t>(scaled + 1), one_scale(from, d_qk));
      made.cache.kpe_scale = contiguous(made.scales.data() + scaled, DType::kF32, {1});
      made.cache.ckv_scale = variant.per_slot ? contiguous(made.scales.data(), DType::kF32, {pages, kPageSize, 4})
                                              : contiguous(made.scales.data(), DType::kF32, {1});
      if (variant.per_slot) made.bytes_per_token += 4 * static_cast<int64_t>(sizeof(float));
      break;
    }
    case ScalePlace::kRow:
      made.cache.kv = contiguous(made.bytes.data(), DType::kU8, {pages, kPageSize, layout.row_bytes});
      if (variant.outer) {
        made.scales = {one_scale(from, made.d_ckv) / kE2M1Max};
        made.cache.ckv_scale = contiguous(made.scales.data(), DType::kF32, {1});
      }
      break;
    case ScalePlace::kFooter:
      made.cache.kv = contiguous(made.bytes.data(), DType::kU8, {pages, page});
      made.cache.page_size = kPageSize;
      made.bytes_per_token += layout.scale_bytes_per_token;
      break;
  }
  return made;
}

struct Attention {
  std::vector<float> o, lse;
  std::string backend;
  int64_t bytes_per_token = 0;
};

Attention attend(const Context& context, const Activations& from, const Variant& variant, int64_t kv_len) {
  const int64_t pages = (kv_len + kPageSize - 1) / kPageSize, d_qk = from.model.d_qk(), d_v = from.model.d_v();
  const int64_t heads = from.model.num_attention_heads, queries = std::ssize(from.q) / (heads * d_qk);
  const CacheMemory memory = make_cache(from, variant, pages);

  std::vector<int64_t> slots(static_cast<size_t>(kv_len));
  std::iota(slots.begin(), slots.end(), int64_t{0});
  AppendParams append;
  append.ckv = append.kpe = contiguous(from.rows.data(), DType::kBF16, {kv_len, d_qk});
  append.ckv.shape[1] = memory.d_ckv;
  append.kpe.shape[1] = d_qk - memory.d_ckv;
  append.kpe.data = static_cast<uint16_t*>(append.kpe.data) + memory.d_ckv;
  if (memory.d_ckv == d_qk) append.kpe = {};
  append.slot_mapping = contiguous(slots.data(), DType::kI64, {kv_len});
  append.cache = memory.cache;
  require(run(context, append));

  std::vector<int32_t> table(static_cast<size_t>(pages));
  std::iota(table.begin(), table.end(), 0);
  const auto length = static_cast<int32_t>(kv_len);
  Attention result;
  result.o.resize(static_cast<size_t>(queries * heads * d_v));
  result.lse.resize(static_cast<size_t>(queries * heads));
  result.bytes_per_token = memory.bytes_per_token;
  DecodeParams params;
  params.q = contiguous(from.q.data(), DType::kF32, {queries, heads, d_qk});
  params.cache = memory.cache;
  params.pages.block_table = contiguous(table.data(), DType::kI32, {1, pages});
  params.pages.kv_len = contiguous(&length, DType::kI32, {1});
  params.sm_scale = from.model.sm_scale();
  params.o = contiguous(result.o.data(), DType::kF32, {queries, heads, d_v});
  params.lse = contiguous(result.lse.data(), DType::kF32, {queries, heads});
  std::vector<std::byte> workspace(value_of(workspace_size(context, params)));
  const Plan planned = value_of(plan(context, params, workspace));
  require(run(context, planned, params));
  result.backend = planned.backend();
  return result;
}

QuantError compare(const Attention& got, const Attention& bf16, const ModelConfig& model, const Variant& variant) {
  QuantError error{.cache = std::string(name(variant.format)),
                   .scales = variant.scales,
                   .backend = got.backend,
                   .d_qk = model.d_qk(),
                   .d_v = model.d_v(),
                   .bytes_per_token = got.bytes_per_token,
                   .bf16_bytes_per_token = bf16.bytes_per_token};
  const size_t rows = got.lse.size(), width = static_cast<size_t>(model.d_v());
  double output_squares = 0.0, lse_squares = 0.0;
  for (size_t row = 0; row < rows; ++row) {
    double difference = 0.0, norm = 0.0;
    for (size_t c = row * width; c < (row + 1) * width; ++c) {
      const double a = got.o[c], b = bf16.o[c];
      difference += (a - b) * (a - b);
      norm += b * b;
    }
    const double output = difference == 0.0 ? 0.0 : difference / norm;
    const double lse = std::abs(static_cast<double>(got.lse[row]) - static_cast<double>(bf16.lse[row]));
    output_squares += output;
    lse_squares += lse * lse;
    error.output_worst = std::max(error.output_worst, std::sqrt(output));
    error.lse_worst = std::max(error.lse_worst, lse);
  }
  error.output_rms = std::sqrt(output_squares / static_cast<double>(rows));
  error.lse_rms = std::sqrt(lse_squares / static_cast<double>(rows));
  return error;
}

// One more request's errors to those of `count` before it.
void add(const QuantError& one, int32_t count, QuantError& sum) {
  const auto root_mean = [&](double before, double now) {
    return std::sqrt((before * before * count + now * now) / (count + 1));
  };
  QuantError all = one;
  all.output_rms = root_mean(sum.output_rms, one.output_rms);
  all.lse_rms = root_mean(sum.lse_rms, one.lse_rms);
  all.output_worst = std::max(sum.output_worst, one.output_worst);
  all.lse_worst = std::max(sum.lse_worst, one.lse_worst);
  sum = all;
}

}  // namespace

std::vector<QuantError> quant_errors(const QuantOptions& options) {
  const Context context =
      value_of(Context::create({.num_threads = 0, .affinity = {}, .backend = options.backend, .device = "cpu"}));
  // The first of each is what the others are compared with.
  const std::vector<Variant> latent_variants = {
      {.format = CacheFormat::kBF16},
      {.format = CacheFormat::kF16},
      {.format = CacheFormat::kFP8, .scales = "one, f32"},
      {.format = CacheFormat::kFP8, .scales = "4 per token, f32", .per_slot = true, .power_of_two = false},
      {.format = CacheFormat::kFP8DsMla, .scales = "4 per token, powers of two", .power_of_two = true},
      {.format = CacheFormat::kFP8DsMla, .scales = "4 per token, f32", .power_of_two = false},
      {.format = CacheFormat::kNvFP4DsMla, .scales = "32 per token, e4m3"},
      {.format = CacheFormat::kNvFP4DsMla416, .scales = "32 per token, e4m3, outer", .outer = true},
      {.format = CacheFormat::kNvFP4DsMla368, .scales = "32 per token, e4m3, outer", .outer = true}};
  const std::vector<Variant> v4_variants = {
      {.format = CacheFormat::kBF16},
      {.format = CacheFormat::kFP8DsV4, .scales = "7 per token, powers of two"},
      {.format = CacheFormat::kFP8DsV41, .scales = "16 per token, powers of two"},
      {.format = CacheFormat::kFP4DsV41, .scales = "32 per token, e4m3"},
      {.format = CacheFormat::kFP8Nope, .scales = "4 per token, f32", .power_of_two = false},
      {.format = CacheFormat::kNvFP4DsV4, .scales = "28 per token, e4m3"},
      {.format = CacheFormat::kMxFP4DsV4, .scales = "14 per token, powers of two"}};
  std::vector<QuantError> errors;
  for (const auto& [preset, variants] :
       {std::pair("deepseek-v3", latent_variants), std::pair("deepseek-v4-flash", v4_variants)}) {
    std::vector<QuantError> of_shape(variants.size());
    for (int32_t request = 0; request < options.requests; ++request) {
      const Activations activations = make_activations(shape_of(preset, options.heads), options, request);
      Attention bf16;
      for (size_t i = 0; i < variants.size(); ++i) {
        const Attention got = attend(context, activations, variants[i], options.kv_len);
        if (i == 0) bf16 = got;
        add(compare(got, bf16, activations.model, variants[i]), request, of_shape[i]);
      }
    }
    errors.insert(errors.end(), of_shape.begin(), of_shape.end());
  }
  return errors;
}

}  // namespace mla::cli
