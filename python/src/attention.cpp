// SPDX-License-Identifier: Apache-2.0
// decode, decode_sparse, prefill and prefill_sparse. Each reads its fields in the order of the functions of the same
// names in python/libmla/ops.py and returns the outputs that the caller did not bring.
#include <tvm/ffi/reflection/registry.h>

#include <bit>

#include "arguments.h"
#include "outputs.h"
#include "plan.h"

namespace mla::python {
namespace {

constexpr FieldName kNamesOfAttention[] = {{"options.", ""},         {"o", "out"},     {"o.", "out."},
                                           {"q_nope", "q[0]"},       {"q_pe", "q[1]"}, {"pool.", ""},
                                           {"extra_pool.", "extra_"}};

int64_t last_extent(const TensorView& view) {
  return view.ndim > 0 ? view.shape[static_cast<size_t>(view.ndim - 1)] : 0;
}

template <class Params>
const TensorView& first_of_q(const Params& params) {
  return params.q.given() ? params.q : params.q_nope;
}

/// What the shapes say of the value's width. Of one row that holds the latent and the rotary part, where nothing says
/// how wide each is: the largest power of two, as in all models that there are.
int64_t value_width(const KvCache& cache, const TensorView& q, const TensorView& q_nope, const TensorView& q_pe) {
  const int64_t d_qk = q.given() ? last_extent(q) : last_extent(q_nope) + last_extent(q_pe);
  const KvLayout layout = kv_layout(cache.format);
  if (layout.value_has_rope) return d_qk;
  if (q_nope.given()) return last_extent(q_nope);
  if (cache.ckv.given()) return last_extent(cache.ckv);
  if (layout.nope_dim != 0) return layout.nope_dim;
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(d_qk)));
}

template <class Params>
void read_queries(Arguments& args, Params& params) {
  params.q = args.tensor("q", Bytes::kE4M3);
  params.q_nope = args.tensor({"q", "[0]"}, Bytes::kE4M3);
  params.q_pe = args.tensor({"q", "[1]"}, Bytes::kE4M3);
  params.q_scale = args.tensor("q_scale");
}

AttentionOptions read_options(Arguments& args, bool with_positions) {
  AttentionOptions options;
  options.attn_sink = args.tensor("attn_sink");
  options.logits_soft_cap = args.number("logits_soft_cap");
  if (!with_positions) return options;
  options.window_left = args.integer("window_left");
  options.alibi_slopes = args.tensor("alibi_slopes");
  return options;
}

template <class Params>
void read_common(Arguments& args, Params& params) {
  params.sm_scale = args.number("sm_scale");
  params.lse_base = args.lse_base();
  params.batch_invariant = args.boolean("batch_invariant");
}

/// out_dtype, out: `d_v` wide unless the caller says otherwise.
template <class Params>
void read_output(Arguments& args, Outputs& outputs, const TensorView& q, int64_t d_v, Params& params) {
  DType dtype = args.dtype("out_dtype");
  if (dtype == DType::kNone) dtype = q.dtype == DType::kE4M3 ? DType::kBF16 : q.dtype;
  params.o = outputs.tensor("out", dtype, {q.shape[0], q.shape[1], d_v}, q.device, Bytes::kE4M3);
}

/// A statistic of every query and head, and whether the caller wants it without bringing a tensor for it.
TensorView read_statistic(Arguments& args, Outputs& outputs, const char* field, const TensorView& q) {
  const bool wanted = args.boolean(field);
  return outputs.optional(field, wanted, DType::kF32, {q.shape[0], q.shape[1]}, q.device);
}

void decode(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("decode", packed);
  args.call_fields(kNamesOfAttention);
  const Call call = Call::read(args);
  Outputs outputs(args, call.outputs());
  DecodeParams params;
  read_queries(args, params);
  params.cache = args.cache("cache", "cache");
  params.pages.kv_len = args.integers("kv_len");
  params.pages.block_table = args.integers("block_table");
  params.pages.kv_indptr = args.integers("kv_indptr");
  params.pages.kv_indices = args.integers("kv_indices");
  params.qo_indptr = args.integers("qo_indptr");
  params.causal = args.boolean("causal");
  params.tree_mask = args.tensor("tree_mask");
  params.tree_parents = args.integers("tree_parents");
  params.options = read_options(args, true);
  params.context_parallel = args.context_parallel();
  read_common(args, params);
  const int32_t d_v = args.optional_count("d_v").value_or(
      static_cast<int32_t>(value_width(params.cache, params.q, params.q_nope, params.q_pe)));
  read_output(args, outputs, first_of_q(params), d_v, params);
  params.o_scale = args.tensor("o_scale");
  params.lse = read_statistic(args, outputs, "lse", first_of_q(params));
  args.end();
  call.carry_out(params);
  *result = outputs.take();
}

SparsePool read_pool(Arguments& args, const char* prefix, const char* path) {
  SparsePool pool;
  pool.cache = args.cache(prefix[0] == '\0' ? "cache" : "extra_cache", path);
  pool.indices = args.integers({prefix, "indices"});
  pool.topk_length = args.integers({prefix, "topk_length"});
  pool.topk_length_per = args.length_per({prefix, "topk_length_per"});
  return pool;
}

void decode_sparse(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("decode_sparse", packed);
  args.call_fields(kNamesOfAttention);
  const Call call = Call::read(args);
  Outputs outputs(args, call.outputs());
  DecodeSparseParams params;
  read_queries(args, params);
  params.pool = read_pool(args, "", "pool.cache");
  params.extra_pool = read_pool(args, "extra_", "extra_pool.cache");
  params.qo_indptr = args.integers("qo_indptr");
  params.options = read_options(args, false);
  read_common(args, params);
  const int32_t d_v = args.optional_count("d_v").value_or(
      static_cast<int32_t>(value_width(params.pool.cache, params.q, params.q_nope, params.q_pe)));
  read_output(args, outputs, first_of_q(params), d_v, params);
  params.o_scale = args.tensor("o_scale");
  params.lse = read_statistic(args, outputs, "lse", first_of_q(params));
  args.end();
  call.carry_out(params);
  *result = outputs.take();
}

void prefill(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("prefill", packed);
  args.call_fields(kNamesOfAttention);
  const Call call = Call::read(args);
  Outputs outputs(args, call.outputs());
  PrefillParams params;
  params.q = args.tensor("q");
  params.k = args.tensor("k");
  params.v = args.tensor("v");
  params.qo_indptr = args.integers("qo_indptr");
  params.kv_indptr = args.integers("kv_indptr");
  params.causal = args.boolean("causal");
  params.options = read_options(args, true);
  read_common(args, params);
  read_output(args, outputs, params.q, last_extent(params.v), params);
  params.lse = read_statistic(args, outputs, "lse", params.q);
  args.end();
  call.carry_out(params);
  *result = outputs.take();
}

void prefill_sparse(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("prefill_sparse", packed);
  args.call_fields(kNamesOfAttention);
  const Call call = Call::read(args);
  Outputs outputs(args, call.outputs());
  PrefillSparseParams params;
  params.q = args.tensor("q");
  params.kv = args.tensor("kv");
  params.indices = args.integers("indices");
  params.topk_length = args.integers("topk_length");
  params.options = read_options(args, false);
  read_common(args, params);
  const int32_t d_v = args.count("d_v");
  read_output(args, outputs, params.q, d_v, params);
  params.max_logits = read_statistic(args, outputs, "max_logits", params.q);
  params.lse = read_statistic(args, outputs, "lse", params.q);
  args.end();
  call.carry_out(params);
  *result = outputs.take();
}

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef()
      .def_packed("libmla.decode", decode)
      .def_packed("libmla.decode_sparse", decode_sparse)
      .def_packed("libmla.prefill", prefill)
      .def_packed("libmla.prefill_sparse", prefill_sparse);
}

}  // namespace
}  // namespace mla::python
