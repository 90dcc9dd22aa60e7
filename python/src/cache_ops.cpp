// SPDX-License-Identifier: Apache-2.0
// merge_states and the operations on caches. Each reads its fields in the order of the function of the same name in
// python/libmla/ops.py and returns the outputs that the caller did not bring.
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>

#include "arguments.h"
#include "outputs.h"
#include "plan.h"

namespace mla::python {
namespace {

constexpr FieldName kNamesOfMerge[] = {{"o", "out"}};
constexpr FieldName kNamesOfAppend[] = {{"kv", "rows"}, {"ckv", "rows[0]"}, {"kpe", "rows[1]"}};
constexpr FieldName kNamesOfRope[] = {{"q_nope", "q[0]"}, {"q_pe", "q[1]"}};
constexpr FieldName kNamesOfGather[] = {{"out_kv", "out"}, {"out_ckv", "out[0]"}, {"out_kpe", "out[1]"}};

int64_t extent(const TensorView& view, size_t dim) { return view.shape[dim]; }

template <class Params>
void read_rows(Arguments& args, Params& params) {
  params.kv = args.tensor("rows");
  params.ckv = args.tensor({"rows", "[0]"});
  params.kpe = args.tensor({"rows", "[1]"});
}

void merge_states(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("merge_states", packed);
  args.call_fields(kNamesOfMerge);
  const Call call = Call::read(args);
  Outputs outputs(args, call.outputs());
  MergeStatesParams params;
  params.partial_o = args.tensor("partial_o");
  params.partial_lse = args.tensor("partial_lse");
  params.lse_base = args.lse_base();
  params.in_place = args.boolean("in_place");
  DType dtype = args.dtype("out_dtype");
  if (dtype == DType::kNone) dtype = params.partial_o.dtype;
  const TensorView& states = params.partial_o;
  if (params.in_place) {  // they hold a state, so there is nothing to make
    params.o = args.tensor("out");
    params.lse = args.tensor("lse");
  } else {
    params.o = outputs.tensor("out", dtype, {extent(states, 1), extent(states, 2), extent(states, 3)}, states.device);
    params.lse = outputs.tensor("lse", DType::kF32, {extent(states, 1), extent(states, 2)}, states.device);
  }
  args.end();
  call.carry_out_unplanned(params, states.device);
  *result = outputs.take();
}

void append(ffi::PackedArgs packed, ffi::Any*) {
  Arguments args("append", packed);
  args.call_fields(kNamesOfAppend);
  const Call call = Call::read(args);
  AppendParams params;
  read_rows(args, params);
  params.slot_mapping = args.integers("slot_mapping", DType::kI64);
  params.cache = args.cache("cache", "cache");
  args.end();
  call.carry_out_unplanned(params, params.slot_mapping.device);
}

void append_rope(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("append_rope", packed);
  args.call_fields(kNamesOfRope);
  const Call call = Call::read(args);
  Outputs outputs(args, call.outputs());
  AppendRopeParams params;
  params.q_nope = args.tensor({"q", "[0]"});
  params.q_pe = args.tensor({"q", "[1]"});
  params.ckv = args.tensor("ckv");
  params.kpe = args.tensor("kpe");
  params.cos_sin = args.tensor("cos_sin");
  params.positions = args.integers("positions", DType::kI64);
  params.slot_mapping = args.integers("slot_mapping", DType::kI64);
  params.cache = args.cache("cache", "cache");
  params.interleaved = args.boolean("interleaved");
  params.q_scale = args.tensor("q_scale");
  DType dtype = args.dtype("q_out_dtype");
  if (dtype == DType::kNone) dtype = params.q_scale.given() ? DType::kE4M3 : params.q_nope.dtype;
  const TensorView& q = params.q_nope;
  const int64_t d_qk = extent(q, 2) + extent(params.q_pe, 2);
  if (q.given())
    params.q_out = outputs.tensor("q_out", dtype, {extent(q, 0), extent(q, 1), d_qk}, q.device, Bytes::kE4M3);
  else
    params.q_out = args.tensor("q_out", Bytes::kE4M3);
  args.end();
  call.carry_out_unplanned(params, params.slot_mapping.device);
  *result = outputs.take();
}

/// Rows that gather fills, as the last of out_indptr says where that can be read.
int32_t count_rows(Arguments& args, const TensorView& out_indptr, bool readable) {
  const int64_t last = out_indptr.shape[0] - 1;
  if (!out_indptr.given() || out_indptr.dtype != DType::kI32 || out_indptr.ndim != 1 || last < 0 ||
      out_indptr.data == nullptr)
    return 0;  // the library says what is wrong
  if (!readable) args.fail("ValueError", "num_rows", "a number, since out_indptr lies in the memory of a GPU", "None");
  return std::max(static_cast<const int32_t*>(out_indptr.data)[last * out_indptr.stride[0]], 0);
}

/// out_dtype and out, or out_ckv and out_kpe. New rows are whole ones.
void read_gathered(Arguments& args, Outputs& outputs, GatherParams& params, int32_t width,
                   std::optional<int32_t> num_rows, bool readable) {
  const DType dtype = args.dtype("out_dtype");
  const TensorView& some = params.cache.kv.given() ? params.cache.kv : params.cache.ckv;
  const bool floats = some.dtype == DType::kF16 || some.dtype == DType::kBF16;
  const DType chosen = dtype != DType::kNone ? dtype : floats ? some.dtype : DType::kBF16;
  params.out_ckv = args.tensor({"out", "[0]"});
  params.out_kpe = args.tensor({"out", "[1]"});
  if (params.out_ckv.given() || params.out_kpe.given() || !args.next_is_none())
    params.out_kv = args.tensor("out");
  else
    params.out_kv = outputs.tensor(
        "out", chosen, {num_rows ? *num_rows : count_rows(args, params.out_indptr, readable), width}, some.device);
}

/// Channels of a row, as shapes or the format say.
int32_t row_width(const KvCache& cache) {
  const KvLayout layout = kv_layout(cache.format);
  if (layout.nope_dim != 0) return layout.nope_dim + layout.rope_dim;
  if (cache.kv.given()) return static_cast<int32_t>(extent(cache.kv, 2));
  return static_cast<int32_t>(extent(cache.ckv, 2) + extent(cache.kpe, 2));
}

void gather(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("gather", packed);
  args.call_fields(kNamesOfGather);
  const Call call = Call::read(args);
  Outputs outputs(args, call.outputs());
  GatherParams params;
  params.cache = args.cache("cache", "cache");
  params.pages.kv_len = args.integers("kv_len");
  params.pages.block_table = args.integers("block_table");
  params.pages.kv_indptr = args.integers("kv_indptr");
  params.pages.kv_indices = args.integers("kv_indices");
  params.out_indptr = args.integers("out_indptr");
  params.token_start = args.integers("token_start");
  const std::optional<int32_t> num_rows = args.optional_count("num_rows", 0);
  read_gathered(args, outputs, params, row_width(params.cache), num_rows, !call.on_gpu(params.out_indptr.device));
  args.end();
  call.carry_out_unplanned(params, params.out_indptr.device);
  *result = outputs.take();
}

void copy_pages(ffi::PackedArgs packed, ffi::Any*) {
  Arguments args("copy_pages", packed);
  const Call call = Call::read(args);
  CopyPagesParams params;
  params.from = args.cache("from_cache", "from");
  params.from_pages = args.integers("from_pages");
  params.to = args.cache("to_cache", "to");
  params.to_pages = args.integers("to_pages");
  args.end();
  call.carry_out_unplanned(params, params.to_pages.device);
}

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef()
      .def_packed("libmla.merge_states", merge_states)
      .def_packed("libmla.append", append)
      .def_packed("libmla.append_rope", append_rope)
      .def_packed("libmla.gather", gather)
      .def_packed("libmla.copy_pages", copy_pages);
}

}  // namespace
}  // namespace mla::python
