// SPDX-License-Identifier: Apache-2.0
// Offers FlashMLA's decode to Python (libmla.flash_mla): takes its tensors as the peer's callers pass them, and runs
// decode or decode_sparse for every KV head, with the plan that their metadata holds. One call from Python does it all,
// since on a GPU what the processor does before a launch takes longer than many launches.
#include <tvm/ffi/memory.h>
#include <tvm/ffi/reflection/registry.h>

#include <cmath>
#include <optional>
#include <utility>

#include "flash_mla_caches.h"
#include "flash_mla_metadata.h"
#include "plan.h"

namespace mla::python::flash_mla {
namespace {

constexpr FieldName kNamesOfDense[] = {
    {"o", "head_dim_v"},  // the output's width says it
    {"o", "out"},           {"kv_len", "cache_seqlens"}, {"cache.kv", "k_cache"},  {"cache.ckv_scale", "descale_k"},
    {"cache.", "k_cache."}, {"cache", "k_cache"},        {"q_scale", "descale_q"}, {"sm_scale", "softmax_scale"},
    {"options.", ""}};
constexpr FieldName kNamesOfSparse[] = {{"o", "head_dim_v"},
                                        {"o", "out"},
                                        {"pool.cache.kv", "k_cache"},
                                        {"pool.cache.ckv_scale", "descale_k"},
                                        {"pool.cache.", "k_cache."},
                                        {"pool.cache", "k_cache"},
                                        {"pool.", ""},
                                        {"extra_pool.cache.kv", "extra_k_cache"},
                                        {"extra_pool.cache.ckv_scale", "descale_k"},
                                        {"extra_pool.cache.", "extra_k_cache."},
                                        {"extra_pool.cache", "extra_k_cache"},
                                        {"extra_pool.indices", "extra_indices_in_kvcache"},
                                        {"extra_pool.", "extra_"},
                                        {"q_scale", "descale_q"},
                                        {"sm_scale", "softmax_scale"},
                                        {"options.", ""}};

/// Holds the arguments of one call.
struct Given {
  TensorView q, block_table, cache_seqlens, attn_sink, indices, extra_indices, topk_length, extra_topk_length;
  GivenCache k_cache{.name = "k_cache"};
  GivenCache extra_k_cache{.name = "extra_k_cache"};
  CacheForm form{};
  const MetadataObj* metadata = nullptr;
  int64_t head_dim_v = 0;
  std::optional<float> softmax_scale;
  bool causal = false;
  bool batch_invariant = false;
  TensorView out;
  bool out_is_new = false;  ///< whether nobody but this package's Python code has seen `out`
  TensorView lse;           ///< [b, h_q, s_q]
  TensorView descale_q;

  int64_t b() const { return q.shape[0]; }
  int64_t s_q() const { return q.shape[1]; }
  int64_t h_q() const { return q.shape[2]; }
  int64_t h_k() const { return k_cache.view.shape[2]; }
  /// Returns how many query heads a KV head has.
  int64_t group() const { return h_q() / h_k(); }
  bool sparse() const { return indices.given(); }
  bool has_extra() const { return extra_k_cache.view.given(); }
};

void read(Arguments& args, Given& given) {
  // Most arguments are None, and views are large.
  const auto tensor = [&](const char* field, TensorView& view) {
    if (!args.skip_none()) view = args.tensor(field);
  };
  const auto integers = [&](const char* field, TensorView& view) {
    if (!args.skip_none()) view = args.integers(field);
  };
  tensor("q", given.q);
  read_cache(args, given.k_cache);
  integers("block_table", given.block_table);
  integers("cache_seqlens", given.cache_seqlens);
  given.head_dim_v = args.integer("head_dim_v");
  given.metadata =
      args.object<MetadataObj>("tile_scheduler_metadata", "the FlashMLASchedMeta that get_mla_metadata returns");
  if (!args.skip_none()) given.softmax_scale = args.number("softmax_scale");
  given.causal = args.boolean("causal");
  given.form.is_fp8 = args.boolean("is_fp8_kvcache");
  integers("indices", given.indices);
  tensor("attn_sink", given.attn_sink);
  read_cache(args, given.extra_k_cache);
  integers("extra_indices_in_kvcache", given.extra_indices);
  integers("topk_length", given.topk_length);
  integers("extra_topk_length", given.extra_topk_length);
  tensor("out", given.out);
  given.out_is_new = args.boolean("out_is_new");
  given.batch_invariant = args.boolean("enable_batch_invariant");
  if (!args.skip_none()) given.form.kv_format = args.text("kv_format");
  tensor("descale_q", given.descale_q);
  tensor("descale_k", given.form.descale);
  tensor("lse", given.lse);
  args.end();
}

/// Returns the tensor [b, s_q, ...] as [b * s_q, ...].
TensorView rows_of(const Arguments& args, const char* field, const TensorView& view) {
  const int64_t b = view.shape[0];
  const int64_t s_q = view.shape[1];
  if (b > 1 && s_q > 1 && view.stride[0] != s_q * view.stride[1])
    args.fail("ValueError", field,
              "the queries of all requests at one stride, " + std::to_string(s_q) + " * " +
                  std::to_string(view.stride[1]) + " in dimension 0",
              std::to_string(view.stride[0]));
  TensorView rows = view;
  for (size_t i = 1; i + 1 < static_cast<size_t>(view.ndim); ++i) {
    rows.shape[i] = view.shape[i + 1];
    rows.stride[i] = view.stride[i + 1];
  }
  rows.shape[0] = b * s_q;
  rows.stride[0] = s_q > 1 ? view.stride[1] : view.stride[0];
  --rows.ndim;
  return rows;
}

void check_indices(const Arguments& args, const char* field, const TensorView& indices, const Given& given) {
  expect_dims(args, field, indices, "batch_size, seq_len_q, topk");
  if (indices.shape[0] != given.b() || indices.shape[1] != given.s_q())
    args.fail("ValueError", field, "[" + std::to_string(given.b()) + ", " + std::to_string(given.s_q()) + ", topk]",
              "shape " + shape_text(indices));
}

void check_dense(const Arguments& args, const Given& given) {
  for (const auto& [field, view] : {std::pair{"extra_k_cache", &given.extra_k_cache.view},
                                    {"extra_indices_in_kvcache", &given.extra_indices},
                                    {"topk_length", &given.topk_length},
                                    {"extra_topk_length", &given.extra_topk_length}})
    if (view->given())
      refuse(args, "ValueError", field, "has a meaning only with indices, that is in sparse attention");
  for (const auto& [field, view] :
       {std::pair{"block_table", &given.block_table}, {"cache_seqlens", &given.cache_seqlens}})
    if (!view->given()) refuse(args, "ValueError", field, "missing; without indices, all keys of a request are read");
}

void check_sparse(const Arguments& args, const Given& given) {
  if (given.causal)
    refuse(args, "ValueError", "causal", "indices already say what a query sees; expected False with them");
  check_indices(args, "indices", given.indices, given);
  if (!given.has_extra()) {
    for (const auto& [field, view] :
         {std::pair{"extra_indices_in_kvcache", &given.extra_indices}, {"extra_topk_length", &given.extra_topk_length}})
      if (view->given()) refuse(args, "ValueError", field, "has a meaning only with extra_k_cache");
    return;
  }
  if (!given.extra_indices.given())
    refuse(args, "ValueError", "extra_indices_in_kvcache", "missing; extra_k_cache needs it");
  expect_dims(args, "extra_k_cache", given.extra_k_cache.view, "num_blocks, page_block_size, num_heads_k, width");
  if (given.extra_k_cache.view.shape[2] != given.h_k())
    args.fail("ValueError", "extra_k_cache", std::to_string(given.h_k()) + " KV heads, as in k_cache",
              std::to_string(given.extra_k_cache.view.shape[2]));
  check_indices(args, "extra_indices_in_kvcache", given.extra_indices, given);
}

/// Checks what the operations cannot see, since they are given parts of the tensors.
void check(const Arguments& args, const Given& given) {
  expect_dims(args, "q", given.q, "batch_size, seq_len_q, num_heads_q, head_dim");
  expect_dims(args, "k_cache", given.k_cache.view, "num_blocks, page_block_size, num_heads_k, width");
  if (given.h_k() == 0 || given.h_q() % given.h_k() != 0)
    args.fail("ValueError", "k_cache", "KV heads that divide the " + std::to_string(given.h_q()) + " query heads",
              std::to_string(given.h_k()));
  given.sparse() ? check_sparse(args, given) : check_dense(args, given);
  if (given.h_k() > 1 && given.attn_sink.given() &&
      (given.attn_sink.ndim != 1 || given.attn_sink.shape[0] != given.h_q()))
    args.fail("ValueError", "attn_sink", "[" + std::to_string(given.h_q()) + "]",
              "shape " + shape_text(given.attn_sink));
}

void check_out(const Arguments& args, const Given& given) {
  const DType dtype = given.q.dtype == DType::kE4M3 ? DType::kBF16 : given.q.dtype;
  const TensorView& out = given.out;
  const TensorView expected = contiguous(nullptr, dtype, {given.b(), given.s_q(), given.h_q(), given.head_dim_v});
  if (out.dtype == dtype && out.ndim == 4 && out.shape == expected.shape) return;
  const auto text = [](const TensorView& view) {
    std::string shape = shape_text(view);
    shape.front() = '[';
    shape.back() = ']';
    return shape + " of " + type_name(dlpack_type(view.dtype));
  };
  args.fail("ValueError", "out", text(expected), text(out));
}

Config config_of(const Given& given) {
  const auto extent = [](const TensorView& view, size_t dim) { return view.given() ? view.shape[dim] : -1; };
  return {given.b(),
          given.s_q(),
          given.h_q(),
          given.k_cache.view.shape[1],
          given.h_k(),
          static_cast<int64_t>(given.causal),
          static_cast<int64_t>(given.form.is_fp8),
          extent(given.indices, 2),
          extent(given.extra_k_cache.view, 1),
          extent(given.extra_indices, 2),
          static_cast<int64_t>(given.batch_invariant)};
}

/// Takes lengths [b], or [b, s_q].
void set_lengths(const Arguments& args, const char* field, const TensorView& lengths, const Given& given,
                 SparsePool& pool) {
  if (!lengths.given()) return;
  const bool per_token = lengths.ndim == 2;
  if ((lengths.ndim != 1 && !per_token) || lengths.shape[0] != given.b() ||
      (per_token && lengths.shape[1] != given.s_q())) {
    const std::string b = std::to_string(given.b());
    args.fail("ValueError", field, "[" + b + "] or [" + b + ", " + std::to_string(given.s_q()) + "]",
              "shape " + shape_text(lengths));
  }
  pool.topk_length_per = per_token ? LengthPer::kToken : LengthPer::kRequest;
  pool.topk_length = per_token ? rows_of(args, field, lengths) : lengths;
}

void set_keys(const Arguments& args, const Given& given, DecodeParams& params) {
  // The operation takes as many requests as there are lengths.
  if (given.cache_seqlens.ndim != 1 || given.cache_seqlens.shape[0] != given.b())
    args.fail("ValueError", "cache_seqlens", "[" + std::to_string(given.b()) + "], as many as q has requests",
              "shape " + shape_text(given.cache_seqlens));
  params.pages = {.block_table = given.block_table, .kv_len = given.cache_seqlens};
  params.causal = given.causal;
}

void set_keys(const Arguments& args, const Given& given, DecodeSparseParams& params) {
  params.pool.indices = rows_of(args, "indices", given.indices);
  set_lengths(args, "topk_length", given.topk_length, given, params.pool);
  if (!given.has_extra()) return;
  params.extra_pool.indices = rows_of(args, "extra_indices_in_kvcache", given.extra_indices);
  set_lengths(args, "extra_topk_length", given.extra_topk_length, given, params.extra_pool);
}

void set_caches(const Arguments& args, const Given& given, int64_t kv_head, DecodeParams& params) {
  params.cache = cache_of(args, given.k_cache, given.form, kv_head);
}

void set_caches(const Arguments& args, const Given& given, int64_t kv_head, DecodeSparseParams& params) {
  params.pool.cache = cache_of(args, given.k_cache, given.form, kv_head);
  if (given.has_extra()) params.extra_pool.cache = cache_of(args, given.extra_k_cache, given.form, kv_head);
}

/// Runs the operation of these parameters for every KV head.
template <class Params>
void attend(Arguments& args, const Given& given, const char* operation, std::span<const FieldName> names) {
  args.call_fields(names.subspan(given.out_is_new ? 0 : 1));
  const Config config = config_of(given);
  ffi::ObjectPtr<PlanObj> plan = given.metadata == nullptr ? nullptr : given.metadata->plan_for(args, config);
  check_out(args, given);
  const bool planned = plan != nullptr;
  Params params;
  params.q_scale = given.descale_q;
  params.sm_scale = given.softmax_scale.value_or(static_cast<float>(1.0 / std::sqrt(given.form.d_qk)));
  params.lse_inf_without_keys = true;
  params.batch_invariant = given.batch_invariant;
  set_keys(args, given, params);
  const TensorView q = rows_of(args, "q", given.q);
  const TensorView out = rows_of(args, "out", given.out);
  TensorView lse = given.lse;
  std::swap(lse.shape[1], lse.shape[2]);
  std::swap(lse.stride[1], lse.stride[2]);
  lse = rows_of(args, "lse", lse);
  const int64_t group = given.group();
  for (int64_t kv_head = 0; kv_head < given.h_k(); ++kv_head) {
    const int64_t first = kv_head * group;
    params.q = narrow(q, 1, first, group);
    params.o = narrow(out, 1, first, group);
    params.lse = narrow(lse, 1, first, group);
    params.options.attn_sink =
        given.h_k() > 1 && given.attn_sink.given() ? narrow(given.attn_sink, 0, first, group) : given.attn_sink;
    set_caches(args, given, kv_head, params);
    if (plan == nullptr && given.metadata != nullptr) {
      plan = ffi::make_object<PlanObj>(ffi::Optional<ffi::ObjectRef>(), ffi::Optional<ffi::Tensor>());
      Call::planning(args, *plan).carry_out(params);
    }
    Call::with(args, plan.get()).carry_out(params);
  }
  if (!planned && plan != nullptr)
    given.metadata->remember({.plan = std::move(plan), .operation = operation, .config = config});
}

void with_kvcache(ffi::PackedArgs packed, ffi::Any* result) {
  static_cast<void>(result);
  Arguments args("flash_mla_with_kvcache", packed);
  Given given;
  read(args, given);
  check(args, given);
  given.form.d_qk = given.q.shape[3];
  if (given.sparse())
    attend<DecodeSparseParams>(args, given, "decode_sparse", kNamesOfSparse);
  else
    attend<DecodeParams>(args, given, "decode", kNamesOfDense);
}

TVM_FFI_STATIC_INIT_BLOCK() { ffi::reflection::GlobalDef().def_packed("libmla.flash_mla_with_kvcache", with_kvcache); }

}  // namespace
}  // namespace mla::python::flash_mla
