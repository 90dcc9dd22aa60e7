// SPDX-License-Identifier: Apache-2.0
// Offers merge_states and the operations on caches to Python: says what Python calls their fields, and makes the
// outputs that the caller did not give.
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>

#include "operation.h"
#include "outputs.h"
#include "plan.h"

namespace mla::python {
namespace {

constexpr FieldName kNamesOfMerge[] = {{"o", "out"}};
constexpr FieldName kNamesOfAppend[] = {{"kv", "rows"}, {"ckv", "rows[0]"}, {"kpe", "rows[1]"}};
constexpr FieldName kNamesOfRope[] = {{"q_nope", "q[0]"}, {"q_pe", "q[1]"}};
constexpr FieldName kNamesOfGather[] = {{"out_kv", "out"}, {"out_ckv", "out[0]"}, {"out_kpe", "out[1]"}};
constexpr FieldName kNamesOfCopy[] = {{"from.", "from_cache."}, {"to.", "to_cache."}};
constexpr FieldName kNamesOfFinish[] = {{"o", "attention_out"}, {"finish.", ""}};
constexpr FieldName kNamesOfCompress[] = {
    {"indexer.kv", "indexer_cache"}, {"indexer.page_size", "indexer_page_size"}, {"indexer.format", "indexer_format"},
    {"indexer", "indexer_cache"},    {"append.q_nope", "append.q[0]"},           {"append.q_pe", "append.q[1]"}};

const Operation kMergeStates =
    Operation::of<MergeStatesParams>({.name = "merge_states", .names = kNamesOfMerge, .more = {"out_dtype"}});
const Operation kAppend = Operation::of<AppendParams>({.name = "append", .names = kNamesOfAppend});
const Operation kAppendRope = Operation::of<AppendRopeParams>(
    {.name = "append_rope", .names = kNamesOfRope, .e4m3 = {"q_out"}, .more = {"q_out_dtype"}});
const Operation kGather =
    Operation::of<GatherParams>({.name = "gather", .names = kNamesOfGather, .more = {"num_rows", "out_dtype"}});
const Operation kCopyPages = Operation::of<CopyPagesParams>({.name = "copy_pages", .names = kNamesOfCopy});
const Operation kFinishOutput =
    Operation::of<FinishOutputParams>({.name = "finish_output",
                                       .names = kNamesOfFinish,
                                       .e4m3 = {"out"},
                                       .more = {"return_scale", "out_dtype", "channels_per_scale"}});
const Operation kCompress = Operation::of<CompressParams>(
    {.name = "compress", .names = kNamesOfCompress, .e4m3 = {"append.q_out"}, .more = {"latent_dtype"}});

int64_t extent(const TensorView& view, size_t dim) { return view.shape[dim]; }

void merge_states(ffi::PackedArgs packed, ffi::Any* result) {
  OperationArguments args(kMergeStates, packed);
  const Call call = Call::read(args);
  auto params = args.fields<MergeStatesParams>();
  Outputs outputs(args, call.outputs());
  DType dtype = args.dtype("out_dtype");
  if (dtype == DType::kNone) dtype = params.partial_o.dtype;
  const TensorView& states = params.partial_o;
  if (!params.in_place) {  // else they hold a state, so there is nothing to make
    outputs.make(params.o, "out", dtype, {extent(states, 1), extent(states, 2), extent(states, 3)}, states.device);
    outputs.make(params.lse, "lse", DType::kF32, {extent(states, 1), extent(states, 2)}, states.device);
  }
  args.end();
  call.carry_out_unplanned(params, states.device);
  *result = outputs.take();
}

void append(ffi::PackedArgs packed, ffi::Any*) {
  OperationArguments args(kAppend, packed);
  const Call call = Call::read(args);
  const auto params = args.fields<AppendParams>();
  args.end();
  call.carry_out_unplanned(params, params.slot_mapping.device);
}

void append_rope(ffi::PackedArgs packed, ffi::Any* result) {
  OperationArguments args(kAppendRope, packed);
  const Call call = Call::read(args);
  auto params = args.fields<AppendRopeParams>();
  Outputs outputs(args, call.outputs());
  DType dtype = args.dtype("q_out_dtype");
  if (dtype == DType::kNone) dtype = params.q_scale.given() ? DType::kE4M3 : params.q_nope.dtype;
  const TensorView& q = params.q_nope;
  const int64_t d_qk = extent(q, 2) + (params.q_pe.given() ? extent(params.q_pe, 2) : 0);
  if (q.given()) outputs.make(params.q_out, "q_out", dtype, {extent(q, 0), extent(q, 1), d_qk}, q.device);
  args.end();
  call.carry_out_unplanned(params, params.slot_mapping.device);
  *result = outputs.take();
}

/// Returns how many rows gather fills: the last element of out_indptr. Raises ValueError if that is not `readable`
/// here.
int32_t count_rows(Arguments& args, const TensorView& out_indptr, bool readable) {
  const int64_t last = out_indptr.shape[0] - 1;
  if (!out_indptr.given() || out_indptr.dtype != DType::kI32 || out_indptr.ndim != 1 || last < 0 ||
      out_indptr.data == nullptr)
    return 0;  // the library says what is wrong
  if (!readable) args.fail("ValueError", "num_rows", "a number, since out_indptr lies in the memory of a GPU", "None");
  return std::max(static_cast<const int32_t*>(out_indptr.data)[last * out_indptr.stride[0]], 0);
}

/// Returns the channels of a row, as the format or the shapes say.
int32_t row_width(const KvCache& cache) {
  const KvLayout layout = kv_layout(cache.format);
  if (layout.nope_dim != 0) return layout.nope_dim + layout.rope_dim;
  if (cache.kv.given()) return static_cast<int32_t>(extent(cache.kv, 2));
  return static_cast<int32_t>(extent(cache.ckv, 2) + extent(cache.kpe, 2));
}

/// Makes the rows that gather fills, unless they are given; new rows hold the latent and the rotary channels.
void make_rows(OperationArguments& args, Outputs& outputs, GatherParams& params, bool readable) {
  const int32_t width = row_width(params.cache);
  const std::optional<int32_t> num_rows = args.optional_count("num_rows", 0);
  const TensorView& some = params.cache.kv.given() ? params.cache.kv : params.cache.ckv;
  const bool floats = some.dtype == DType::kF16 || some.dtype == DType::kBF16;
  DType dtype = args.dtype("out_dtype");
  if (dtype == DType::kNone) dtype = floats ? some.dtype : DType::kBF16;
  if (params.out_kv.given() || params.out_ckv.given() || params.out_kpe.given()) return;
  outputs.make(params.out_kv, "out", dtype,
               {num_rows ? *num_rows : count_rows(args, params.out_indptr, readable), width}, some.device);
}

void gather(ffi::PackedArgs packed, ffi::Any* result) {
  OperationArguments args(kGather, packed);
  const Call call = Call::read(args);
  auto params = args.fields<GatherParams>();
  Outputs outputs(args, call.outputs());
  make_rows(args, outputs, params, !call.on_gpu(params.out_indptr.device));
  args.end();
  call.carry_out_unplanned(params, params.out_indptr.device);
  *result = outputs.take();
}

void copy_pages(ffi::PackedArgs packed, ffi::Any*) {
  OperationArguments args(kCopyPages, packed);
  const Call call = Call::read(args);
  const auto params = args.fields<CopyPagesParams>();
  args.end();
  call.carry_out_unplanned(params, params.to_pages.device);
}

void compress(ffi::PackedArgs packed, ffi::Any* result) {
  OperationArguments args(kCompress, packed);
  const Call call = Call::read(args);
  auto params = args.fields<CompressParams>();
  Outputs outputs(args, call.outputs());
  DType dtype = args.dtype("latent_dtype");
  const TensorView& kv = params.kv;
  if (dtype == DType::kNone) dtype = kv.dtype;
  const int64_t d_latent = params.overlap ? extent(kv, 1) / 2 : extent(kv, 1);
  if (kv.given()) outputs.make(params.latent, "latent", dtype, {extent(kv, 0), d_latent}, kv.device);
  args.end();
  call.carry_out_unplanned(params, kv.device);
  *result = outputs.take();
}

void finish_output(ffi::PackedArgs packed, ffi::Any* result) {
  OperationArguments args(kFinishOutput, packed);
  const Call call = Call::read(args);
  auto params = args.fields<FinishOutputParams>();
  Outputs outputs(args, call.outputs());
  const TensorView& o = params.o;
  const bool quantizes = args.boolean("return_scale") || params.finish.scale.given();
  DType dtype = args.dtype("out_dtype");
  if (dtype == DType::kNone) dtype = quantizes ? DType::kE4M3 : o.dtype;
  const int64_t channels = args.count("channels_per_scale");
  outputs.make(params.out, "out", dtype, {extent(o, 0), extent(o, 1), extent(o, 2)}, o.device);
  if (quantizes)
    outputs.make(params.finish.scale, "scale", DType::kF32, {extent(o, 0), extent(o, 1), extent(o, 2) / channels},
                 o.device);
  args.end();
  call.carry_out_unplanned(params, o.device);
  *result = outputs.take();
}

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef()
      .def_packed("libmla.merge_states", merge_states)
      .def_packed("libmla.append", append)
      .def_packed("libmla.append_rope", append_rope)
      .def_packed("libmla.gather", gather)
      .def_packed("libmla.copy_pages", copy_pages)
      .def_packed("libmla.compress", compress)
      .def_packed("libmla.finish_output", finish_output);
  for (const Operation* operation :
       {&kMergeStates, &kAppend, &kAppendRope, &kGather, &kCopyPages, &kCompress, &kFinishOutput})
    define(*operation);
}

}  // namespace
}  // namespace mla::python
