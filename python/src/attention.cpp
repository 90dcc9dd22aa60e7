// SPDX-License-Identifier: Apache-2.0
// Offers decode, decode_sparse, prefill and prefill_sparse to Python: says what Python calls their fields, and makes
// the outputs that the caller did not give.
#include <tvm/ffi/reflection/registry.h>

#include <bit>

#include "operation.h"
#include "outputs.h"
#include "plan.h"

namespace mla::python {
namespace {

constexpr FieldName kNamesOfAttention[] = {{"options.", ""},
                                           {"o", "out"},
                                           {"o.", "out."},
                                           {"q_nope", "q[0]"},
                                           {"q_pe", "q[1]"},
                                           {"pool.cache.", "cache."},
                                           {"pool.", ""},
                                           {"extra_pool.cache.", "extra_cache."},
                                           {"extra_pool.", "extra_"},
                                           {"finish.", ""}};

const Operation kDecode = Operation::of<DecodeParams>({.name = "decode",
                                                       .names = kNamesOfAttention,
                                                       .e4m3 = {"q", "q_nope", "q_pe", "o"},
                                                       .more = {"d_v", "out_dtype", "return_lse"}});
// Keys that indices name have no positions, and those of prefill_sparse are never quantized.
const Operation kDecodeSparse = Operation::of<DecodeSparseParams>(
    {.name = "decode_sparse",
     .names = kNamesOfAttention,
     .e4m3 = {"q", "q_nope", "q_pe", "o"},
     .left_out = {"options.window_left", "options.alibi_slopes"},
     .more = {"d_v", "return_scale", "out_dtype", "channels_per_scale", "return_max_logits", "return_lse"}});
const Operation kPrefill = Operation::of<PrefillParams>(
    {.name = "prefill", .names = kNamesOfAttention, .e4m3 = {"q", "k", "v", "o"}, .more = {"out_dtype", "return_lse"}});
const Operation kPrefillSparse =
    Operation::of<PrefillSparseParams>({.name = "prefill_sparse",
                                        .names = kNamesOfAttention,
                                        .e4m3 = {"o"},
                                        .left_out = {"options.window_left", "options.alibi_slopes", "options.compute"},
                                        .more = {"d_v", "out_dtype", "return_max_logits", "return_lse"}});

int64_t last_extent(const TensorView& view) {
  return view.ndim > 0 ? view.shape[static_cast<size_t>(view.ndim - 1)] : 0;
}

template <class Params>
const TensorView& first_of_q(const Params& params) {
  return params.q.given() ? params.q : params.q_nope;
}

/// Returns the value's width, as far as the shapes and the format say it. If one row holds the latent and the rotary
/// part and nothing says how wide each is, it is the largest power of two in the row's width, as in all models that
/// there are.
int64_t value_width(const KvCache& cache, const TensorView& q, const TensorView& q_nope, const TensorView& q_pe) {
  const int64_t d_qk = q.given() ? last_extent(q) : last_extent(q_nope) + last_extent(q_pe);
  const KvLayout layout = kv_layout(cache.format);
  if (layout.value_has_rope) return d_qk;
  if (q_nope.given()) return last_extent(q_nope);
  if (cache.ckv.given()) return last_extent(cache.ckv);
  if (layout.nope_dim != 0) return layout.nope_dim;
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(d_qk)));
}

int32_t read_value_width(OperationArguments& args, int64_t of_shapes) {
  return args.optional_count("d_v").value_or(static_cast<int32_t>(of_shapes));
}

/// Makes the output [T, H, d_v] unless it is given. Unless the caller says otherwise, it is e4m3 where groups of it
/// have scales, and else has the queries' type, or bf16 for e4m3.
template <class Params>
void make_output(OperationArguments& args, Outputs& outputs, const TensorView& q, int64_t d_v, Params& params,
                 bool has_scales = false) {
  DType dtype = args.dtype("out_dtype");
  if (dtype == DType::kNone) dtype = has_scales ? DType::kE4M3 : q.dtype == DType::kE4M3 ? DType::kBF16 : q.dtype;
  outputs.make(params.o, "out", dtype, {q.shape[0], q.shape[1], d_v}, q.device);
}

/// Makes a statistic (lse, max_logits) of every query and head, [T, H] f32, unless it is given.
void make_statistic(Outputs& outputs, TensorView& statistic, const char* field, const TensorView& q) {
  outputs.make(statistic, field, DType::kF32, {q.shape[0], q.shape[1]}, q.device);
}

void decode(ffi::PackedArgs packed, ffi::Any* result) {
  OperationArguments args(kDecode, packed);
  const Call call = Call::read(args);
  auto params = args.fields<DecodeParams>();
  Outputs outputs(args, call.outputs());
  const TensorView& q = first_of_q(params);
  const int32_t d_v = read_value_width(args, value_width(params.cache, params.q, params.q_nope, params.q_pe));
  make_output(args, outputs, q, d_v, params);
  if (args.boolean("return_lse")) make_statistic(outputs, params.lse, "lse", q);
  args.end();
  call.carry_out(params);
  *result = outputs.take();
}

/// Makes max_logits and lse of sparse attention, where they are asked for.
template <class Params>
void make_sparse_statistics(OperationArguments& args, Outputs& outputs, const TensorView& q, Params& params) {
  const bool max_logits = args.boolean("return_max_logits") || params.max_logits.given();
  if (max_logits) make_statistic(outputs, params.max_logits, "max_logits", q);
  if (args.boolean("return_lse") || max_logits) make_statistic(outputs, params.lse, "lse", q);
}

void decode_sparse(ffi::PackedArgs packed, ffi::Any* result) {
  OperationArguments args(kDecodeSparse, packed);
  const Call call = Call::read(args);
  auto params = args.fields<DecodeSparseParams>();
  Outputs outputs(args, call.outputs());
  const TensorView& q = first_of_q(params);
  const int32_t d_v = read_value_width(args, value_width(params.pool.cache, params.q, params.q_nope, params.q_pe));
  const bool has_scales = args.boolean("return_scale") || params.finish.scale.given();
  make_output(args, outputs, q, d_v, params, has_scales);
  const int64_t channels = args.count("channels_per_scale");
  if (has_scales)
    outputs.make(params.finish.scale, "scale", DType::kF32, {q.shape[0], q.shape[1], d_v / channels}, q.device);
  make_sparse_statistics(args, outputs, q, params);
  args.end();
  call.carry_out(params);
  *result = outputs.take();
}

void prefill(ffi::PackedArgs packed, ffi::Any* result) {
  OperationArguments args(kPrefill, packed);
  const Call call = Call::read(args);
  auto params = args.fields<PrefillParams>();
  Outputs outputs(args, call.outputs());
  make_output(args, outputs, params.q, last_extent(params.v), params);
  if (args.boolean("return_lse")) make_statistic(outputs, params.lse, "lse", params.q);
  args.end();
  call.carry_out(params);
  *result = outputs.take();
}

void prefill_sparse(ffi::PackedArgs packed, ffi::Any* result) {
  OperationArguments args(kPrefillSparse, packed);
  const Call call = Call::read(args);
  auto params = args.fields<PrefillSparseParams>();
  Outputs outputs(args, call.outputs());
  const int32_t d_v = args.count("d_v");
  make_output(args, outputs, params.q, d_v, params);
  make_sparse_statistics(args, outputs, params.q, params);
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
  for (const Operation* operation : {&kDecode, &kDecodeSparse, &kPrefill, &kPrefillSparse}) define(*operation);
}

}  // namespace
}  // namespace mla::python
